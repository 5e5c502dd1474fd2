"""List of the runs below a folder, with the state and success of each."""

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
from robopolicy.core.storage import read_errors, read_object
from robopolicy.evaluation.intervals import wilson
from robopolicy.evaluation.report import evaluated_policies_in
from robopolicy.evaluation.tables import evaluation_text
from robopolicy.runs import DESCRIPTION, RESULT

METRICS = "metrics.jsonl"
PARTS = frozenset({"checkpoint", "dataset", "resume", "base", "last", "tensorboard", "wandb", "videos", "data"})
"""Subfolders of a run that are not searched for further runs."""
DEEPEST, MOST = 8, 5000
"""Maximum search depth below the root, and maximum number of runs listed."""
AGAIN = 2.0
"""Seconds before the folders are searched again."""
READ = (RESULT, METRICS, *DESCRIPTION)


@dataclass(frozen=True)
class Outcome:
    """Success or return of a policy. text: for display; value: for sorting; final: False during training."""

    text: str
    value: float
    policy: str
    final: bool = True


@dataclass(frozen=True)
class Run:
    """One run. identifier: path below the root; began, updated: Unix time in seconds; task: recipe or world."""

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
        """Verb, name and seed."""
        return f"{self.verb} {self.name} {self.seed}".strip()

    @property
    def seconds(self) -> float:
        """Duration of the run so far, in seconds."""
        return max(0.0, (time.time() if self.state == RUNNING else self.updated) - self.began)


class Listing:
    """The runs below `root`; a run is read again when its files change. Symbolic links are not followed."""

    def __init__(self, root: Path):
        self.root = root.resolve()
        self._searched = 0.0
        self._folders: dict[str, Path] = {}
        self._known: dict[str, tuple[Any, Run]] = {}

    def runs(self) -> list[Run]:
        """Return all runs, most recently updated first."""
        runs = [self._run(name, path) for name, path in self._search().items()]
        return sorted(runs, key=lambda run: run.updated, reverse=True)

    def run(self, identifier: str) -> Run | None:
        """Return the run with this identifier, None if there is none. No other path is ever opened."""
        path = self._search().get(identifier)
        return None if path is None else self._run(identifier, path)

    def _search(self) -> dict[str, Path]:
        if not self._folders or time.monotonic() - self._searched > AGAIN:
            folders_of_runs: dict[str, Path] = {}
            for place, folders, files in os.walk(self.root):
                path = Path(place)
                depth = len(path.relative_to(self.root).parts)
                subfolders = [name for name in sorted(folders) if name not in PARTS and not name.startswith(".")]
                folders[:] = subfolders if depth < DEEPEST and len(folders_of_runs) < MOST else []
                if set(DESCRIPTION) <= set(files) or "report.json" in files or status_file(path).is_file():
                    identifier = path.relative_to(self.root).as_posix()
                    folders_of_runs["" if identifier == "." else identifier] = path
            self._folders = folders_of_runs
            self._searched = time.monotonic()
        return self._folders

    def _run(self, identifier: str, path: Path) -> Run:
        mark = signature(path)
        entry = self._known.get(identifier)
        if entry is None or entry[0] != mark:
            entry = self._known[identifier] = (mark, read_run(identifier, path))
        run, status = entry[1], read_status(path)
        return replace(run, state=state_of(path, status)) if run.state != "damaged" else run


def signature(path: Path) -> tuple[tuple[int, int], ...]:
    """Return modification times and sizes of the files of a run."""
    parts = []
    for file in (*(path / name for name in READ), status_file(path)):
        try:
            file_status = file.stat()
            parts.append((file_status.st_mtime_ns, file_status.st_size))
        except OSError:
            parts.append((0, 0))
    return tuple(parts)


def read_run(identifier: str, path: Path) -> Run:
    """Read the files of a run; a run with damaged files has the state "damaged"."""
    status = read_status(path)
    verb, name, seed = ("", "", *path.parts)[-3:]
    times = [time for time, _ in signature(path) if time]
    updated = max(times, default=0) / 1e9
    run = Run(identifier, path, verb, name, seed, "", state_of(path, status), updated, updated)
    try:
        with read_errors(path):
            versions = read_object(path / DESCRIPTION[1]) if (path / DESCRIPTION[1]).exists() else {}
            command = [str(word) for word in status.get("command", versions.get("command", ()))]
            described = path / DESCRIPTION[1]
            began = float(status.get("began", described.stat().st_mtime if described.exists() else updated))
            result = read_object(path / RESULT, DataError) if (path / RESULT).exists() else {}
            return replace(
                run,
                task=_task(path, command),
                began=began,
                reason=str(status.get("reason", "")),
                outcome=outcome_of(result) if result else so_far(path),
                phases=tuple(Phase(**phase) for phase in status.get("phases", ())),
                notes=tuple(str(note) for note in status.get("notes", ())),
                command=" ".join(("robopolicy", *command[1:])) if command else "",
            )
    except RobopolicyError as error:
        return replace(run, state="damaged", reason=in_one_line(error, 300))


def _task(path: Path, command: list[str]) -> str:
    """Return the recipe named in `command`, else the world in config.yaml."""
    for word in command:
        if match := re.fullmatch(r"\w*\.?recipe=(.+)", word):
            return match[1]
    config = read_yaml(path / DESCRIPTION[0]) if (path / DESCRIPTION[0]).exists() else {}
    world = config.get("world", {})
    return str(world.get("simulator") or world.get("name") or "") if isinstance(world, Mapping) else ""


def outcome_of(result: Mapping[str, Any]) -> Outcome | None:
    """Return the last evaluation in a result; None if there is none."""
    if isinstance(result.get("finetune"), Mapping):  # of a demo
        return outcome_of(result["finetune"])
    evaluations = [
        (label, figures) for label, figures in evaluated_policies_in(result) if label.endswith(", deterministic")
    ]
    stages = result.get("stages", {})
    evaluations += [(name, stage["policy"]["deterministic"]) for name, stage in stages.items() if "policy" in stage]
    if evaluations:
        label, figures = evaluations[-1]
        return _outcome(label.removesuffix(", deterministic"), figures)
    if isinstance(result.get("success_rate"), float) and isinstance(result.get("episodes"), int):  # of demonstrations
        rate, episodes = result["success_rate"], result["episodes"]
        low, high = wilson(round(rate * episodes), episodes)
        return _outcome("demonstrations", {"success_rate": rate, "low": low, "high": high})
    return None


def _outcome(policy: str, figures: Mapping[str, Any]) -> Outcome:
    value = figures["success_rate"] if figures.get("reports_success", True) else figures["return_mean"]
    return Outcome(evaluation_text(figures), float(value), policy)


def so_far(path: Path) -> Outcome | None:
    """Return the last validation in metrics.jsonl, for a run without a result; None if there is none."""
    rows = [row for row in RunFolder(path).metrics() if "deterministic_success" in row]
    if not rows:
        return None
    rate, low, high = (float(rows[-1][f"deterministic_{key}"]) for key in ("success", "low", "high"))
    return replace(_outcome("validation", {"success_rate": rate, "low": low, "high": high}), final=False)
