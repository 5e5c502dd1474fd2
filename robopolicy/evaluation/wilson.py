"""Wilson interval of a success rate; it does not import numpy, so lists of published figures appear at once."""

import math
from statistics import NormalDist

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
