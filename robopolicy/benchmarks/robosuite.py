"""CPU time of a control step of robosuite's tasks: robosuite's own step, and the same model with our controller.

All arms of a task start from the same seed, take the same actions and alternate in one process. Times are CPU seconds
of this process, so that load on the machine does not decide.
"""

import statistics
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from robopolicy.benchmarks.libero import STEPS, timed
from robopolicy.benchmarks.rounds import Measure, alternating, conditions, conditions_text, median_ratio
from robopolicy.configuration import Config
from robopolicy.core.progress import progress
from robopolicy.verbs.bench import Benchmark, Table
from sims.suites.robosuite_environment import open_robosuite

TASKS = ("Lift", "PickPlaceCan", "NutAssemblySquare")
OWN, OURS = "robosuite's own", "ours"
ARMS = {OWN: {"fast": False}, OURS: {}}
"""Arm -> options of its environment."""


def arm(task: str, options: Mapping[str, Any]) -> Measure:
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
            samples[task] = alternating(arms, rounds, partial(advance, note=task))
    return {"samples": samples, "settings": conditions(rounds, ("mujoco", "numpy", "robosuite", "numba"))}


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """Return CPU milliseconds of a control step by arm and task, and the ratios."""
    samples = figures["samples"]
    rows = [[name, *(f"{1e3 * statistics.median(samples[task][name]):.2f}" for task in samples)] for name in ARMS]
    rows.append(
        [
            "times as fast, median of the ratios within a round",
            *(f"{median_ratio(each, OWN, OURS):.1f}" for each in samples.values()),
        ]
    )
    return [Table(f"CPU ms per control step, median; {conditions_text(figures)}", ["arm", *samples], rows)]


BENCHMARK = Benchmark(
    "What does a control step of robosuite cost in its own environment and with our controller?",
    ("rounds",),
    benchmark,
    tables,
)
