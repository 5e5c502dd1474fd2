"""Normalised scores: 0 is the return of uniform random actions, 100 the expert's, both measured on the same task.

Returns of different tasks can only be compared this way. Scores of one generator's datasets ("gen-v1/...") are
comparable only among themselves: D4RL uses other tasks, experts and random policies, so these scores never belong in a
table with D4RL's. Axes: E episode.
"""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import DataError
from robopolicy.core.storage import recover_folder
from robopolicy.data.lerobot_format import QUALITY
from robopolicy.data.quality import read_quality
from robopolicy.evaluation.intervals import mean_interval, wilson
from robopolicy.evaluation.success import EvaluationResult


@dataclass(frozen=True)
class Performance:
    """Mean return and success rate of an actor over a number of episodes, each with its 95 % interval (low, high)."""

    episodes: int
    return_mean: float
    return_low: float
    return_high: float
    success_rate: float
    success_low: float
    success_high: float

    @staticmethod
    def of(returns: np.ndarray, success: np.ndarray) -> "Performance":
        """Summarise returns [E] and success [E] bool. Raises DataError without episodes."""
        count, successes = len(returns), int(success.sum())
        return Performance(
            count,
            float(np.mean(returns)),
            *mean_interval(returns),
            successes / max(count, 1),
            *wilson(successes, count),
        )

    @staticmethod
    def of_episodes(episodes: Episodes) -> "Performance":
        """Summarise recorded episodes; raises DataError when rewards or success are missing."""
        if episodes.returns is None or episodes.success is None:
            raise DataError("These episodes record neither rewards nor success, so there is nothing to score.")
        return Performance.of(episodes.returns.cpu().double().numpy(), episodes.success.cpu().numpy())

    @property
    def text(self) -> str:
        """Text for logs and reports."""
        return (
            f"return {self.return_mean:.3g} [{self.return_low:.3g}, {self.return_high:.3g}], success "
            f"{self.success_rate:.1%} [{self.success_low:.1%}, {self.success_high:.1%}] of {self.episodes} episodes"
        )

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return asdict(self)


@dataclass(frozen=True)
class Anchors:
    """Performance at the ends of the scale in the world called `world`: uniform random actions 0, the noise-free expert
    100.
    """

    world: str
    random: Performance
    expert: Performance

    def require_order(self) -> "Anchors":
        """Return self; raises DataError unless the expert's return exceeds the random one's by both intervals."""
        if self.expert.return_low > self.random.return_high:
            return self
        raise DataError(
            f"In '{self.world}' the expert's return is {self.expert.text}, that of uniform random actions "
            f"{self.random.text}: returns do not rank policies here, and a later success can have a higher return. "
            "This happens when every step is rewarded and success ends the episode. Reward progress "
            "(world.options.reward=increase), or do not end episodes at success "
            "(world.options.terminate_on_success=false)."
        )

    def require_world(self, world: str) -> None:
        """Raise DataError when returns are from another world than the anchors."""
        if world != self.world:
            raise DataError(f"Returns in '{world}' cannot be normalised with the reference scores of '{self.world}'.")

    def score(self, value: float) -> float:
        """Return the score of a mean return: 100 (value - random) / (expert - random)."""
        zero, hundred = self.random.return_mean, self.expert.return_mean
        return 100.0 * (value - zero) / (hundred - zero)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any], where: object) -> "Anchors":
        """Rebuild from `to_json`; raises DataError when the file `where` contains anything else."""
        try:
            ends = {name: Performance(**data[name]) for name in ("random", "expert")}
            return Anchors(str(data["world"]), **ends)
        except (KeyError, TypeError) as error:
            raise DataError(
                f"{where} has no reference scores (anchors) for the normalised score ({error!r}): restore it."
            ) from error


@dataclass(frozen=True)
class NormalisedScore:
    """A score with the interval (low, high) of the mean return; the anchors, measured on many episodes, are taken as
    exact.
    """

    score: float
    low: float
    high: float

    @property
    def text(self) -> str:
        """Text for logs and reports."""
        return f"normalised score {self.score:.1f} [{self.low:.1f}, {self.high:.1f}]"

    def to_json(self) -> dict[str, float]:
        """Return a JSON-ready dictionary."""
        return asdict(self)


def normalised_score(result: EvaluationResult | Performance, anchors: Anchors) -> NormalisedScore:
    """Return the normalised score of the mean return of `result`.

    Raises DataError when an evaluation was made in another world than the anchors.
    """
    if isinstance(result, EvaluationResult):
        anchors.require_world(result.world)
        result = Performance.of(result.returns, result.success)
    returns = (result.return_mean, result.return_low, result.return_high)
    return NormalisedScore(*(anchors.score(each) for each in returns))


def read_anchors(folder: Path) -> Anchors:
    """Return the anchors (reference scores) stored in a dataset with a quality level; raises DataError when there are
    none.
    """
    return Anchors.from_json(read_quality(folder)["anchors"], folder)


def known_anchors(folder: Path, world: str) -> Anchors | None:
    """Return the anchors stored in a dataset, None if there are none or they belong to another world than `world`."""
    if not os.path.lexists(recover_folder(Path(folder)) / QUALITY):
        return None
    anchors = read_anchors(folder)
    return anchors if anchors.world == world else None
