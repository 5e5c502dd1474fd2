"""Self-contained run folder: `runs/<verb>/<name>/<seed>/{config.yaml, versions.json, metrics.jsonl, ...}`."""

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from robopolicy.core import replicas
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.storage import read_errors, read_json_lines, read_object, storage_errors, write_atomic, write_json

CLOCK = "clock.json"
MACHINE = ("threads", "processor", "instructions", "torch", "numpy", "mujoco")
"""Entries of versions.json that describe the machine and its packages and affect the last digits of results."""
REPRODUCIBILITY_KEYS = (*MACHINE, "shards", "replicas")
"""Entries of versions.json that affect results and may change where a run resumes. shards: finetune.shards; replicas:
number of data-parallel processes.
"""

_PACKAGES = ("robopolicy", "torch", "numpy", "mujoco", "diffusers", "gymnasium", "lerobot", "hydra-core")


class MetricsListener(Protocol):
    """Receives each line of metrics.jsonl as it is written, such as an experiment tracker; must not raise."""

    def __call__(self, record: dict[str, Any]) -> None:
        """Receive one line."""
        ...

    def finish(self) -> None:
        """Close; the run has ended."""
        ...


class RunFolder:
    """Folder of one run. Metrics are appended line by line, so a killed run loses at most the line being written."""

    def __init__(self, path: Path):
        self.path = Path(path)
        self._clock: Clock | None = None
        self.followers: list[MetricsListener] = []
        with storage_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)

    @property
    def checkpoint(self) -> Path:
        """Path of the checkpoint that the run produces."""
        return self.path / "checkpoint"

    @property
    def resume_point(self) -> Path:
        """Path of the trainer's state for resuming."""
        return self.path / "resume"

    def describe(self, config_yaml: str, seed: int, threads: int = 0, **grounds: int) -> None:
        """Write the composed config, the versions and the command that started the run.

        threads: number of torch threads, 0 for the current number; grounds: settings that are in
        `REPRODUCIBILITY_KEYS`.
        """
        write_atomic(self.path / "config.yaml", config_yaml)
        (self.path / CLOCK).unlink(missing_ok=True)
        setup = versions() | ({"threads": threads} if threads else {}) | grounds
        write_json(self.path / "versions.json", {"seed": seed, "command": sys.argv, **setup})

    def describe_resumption(self, threads: int = 0, **grounds: int) -> list[str]:
        """Return the changes since the run started that affect results, as "name was A, now B", and record them in
        versions.json; threads, grounds: as in `describe`.
        """
        path = self.path / "versions.json"
        began: dict[str, Any] = read_object(path) if path.exists() else {}
        now: dict[str, Any] = versions() | ({"threads": threads} if threads else {}) | grounds
        with read_errors(path):
            before: dict[str, Any] = {"shards": 1, "replicas": 1} | began | began.get("packages", {})
            after: dict[str, Any] = now | now["packages"]
            names = [
                name for name in REPRODUCIBILITY_KEYS if before.get(name) is not None and after.get(name) is not None
            ]
            changes = {name: after[name] for name in names if before[name] != after[name]}
            if changes and changes not in began.get("resumed_with", []):
                write_json(path, {**began, "resumed_with": [*began.get("resumed_with", []), changes]})
        return [f"{name} was {before[name]}, now {value}" for name, value in changes.items()]

    def log(self, record: dict[str, Any]) -> None:
        """Append one JSON line to metrics.jsonl; every value must be JSON-serialisable."""
        line = json.dumps(record, allow_nan=False) + "\n"
        with storage_errors(self.path / "metrics.jsonl"), open(self.path / "metrics.jsonl", "a") as file:
            file.write(line)
            file.flush()
        if self._clock is not None:
            self._clock.keep()
        for follower in self.followers:
            follower(record)

    def clock(self) -> "Clock":
        """Return the clock of this run, which continues from the last time logged by an interrupted process."""
        self._clock = self._clock or Clock(self.path / CLOCK)
        return self._clock

    def rewind(self, key: str, last: int) -> None:
        """Drop metric lines whose `key` exceeds `last`: those logged by a killed run after its last checkpoint."""
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return
        with read_errors(path):
            records = [record for record in self.metrics() if record.get(key, last) <= last]
        write_atomic(path, "".join(json.dumps(record) + "\n" for record in records))

    def metrics(self) -> list[dict[str, Any]]:
        """Read metrics.jsonl; a half-written last line (killed run) is ignored, any other bad line raises."""
        return read_json_lines(self.path / "metrics.jsonl")


class Clock:
    """Total working time of all processes of a run; time of a killed process after its last save is lost.

    path: file of the saved time.
    """

    def __init__(self, path: Path):
        self.path, self._began = path, time.perf_counter()
        with read_errors(path, "Delete it: the run's elapsed time then restarts at 0"):
            self._before = float(read_object(path)["seconds"]) if path.exists() else 0.0

    @property
    def seconds(self) -> float:
        """Seconds of this process and the previous ones."""
        return self._before + time.perf_counter() - self._began

    def keep(self) -> None:
        """Save the elapsed time."""
        write_json(self.path, {"seconds": self.seconds})


def versions() -> dict[str, Any]:
    """Return the package versions, machine and commit that results depend on.

    threads: number of torch threads; instructions: best CPU instruction set used by torch; None if torch is not loaded;
    replicas: number of data-parallel processes. They affect rounding.
    """
    return {
        "packages": _packages(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "processor_count": os.cpu_count(),
        **_torch(),
        "replicas": replicas.count(),
        "commit": _commit(),
    }


def grounds() -> dict[str, Any]:
    """Return the entries of `MACHINE` for this process."""
    entries = _packages() | {"processor": _processor()} | _torch()
    return {name: entries.get(name) for name in MACHINE}


def _processor() -> str:
    """Return the processor name reported by the system."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    model_names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(model_names, platform.processor() or platform.machine())


def _torch() -> dict[str, Any]:
    torch = sys.modules.get("torch")
    threads = None if torch is None else torch.get_num_threads()
    return {"threads": threads, "instructions": None if torch is None else torch.backends.cpu.get_cpu_capability()}


@cache
def _packages() -> dict[str, str]:
    """Return the versions of installed packages by name; reading them from files takes 20 ms."""
    package_versions: dict[str, str] = {}
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            package_versions[name] = importlib.metadata.version(name)
    return package_versions


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None


keep_former_names(__name__, {"GROUNDS": "REPRODUCIBILITY_KEYS", "Follower": "MetricsListener"})
