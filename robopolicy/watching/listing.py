"""The runs below a folder: which there are, in what state each is, and how well its policy does."""

import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from robopolicy.configuration import read_yaml
from robopolicy.core.errors import DataError, RobopolicyError, in_one_line
from robopolicy.core.run import RunFolder
from robopolicy.core.status import RUNNING, Phase, read_status, state_of, status_file
from robopolicy.core.storage import read_object, reading
from robopolicy.evaluation.intervals import wilson
from robopolicy.evaluation.report import judged_in
from robopolicy.runs import DESCRIPTION, RESULT

METRICS = "metrics.jsonl"
PARTS = frozenset({"checkpoint", "dataset", "resume", "base", "last", "tensorboard", "wandb", "videos", "data"})
"""Folders of a run in which no other run lies."""
DEEPEST, MOST = 8, 5000
"""Folders below the root that are searched, and runs that are listed."""
AGAIN = 2.0
"""Seconds for which a search of the folders is good."""
READ = (RESULT, METRICS, *DESCRIPTION)


@dataclass(frozen=True)
class Outcome:
    """How well a policy does: text as it is shown, value to sort by; final: no validation of a run that goes on."""

    text: str
    value: float
    policy: str
    final: bool = True


@dataclass(frozen=True)
class Run:
    """One run. identifier: its path below the root; began, updated: seconds since 1970; task: recipe or world."""

    identifier: str
    path: Path
    verb: str
    name: str
    seed: str
    task: str
    state: str
    began: float
    updated: float
    reason: str = ""
    outcome: Outcome | None = None
    phases: tuple[Phase, ...] = ()
    notes: tuple[str, ...] = ()
    command: str = ""

    @property
    def title(self) -> str:
        """The run in a few words."""
        return f"{self.verb} {self.name} {self.seed}".strip()

    @property
    def seconds(self) -> float:
        """How long the process has worked at it, or did."""
        return max(0.0, (time.time() if self.state == RUNNING else self.updated) - self.began)


class Listing:
    """The runs below `root`, read again where their files have changed. Links are not followed out of it."""

    def __init__(self, root: Path):
        self.root = root.resolve()
        self._searched = 0.0
        self._folders: dict[str, Path] = {}
        self._known: dict[str, tuple[Any, Run]] = {}

    def runs(self) -> list[Run]:
        """Return all runs, the latest first."""
        found = [self._run(name, path) for name, path in self._search().items()]
        return sorted(found, key=lambda run: run.updated, reverse=True)

    def run(self, identifier: str) -> Run | None:
        """Return the run of that identifier, None where there is none: no other path is ever opened."""
        path = self._search().get(identifier)
        return None if path is None else self._run(identifier, path)

    def _search(self) -> dict[str, Path]:
        if not self._folders or time.monotonic() - self._searched > AGAIN:
            found: dict[str, Path] = {}
            for place, folders, files in os.walk(self.root):
                path = Path(place)
                depth = len(path.relative_to(self.root).parts)
                kept = [name for name in sorted(folders) if name not in PARTS and not name.startswith(".")]
                folders[:] = kept if depth < DEEPEST and len(found) < MOST else []
                if set(DESCRIPTION) <= set(files) or "report.json" in files or status_file(path).is_file():
                    identifier = path.relative_to(self.root).as_posix()
                    found["" if identifier == "." else identifier] = path
            self._folders = found
            self._searched = time.monotonic()
        return self._folders

    def _run(self, identifier: str, path: Path) -> Run:
        mark = signature(path)
        known = self._known.get(identifier)
        if known is None or known[0] != mark:
            known = self._known[identifier] = (mark, read_run(identifier, path))
        run, told = known[1], read_status(path)
        return replace(run, state=state_of(path, told)) if run.state != "damaged" else run


