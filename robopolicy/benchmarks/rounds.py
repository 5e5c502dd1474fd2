"""Arms of a benchmark that alternate in one process, so that load on the machine falls on all of them."""

import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

Measure = Callable[[], float]
"""Measures an arm once and returns the result, such as CPU seconds."""


def alternating(arms: Mapping[str, Measure], rounds: int, advance: Callable[[], object]) -> dict[str, list[float]]:
    """Measure every arm `rounds` times in turns, after a round that is not counted; returns the results [rounds] by
    arm. advance: called after every round.
    """
    samples: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds + 1):
        for name, measure in arms.items():
            result = measure()
            if number:
                samples[name].append(result)
        advance()
    return samples


def median_ratio(samples: Mapping[str, Sequence[float]], slow: str, fast: str) -> float:
    """Return the median over rounds of the result of `slow` divided by that of `fast`, so that load cancels out."""
    return statistics.median(b / a for a, b in zip(samples[fast], samples[slow], strict=True))


def conditions(rounds: int, packages: Sequence[str]) -> dict[str, Any]:
    """Return the number of rounds, the machine, and the versions of Python and packages."""
    settings = {"rounds": rounds, "machine": platform.machine(), "python": platform.python_version()}
    return settings | {package: version(package) for package in packages}


def conditions_text(figures: Mapping[str, Any]) -> str:
    """Return the `settings` of a benchmark's figures as text."""
    return ", ".join(f"{name} {value}" for name, value in figures["settings"].items())
