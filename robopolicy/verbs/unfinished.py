"""Episodes that an interrupted `collect` has recorded so far, in its run folder; valid for the same actor only.

The actor depends on files outside the settings that may change: checkpoints and user code.
"""

import importlib.util
import shutil
import warnings
from functools import cached_property
from pathlib import Path
from typing import Any

from robopolicy.configuration import Config
from robopolicy.core.errors import RobopolicyWarning
from robopolicy.core.randomness import NOISE_VERSION
from robopolicy.core.registry import add_working_folder, is_dotted
from robopolicy.core.structured import to_plain
from robopolicy.core.tensors import file_hash
from robopolicy.data.quality import fingerprint
from robopolicy.data.recording_cache import RecordingCache

FOLDER = "unfinished"


class Unfinished:
    """The finished episodes of a run, by part; folder: the run folder."""

    def __init__(self, config: Config, folder: Path):
        self.config, self.folder = config, folder / FOLDER
        self.played_later = 0

    @cached_property
    def _own(self) -> Path:
        """Return the folder of this actor's episodes; those of another actor are removed with a warning."""
        actor_folder = self.folder / fingerprint(_what_counts(self.config))
        if self.folder.exists() and not actor_folder.exists():
            warnings.warn(
                f"{self.folder.parent} contains unfinished episodes of another policy, or of another version of the "
                "world or controller: all are recorded again.",
                RobopolicyWarning,
                stacklevel=2,
            )
            self.remove()
        return actor_folder

    def part(self, name: str, episodes: int) -> RecordingCache:
        """Return the saved episodes of a part with this many `episodes`; warns if some exist and others are still to be
        played.
        """
        cache = RecordingCache(self._own / name)
        if cache.known and (remaining := len(cache.left(episodes))):
            self.played_later += remaining
            warnings.warn(
                f"{len(cache.known)} of {episodes} episodes are already recorded; the others are played now. "
                "run.overwrite=true records all again.",
                RobopolicyWarning,
                stacklevel=2,
            )
        return cache

    @property
    def figures(self) -> dict[str, int]:
        """Values for result.json: the number of episodes played after an interruption, if any."""
        return {"played_after_interruption": self.played_later} if self.played_later else {}

    def remove(self) -> None:
        """Remove all saved episodes: they are in the dataset."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _what_counts(config: Config) -> dict[str, Any]:
    """Return the inputs that may change under the same settings, JSON-serialisable: checkpoints and user files."""
    section, label = config.collect, config.collect.label_policy
    paths = (config.world.name, section.controller, label)
    sources = [file_hash(file) for name in paths if (file := source_of(name)) is not None]
    teacher = hashes(Path(label)) if label else {}
    return {"actor": acting_source(config), "teacher": teacher, "sources": sources, "noise": NOISE_VERSION}


def acting_source(config: Config) -> dict[str, Any]:
    """Return the identity of the actor, JSON-serialisable; for checkpoints the hashes of their files, independent of
    location.
    """
    section, plan = config.collect, config.plan
    if section.policy is not None:
        plan_entry = {} if plan.model is None else {"plan": {**to_plain(plan), "model": hashes(plan.model)}}
        return {"kind": "policy", "files": hashes(section.policy), **plan_entry}
    if section.controller:
        return {"kind": "controller", "path": section.controller}
    return {"kind": "expert"}


def source_of(name: str) -> Path | None:
    """Return the source file of an import path's module, or `name` if it is a file; None for registered names."""
    if not is_dotted(name):
        return Path(name) if name and Path(name).is_file() else None
    add_working_folder()
    try:
        module_spec = importlib.util.find_spec(name.partition(":")[0])
    except (ImportError, ValueError):  # who builds it says what is missing
        return None
    return (
        None
        if module_spec is None or module_spec.origin is None or not Path(module_spec.origin).is_file()
        else Path(module_spec.origin)
    )


def hashes(checkpoint: Path) -> dict[str, str]:
    """Return the hash of every file in a folder, by relative path."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    return {str(path.relative_to(checkpoint)): file_hash(path) for path in files}