def signature(path: Path) -> tuple[tuple[int, int], ...]:
    """Return what changes where a file of the run in a folder does."""
    found = []
    for file in (*(path / name for name in READ), status_file(path)):
        try:
            told = file.stat()
            found.append((told.st_mtime_ns, told.st_size))
        except OSError:
            found.append((0, 0))
    return tuple(found)


def read_run(identifier: str, path: Path) -> Run:
    """Return what the files of a run say; one whose files are damaged says that, as its state."""
    told = read_status(path)
    verb, name, seed = ("", "", *path.parts)[-3:]
    times = [time for time, _ in signature(path) if time]
    updated = max(times, default=0) / 1e9
    run = Run(identifier, path, verb, name, seed, "", state_of(path, told), updated, updated)
    try:
        with reading(path):
            versions = read_object(path / DESCRIPTION[1]) if (path / DESCRIPTION[1]).exists() else {}
            command = [str(word) for word in told.get("command", versions.get("command", ()))]
            described = path / DESCRIPTION[1]
            began = float(told.get("began", described.stat().st_mtime if described.exists() else updated))
            result = read_object(path / RESULT, DataError) if (path / RESULT).exists() else {}
            return replace(
                run,
                task=_task(path, command),
                began=began,
                reason=str(told.get("reason", "")),
                outcome=outcome_of(result) if result else so_far(path),
                phases=tuple(Phase(**phase) for phase in told.get("phases", ())),
                notes=tuple(str(note) for note in told.get("notes", ())),
                command=" ".join(("robopolicy", *command[1:])) if command else "",
            )
    except RobopolicyError as error:
        return replace(run, state="damaged", reason=in_one_line(error, 300))


def _task(path: Path, command: list[str]) -> str:
    """Return the recipe of a run that began with `command`, else its world."""
    for word in command:
        if found := re.fullmatch(r"\w*\.?recipe=(.+)", word):
            return found[1]
    config = read_yaml(path / DESCRIPTION[0]) if (path / DESCRIPTION[0]).exists() else {}
    world = config.get("world", {})
    return str(world.get("simulator") or world.get("name") or "") if isinstance(world, Mapping) else ""


def outcome_of(result: Mapping[str, Any]) -> Outcome | None:
    """Return how well the policy of a result does, the last one that was judged; None where none was."""
    if isinstance(result.get("finetune"), Mapping):  # of a demo
        return outcome_of(result["finetune"])
    judged = [(label, figures) for label, figures in judged_in(result) if label.endswith(", deterministic")]
    stages = result.get("stages", {})
    judged += [(name, told["policy"]["deterministic"]) for name, told in stages.items() if "policy" in told]
    if judged:
        label, figures = judged[-1]
        return _outcome(label.removesuffix(", deterministic"), figures)
    if isinstance(result.get("success_rate"), float) and isinstance(result.get("episodes"), int):  # of demonstrations
        rate, episodes = result["success_rate"], result["episodes"]
        low, high = wilson(round(rate * episodes), episodes)
        return _outcome("demonstrations", {"success_rate": rate, "low": low, "high": high})
    return None


def _outcome(policy: str, figures: Mapping[str, Any]) -> Outcome:
    if not figures.get("reports_success", True):
        value = float(figures["return_mean"])
        return Outcome(f"return {value:.4g} [{figures['return_low']:.4g}, {figures['return_high']:.4g}]", value, policy)
    rate, low, high = (float(figures[key]) for key in ("success_rate", "low", "high"))
    return Outcome(f"{rate:.1%} [{low:.1%}, {high:.1%}]", rate, policy)


def so_far(path: Path) -> Outcome | None:
    """Return the last validation of a run that has no result, None where there was none."""
    rows = [row for row in RunFolder(path).metrics() if "deterministic_success" in row]
    if not rows:
        return None
    rate, low, high = (float(rows[-1][f"deterministic_{key}"]) for key in ("success", "low", "high"))
    return Outcome(f"{rate:.1%} [{low:.1%}, {high:.1%}]", rate, "validation", final=False)
