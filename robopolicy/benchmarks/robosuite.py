"""CPU time of a control step of robosuite's tasks: robosuite's own step, and the same model with our controller.

All arms of a task start from the same seed, take the same actions and alternate in one process. Times are CPU seconds
of this process, so that load on the machine does not decide.
"""

import platform
import statistics
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from robopolicy.benchmarks.libero import STEPS, timed
from robopolicy.configuration import Config
from robopolicy.core.progress import progress
from robopolicy.verbs.bench import Benchmark, Table
from sims.suites.robosuite_environment import open_robosuite

TASKS = ("Lift", "PickPlaceCan", "NutAssemblySquare")
OWN, OURS = "robosuite's own", "ours"
ARMS = {OWN: {"fast": False}, OURS: {}}
"""Arm -> options of its environment."""
RATIO = f"{OURS} / {OWN}"
Arm = Callable[[], float]
"""Returns CPU seconds per control step."""


def arm(task: str, options: Mapping[str, Any]) -> Arm:
    """Measure an environment of a task."""
    environment = open_robosuite(task, options)
    return lambda: timed(lambda: environment.reset(seed=0), environment.step, STEPS)


def benchmark(config: Config, root: Path) -> dict[str, Any]:
    """Measure every arm of every task bench.rounds times, alternating, after a round that is not counted."""
    samples: dict[str, dict[str, list[float]]] = {}
    rounds = config.bench.rounds
    with progress("bench robosuite", len(TASKS) * (rounds + 1)) as advance:
        for task in TASKS:
            arms = {name: arm(task, options) for name, options in ARMS.items()}
            samples[task] = {name: [] for name in arms}
            for number in range(rounds + 1):
                for name, measure in arms.items():
                    seconds = measure()
                    if number:
                        samples[task][name].append(seconds)
                advance(note=task)
    settings = {"rounds": rounds, "machine": platform.machine(), "python": platform.python_version()}
    packages = ("mujoco", "numpy", "robosuite", "numba")
    return {"samples": samples, "settings": settings | {package: version(package) for package in packages}}


def times(figures: Mapping[str, Any], task: str) -> float:
    """Return the median of the ratio of CPU times within a round, so that a load on the machine cancels out."""
    rows = figures["samples"][task]
    return statistics.median(slow / fast for fast, slow in zip(rows[OURS], rows[OWN], strict=True))


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """Return CPU milliseconds of a control step by arm and task, and the ratios."""
    samples = figures["samples"]
    settings = ", ".join(f"{name} {value}" for name, value in figures["settings"].items())
    rows = [[name, *(f"{1e3 * statistics.median(samples[task][name]):.2f}" for task in samples)] for name in ARMS]
    rows.append(
        ["times as fast, median of the ratios within a round", *(f"{times(figures, task):.1f}" for task in samples)]
    )
    return [Table(f"CPU ms per control step, median; {settings}", ["arm", *samples], rows)]


BENCHMARK = Benchmark(
    "What does a control step of robosuite cost in its own environment and with our controller?",
    ("rounds",),
    benchmark,
    tables,
)
