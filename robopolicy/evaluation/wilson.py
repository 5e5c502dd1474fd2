"""Wilson interval of a success rate, and Newcombe's of the difference of two independent ones.

It does not import numpy, so lists of published figures appear at once.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any

from robopolicy.core.errors import DataError


def wilson(successes: int, episodes: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the Wilson score interval (low, high) of a success rate.

    Raises DataError without episodes or with more successes than episodes. Source: Wilson 1927, eq. 3.
    """
    if episodes < 1 or not 0 <= successes <= episodes:
        raise DataError(
            f"{successes} successes in {episodes} episodes is not a success rate: evaluate at least one episode."
        )
    check_confidence(confidence)
    z, rate = NormalDist().inv_cdf(0.5 + 0.5 * confidence), successes / episodes
    scale = 2 * (episodes + z**2)
    centre = (2 * episodes * rate + z**2) / scale
    half = z / scale * math.sqrt(4 * episodes * rate * (1 - rate) + z**2)
    return 0.0 if successes == 0 else centre - half, 1.0 if successes == episodes else centre + half


def check_confidence(confidence: float) -> None:
    """Raise DataError unless the confidence level lies between 0 and 1."""
    if not 0 < confidence < 1:
        raise DataError(f"confidence={confidence} must lie between 0 and 1, for example 0.95.")


def rate_difference(
    method: Sequence[Mapping[str, Any]], baseline: Sequence[Mapping[str, Any]]
) -> tuple[float, float, float]:
    """Return the difference of two success rates and its 95 % interval (low, high), of unpaired episodes.

    method, baseline: published rates ("success_rate", "low", "high", "episodes"), which are pooled over seeds. Source:
    Newcombe 1998, method 10: from the Wilson intervals of both.
    """
    (above, above_low, above_high), (below, below_low, below_high) = map(_pooled, (method, baseline))
    difference = above - below
    low = difference - math.hypot(above - above_low, below_high - below)
    return difference, low, difference + math.hypot(above_high - above, below - below_low)


def _pooled(rates: Sequence[Mapping[str, Any]]) -> tuple[float, float, float]:
    """Return success rate, low and high of all episodes of several rates."""
    if len(rates) == 1:
        return rates[0]["success_rate"], rates[0]["low"], rates[0]["high"]
    episodes = sum(each["episodes"] for each in rates)
    successes = sum(round(each["success_rate"] * each["episodes"]) for each in rates)
    return successes / episodes, *wilson(successes, episodes)
