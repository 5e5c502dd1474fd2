"""Stopping rule of fine-tuning: whether a run continues, and why it ended.

When success is measured both in imagination and in the real environment, the real one decides: the run continues while
it rises, however much more is imagined. On push_cube from images a gap of 25 points at 53 % real success was followed
by 94 %; pulling the policy back to its base at that gap, as a former version did, ended at 46 %.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from robopolicy.core.former_names import FormerName, accept_former_arguments, keep_former_names


class EndReason(StrEnum):
    """Reason why a run ended."""

    TARGET = "target reached"
    DIVERGED = "real and imagined success diverge without real gain"
    PATIENCE = "patience"
    ITERATIONS = "all iterations done"

    PARTED = FormerName("DIVERGED")

    @classmethod
    def _missing_(cls, value: object) -> "EndReason | None":
        # Resume points of version 0.1 contain this text.
        return cls.DIVERGED if value == "gap with no real gain" else None


@dataclass(frozen=True)
class StoppingSettings:
    """Stopping settings of a run.

    watched: whether success is also measured in the real environment, and only that counts; patience: number of
    consecutive evaluations without gain that ends the run, 0 to disable. A watched run gains when its real success
    exceeds the best or the previous evaluation beyond chance; any other run gains on a new best score.
    """

    patience: int = 0
    watched: bool = True


class StoppingRule:
    """Tracks the evaluations of one run. target: success that ends the run, None for no target.

    The first evaluation above a target is optimistically biased. If its metrics contain `confirmed_success`, measured
    on held-out episodes that selected nothing, both must reach the target.

    `ended` is the reason why the run ended, None while it continues.
    """

    @accept_former_arguments({"oversight": "stopping"})
    def __init__(self, stopping: StoppingSettings, target: float | None = None):
        self.stopping = stopping
        self.target = target
        self.best: float | None = None
        self.last: float | None = None
        self.stale = 0
        self.ended: EndReason | None = None

    def confirmed(self, figures: Mapping[str, float], confirm: Callable[[], Mapping[str, float]]) -> dict[str, float]:
        """Return `figures` of an evaluation and, when they reach the target, add the metrics of `confirm`, prefixed
        "confirmed_".
        """
        confirmation = confirm() if self.reaches(figures) else {}
        return {**figures, **{f"confirmed_{name}": float(value) for name, value in confirmation.items()}}

    def observe(self, figures: Mapping[str, float]) -> None:
        """Record an evaluation: metrics of `Evaluate`, each prefixed with its mode."""
        if self.reaches(figures):
            self.ended = EndReason.TARGET
            return
        if not self.stopping.watched:
            self._wait(score(figures))
            return
        low = figures.get("deterministic_real_low")
        if low is None:
            return
        # By the lower bound of what was measured: a better mean alone may be luck.
        rising = self.best is None or low > self.best
        # What fell at first and climbs again is not over, though it has not come back to where it began.
        climbing = self.last is not None and low > self.last
        self.last = figures["deterministic_real_success"]
        self.stale = 0 if rising or climbing else self.stale + 1
        if rising:
            self.best = low
        if 0 < self.stopping.patience <= self.stale:
            self.ended = EndReason.DIVERGED if figures.get("deterministic_parted") else EndReason.PATIENCE

    def _wait(self, found: float) -> None:
        """Record the score of a run that is not evaluated in the real environment."""
        if self.best is None or found > self.best:
            self.best, self.stale = found, 0
            return
        self.stale += 1
        if 0 < self.stopping.patience <= self.stale:
            self.ended = EndReason.PATIENCE

    def reaches(self, figures: Mapping[str, float]) -> bool:
        """Whether this evaluation reaches the target, and so does its confirmation, if one was measured."""
        # The success that counts towards the target may be another one than this world's, such as the real one.
        achieved = figures.get("deterministic_achieved", figures["deterministic_success"])
        return self.target is not None and min(achieved, figures.get("confirmed_success", 1.0)) >= self.target

    def tree(self) -> dict[str, Any]:
        """Return the mutable state, for a checkpoint."""
        end = None if self.ended is None else self.ended.value
        return {"best": self.best, "last": self.last, "stale": self.stale, "ended": end}

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Restore the state from `tree`."""
        self.best = tree["best"]
        self.last = tree.get("last")
        self.stale = tree["stale"]
        self.ended = None if tree["ended"] is None else EndReason(tree["ended"])


def score(figures: Mapping[str, float]) -> float:
    """Return the metric for policy selection, without exploration noise: `score` if the evaluation reports it, else the
    return when the world reports no success, else success.
    """
    names = ("deterministic_score", "deterministic_return", "deterministic_success")
    return next(figures[name] for name in names if name in figures)


keep_former_names(__name__, {"Course": "StoppingRule", "Oversight": "StoppingSettings", "Ended": "EndReason"})
