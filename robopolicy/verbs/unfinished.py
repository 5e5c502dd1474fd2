"""What `collect` has recorded so far, in its run's folder, and who acted there: another actor begins anew.

That depends on files beside the settings, which may change: checkpoints, and code that the user writes.
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
from robopolicy.data.kept import Kept
from robopolicy.data.quality import fingerprint

FOLDER = "unfinished"


class Unfinished:
    """The episodes of a run that have ended, part by part; folder: the run's."""

    def __init__(self, config: Config, folder: Path):
        self.config, self.folder = config, folder / FOLDER
        self.played_later = 0

    @cached_property
    def _own(self) -> Path:
        """Where this actor's are; the remains of another one are removed, which is said."""
        own = self.folder / fingerprint(_what_counts(self.config))
        if self.folder.exists() and not own.exists():
            warnings.warn(
                f"{self.folder.parent} holds unfinished episodes of another policy, or of other code of a world or "
                "controller: all are recorded anew.",
                RobopolicyWarning,
                stacklevel=2,
            )
            self.remove()
        return own

    def part(self, name: str, episodes: int) -> Kept:
        """Return what is kept of a part of so many episodes; that some are, and others will be played, is said."""
        kept = Kept(self._own / name)
        if kept.known and (left := len(kept.left(episodes))):
            self.played_later += left
            warnings.warn(
                f"{len(kept.known)} of {episodes} episodes are recorded already, and the others are played now; "
                "run.overwrite=true records all anew.",
                RobopolicyWarning,
                stacklevel=2,
            )
        return kept

    @property
    def figures(self) -> dict[str, int]:
        """What result.json says: how many episodes were played after the run was broken off, where any were."""
        return {"played_after_interruption": self.played_later} if self.played_later else {}

    def remove(self) -> None:
        """Drop everything: it is in the dataset."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _what_counts(config: Config) -> dict[str, Any]:
    """Return what may have changed under the same settings, JSON-ready: checkpoints, and files that the user writes."""
    section, label = config.collect, config.collect.label_policy
    named = (config.world.name, section.controller, label)
    sources = [file_hash(file) for name in named if (file := source_of(name)) is not None]
    teacher = hashes(Path(label)) if label else {}
    return {"actor": who_acts(config), "teacher": teacher, "sources": sources, "noise": NOISE_VERSION}


def who_acts(config: Config) -> dict[str, Any]:
    """Return who acts, JSON-ready; of checkpoints their files' hashes, wherever they lie."""
    section, plan = config.collect, config.plan
    if section.policy is not None:
        ahead = {} if plan.model is None else {"plan": {**to_plain(plan), "model": hashes(plan.model)}}
        return {"kind": "policy", "files": hashes(section.policy), **ahead}
    if section.controller:
        return {"kind": "controller", "path": section.controller}
    return {"kind": "expert"}


def source_of(name: str) -> Path | None:
    """Return the file of a dotted path's module, or the file that `name` is; None for what is registered."""
    if not is_dotted(name):
        return Path(name) if name and Path(name).is_file() else None
    add_working_folder()
    try:
        found = importlib.util.find_spec(name.partition(":")[0])
    except (ImportError, ValueError):  # who builds it says what is missing
        return None
    return None if found is None or found.origin is None or not Path(found.origin).is_file() else Path(found.origin)


def hashes(checkpoint: Path) -> dict[str, str]:
    """Return the hash of every file in a folder, by its path there."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    return {str(path.relative_to(checkpoint)): file_hash(path) for path in files}
