"""Whether a run of fine-tuning goes on after an evaluation, how near its base it is held, and why it ended.

Where success is imagined and watched for real, what is real decides: while it rises the run goes on, and when the two
part the policy is held nearer to its base, about which the model knows most. Only a gap that real success does not
follow ends it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Ended(StrEnum):
    """Why a run ended."""

    TARGET = "target reached"
    PARTED = "gap with no real gain"
    PATIENCE = "patience"
    ITERATIONS = "iterations done"


@dataclass(frozen=True)
class Oversight:
    """What a run is held to.

    watched: whether success is also watched in the real world, and only what is real counts; patience: evaluations in a
    row without a gain that end it, 0 for never: of a watched run neither over the best one nor over the one before,
    beyond chance, of another no better score than the best one; leash: what the loss `bc`, nearness to the base, is
    multiplied by at first, 0 for not at all; tighten: factor of that at every evaluation at which the gap between the
    worlds has not narrowed, 1 for never.
    """

    patience: int = 0
    leash: float = 1.0
    tighten: float = 1.0
    watched: bool = True


class Course:
    """Follows the evaluations of one run. target: success that ends it, None for none.

    The first evaluation above a target is the one that luck helped most: with `confirmed_success` among its figures,
    measured on episodes that nothing was chosen by, both must reach it.

    `leash` is the present factor of nearness to the base, `ended` why it is over, None while it goes on.
    """

    def __init__(self, oversight: Oversight, target: float | None = None):
        self.oversight = oversight
        self.target = target
        self.leash = oversight.leash
        self.best: float | None = None
        self.last: float | None = None
        self.gap = 0.0
        self.stale = 0
        self.ended: Ended | None = None

    def confirmed(self, figures: Mapping[str, float], confirm: Callable[[], Mapping[str, float]]) -> dict[str, float]:
        """Return `figures` of an evaluation, and where they reach the target what `confirm` measures beside them."""
        found = confirm() if self.reaches(figures) else {}
        return {**figures, **{f"confirmed_{name}": float(value) for name, value in found.items()}}

    def observe(self, figures: Mapping[str, float]) -> None:
        """Take in an evaluation: figures of `Evaluate`, each named with its mode before it."""
        if self.reaches(figures):
            self.ended = Ended.TARGET
            return
        if not self.oversight.watched:
            self._wait(score(figures))
            return
        low = figures.get("deterministic_real_low")
        if low is None:
            return
        # By the lower bound of what was measured: a better mean alone may be luck.
        rising = self.best is None or low > self.best
        fallen = self.best is not None and figures["deterministic_real_high"] < self.best
        # What fell at first and climbs again is not over, though it has not come back to where it began.
        climbing = self.last is not None and low > self.last
        self.last = figures["deterministic_real_success"]
        self.stale = 0 if rising or climbing else self.stale + 1
        impatient = 0 < self.oversight.patience <= self.stale
        gap, before = figures.get("deterministic_gap", 0.0), self.gap
        self.gap = gap
        if rising:
            self.best = low
        if not figures.get("deterministic_parted"):
            self.ended = Ended.PATIENCE if impatient else None
        elif fallen or impatient:
            self.ended = Ended.PARTED
        elif gap >= before:
            self._tighten()

    def _wait(self, found: float) -> None:
        """Take in the score of a run that is not watched elsewhere."""
        if self.best is None or found > self.best:
            self.best, self.stale = found, 0
            return
        self.stale += 1
        if 0 < self.oversight.patience <= self.stale:
            self.ended = Ended.PATIENCE

    def reaches(self, figures: Mapping[str, float]) -> bool:
        """Whether this evaluation reaches the target, and so does what confirms it, if that has been measured."""
        # The success that counts towards the target may be another one than this world's, such as the real one.
        achieved = figures.get("deterministic_achieved", figures["deterministic_success"])
        return self.target is not None and min(achieved, figures.get("confirmed_success", 1.0)) >= self.target

    def _tighten(self) -> None:
        if self.oversight.tighten > 1:
            self.leash = self.leash * self.oversight.tighten if self.leash else 1.0

    def tree(self) -> dict[str, Any]:
        """Return everything that changes, for a checkpoint."""
        ended = None if self.ended is None else self.ended.value
        names = ("best", "last", "gap", "stale", "leash")
        return {**{name: getattr(self, name) for name in names}, "ended": ended}

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Go on from `tree`."""
        self.best = tree["best"]
        self.last = tree.get("last")
        self.gap = tree["gap"]
        self.stale, self.leash = tree["stale"], tree["leash"]
        self.ended = None if tree["ended"] is None else Ended(tree["ended"])


def score(figures: Mapping[str, float]) -> float:
    """Return what policies are chosen by: `score` where an evaluation says it, else the return where a world reports no
    success, else success, always without exploration noise.
    """
    names = ("deterministic_score", "deterministic_return", "deterministic_success")
    return next(figures[name] for name in names if name in figures)
