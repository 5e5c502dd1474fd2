"""A run folder that explains itself: `runs/<verb>/<name>/<seed>/{config.yaml, versions.json, metrics.jsonl, ...}`."""

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

from robopolicy.core.storage import read_json_lines, read_object, reading, storage_errors, write_atomic, write_json

CLOCK = "clock.json"
GROUNDS = ("threads", "processor", "instructions", "torch", "numpy", "mujoco")
"""What the last digits of a computation depend on, of what versions.json says."""

_PACKAGES = ("robopolicy", "torch", "numpy", "mujoco", "diffusers", "gymnasium", "lerobot", "hydra-core")


class Follower(Protocol):
    """Sees each line of metrics.jsonl as it is written, such as an experiment tracker; must not raise."""

    def __call__(self, record: dict[str, Any]) -> None:
        """See one line."""
        ...

    def finish(self) -> None:
        """Close; the run has ended."""
        ...


class RunFolder:
    """The folder of one run. Metrics are appended line by line, so a kill loses at most the line being written."""

    def __init__(self, path: Path):
        self.path = Path(path)
        self._clock: Clock | None = None
        self.followers: list[Follower] = []
        with storage_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)

    @property
    def checkpoint(self) -> Path:
        """Where the policy (or world model) that the run produces lives."""
        return self.path / "checkpoint"

    @property
    def resume_point(self) -> Path:
        """Where the trainer keeps what it needs to go on after a kill."""
        return self.path / "resume"

    def describe(self, config_yaml: str, seed: int, threads: int = 0) -> None:
        """Write the composed config, the versions and the command that started the run.

        threads: of torch, 0 for as many as it has now.
        """
        write_atomic(self.path / "config.yaml", config_yaml)
        (self.path / CLOCK).unlink(missing_ok=True)
        found = versions() | ({"threads": threads} if threads else {})
        write_json(self.path / "versions.json", {"seed": seed, "command": sys.argv, **found})

    def describe_resumption(self, threads: int = 0) -> list[str]:
        """Return what numbers depend on and has changed since the run began, "name was A, now B", and add it to
        versions.json; threads: as in `describe`.
        """
        path = self.path / "versions.json"
        began: dict[str, Any] = read_object(path) if path.exists() else {}
        now: dict[str, Any] = versions() | ({"threads": threads} if threads else {})
        with reading(path):
            before: dict[str, Any] = began | began.get("packages", {})
            after: dict[str, Any] = now | now["packages"]
            known = [name for name in GROUNDS if before.get(name) is not None and after.get(name) is not None]
            changed = {name: after[name] for name in known if before[name] != after[name]}
            if changed and changed not in began.get("resumed_with", []):
                write_json(path, {**began, "resumed_with": [*began.get("resumed_with", []), changed]})
        return [f"{name} was {before[name]}, now {value}" for name, value in changed.items()]

    def log(self, record: dict[str, Any]) -> None:
        """Append one JSON line to metrics.jsonl; every value must be a JSON value."""
        line = json.dumps(record, allow_nan=False) + "\n"
        with storage_errors(self.path / "metrics.jsonl"), open(self.path / "metrics.jsonl", "a") as file:
            file.write(line)
            file.flush()
        if self._clock is not None:
            self._clock.keep()
        for follower in self.followers:
            follower(record)

    def clock(self) -> "Clock":
        """Return the clock of this run, which goes on from what a killed process had logged last."""
        self._clock = self._clock or Clock(self.path / CLOCK)
        return self._clock

    def rewind(self, key: str, last: int) -> None:
        """Drop metric lines whose `key` exceeds `last`: what a killed run logged after its last checkpoint."""
        if not (self.path / "metrics.jsonl").exists():
            return
        kept = [record for record in self.metrics() if record.get(key, last) <= last]
        write_atomic(self.path / "metrics.jsonl", "".join(json.dumps(record) + "\n" for record in kept))

    def metrics(self) -> list[dict[str, Any]]:
        """Read metrics.jsonl; a half-written last line (killed run) is ignored, any other bad line raises."""
        return read_json_lines(self.path / "metrics.jsonl")


class Clock:
    """How long processes have worked at a run; what a killed one did after it was last kept is not known.

    path: where that is kept.
    """

    def __init__(self, path: Path):
        self.path, self._began = path, time.perf_counter()
        with reading(path, "Remove it: the run's clock then begins anew"):
            self._before = float(read_object(path)["seconds"]) if path.exists() else 0.0

    @property
    def seconds(self) -> float:
        """Of this process and those before it."""
        return self._before + time.perf_counter() - self._began

    def keep(self) -> None:
        """Write down how long it has been."""
        write_json(self.path, {"seconds": self.seconds})


def versions() -> dict[str, Any]:
    """Return the versions, machine and commit that a number depends on.

    threads: of torch; instructions: the processor's best that torch uses (both round sums in their own way), None where
    torch is not loaded.
    """
    return {
        "packages": _packages(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "processor_count": os.cpu_count(),
        **_torch(),
        "commit": _commit(),
    }


def _processor() -> str:
    """Return the processor's name as the system knows it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _torch() -> dict[str, Any]:
    torch = sys.modules.get("torch")
    threads = None if torch is None else torch.get_num_threads()
    return {"threads": threads, "instructions": None if torch is None else torch.backends.cpu.get_cpu_capability()}


@cache
def _packages() -> dict[str, str]:
    """Return the versions of what is installed, by name; they are read from files, for 20 ms."""
    found: dict[str, str] = {}
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None
