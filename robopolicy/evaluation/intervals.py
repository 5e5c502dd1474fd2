"""Confidence intervals: Wilson, paired differences on the same seeds, and the bootstrap.

Every success rate that this project prints has one of these intervals. Two policies are compared on the same seeds, so
the comparison is paired. Axes: E episode.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from robopolicy.core.errors import DataError
from robopolicy.core.former_names import keep_former_names
from robopolicy.evaluation.wilson import check_confidence, wilson


def wilson_bound(rates: np.ndarray, episodes: np.ndarray, confidence: float = 0.95) -> np.ndarray:
    """Return the one-sided lower Wilson bounds [G] of rates [G] from these numbers of episodes [G], which may be
    fractional.

    Raises DataError for a rate outside [0, 1] or a negative number of episodes.
    """
    if np.any((rates < 0) | (rates > 1)) or np.any(episodes < 0):
        raise DataError(f"{rates} in {episodes} episodes are not success rates.")
    check_confidence(confidence)
    z = NormalDist().inv_cdf(confidence)
    share = z * z / np.maximum(episodes, 1e-9)
    spread = np.sqrt(share * rates * (1 - rates) + np.square(share) / 4)
    return np.maximum(0.0, (rates + share / 2 - spread) / (1 + share))


def percent(figures: Mapping[str, Any]) -> str:
    """Return a rate with its interval and counts as text."""
    if not figures["total"]:
        return "not measured"
    interval = f"[{figures['low']:.1%}, {figures['high']:.1%}]"
    return f"{figures['rate']:.1%} {interval} ({figures['count']} of {figures['total']})"


def plus_minus(value: float | None, form: str) -> str:
    """Format a number with `form` (".2f"); "-" if it is undefined: None or NaN."""
    return "-" if value is None or math.isnan(value) else format(value, form)


@dataclass(frozen=True)
class Paired:
    """Comparison of two policies on the same episodes: their means, and tuned - base with its interval (low, high)."""

    episodes: int
    base: float
    tuned: float
    difference: float
    low: float
    high: float
    confidence: float

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return asdict(self)


@dataclass(frozen=True)
class PairedComparison(Paired):
    """Comparison of the successes of two policies on the same episodes.

    improved, worsened: number of episodes that only the tuned or only the base policy solved; p_value: exact McNemar,
    two-sided.
    """

    improved: int
    worsened: int
    p_value: float


def compare_paired(base: np.ndarray, tuned: np.ndarray, confidence: float = 0.95) -> PairedComparison:
    """Compare two success vectors [E] bool whose entries are paired by seed.

    The p-value is McNemar's exact test on the discordant episodes. The interval of the difference is Newcombe's score
    interval for paired proportions (Newcombe 1998, Statistics in Medicine 17:2635, method 10), which never leaves
    [-1, 1] and stays sensible when one policy never fails. Raises DataError when the vectors do not pair.
    """
    base, tuned = _pair(np.asarray(base, dtype=bool), np.asarray(tuned, dtype=bool), "Success vectors")
    both_succeed, neither = int((base & tuned).sum()), int((~base & ~tuned).sum())
    improved, worsened = int((~base & tuned).sum()), int((base & ~tuned).sum())
    episodes = base.size
    discordant = improved + worsened
    from scipy.special import bdtr  # half a second to import: who compares, pays

    p_value = min(1.0, 2 * float(bdtr(min(improved, worsened), discordant, 0.5)))
    low, high = _newcombe(both_succeed, improved, worsened, neither, confidence)
    return PairedComparison(
        episodes=episodes,
        base=float(base.mean()),
        tuned=float(tuned.mean()),
        difference=(improved - worsened) / episodes,
        low=low,
        high=high,
        improved=improved,
        worsened=worsened,
        p_value=p_value,
        confidence=confidence,
    )


@dataclass(frozen=True)
class PairedReturns(Paired):
    """Comparison of the returns of two policies on the same episodes, when success is not reported.

    The interval is a bootstrap over episodes.
    """

    of: str = "return"


def compare_returns(base: np.ndarray, tuned: np.ndarray, confidence: float = 0.95) -> PairedReturns:
    """Compare two vectors of returns [E] whose entries are paired by seed. Raises DataError unless they pair."""
    base, tuned = _pair(np.asarray(base, dtype=np.float64), np.asarray(tuned, dtype=np.float64), "Returns")
    difference = tuned - base
    low, high = mean_interval(difference, confidence)
    return PairedReturns(
        len(base), float(base.mean()), float(tuned.mean()), float(difference.mean()), low, high, confidence
    )


def mean_interval(values: np.ndarray, confidence: float = 0.95, resamples: int = 2000) -> tuple[float, float]:
    """Return the percentile bootstrap interval (low, high) of the mean of `values` [E]; deterministic."""
    draws = np.random.default_rng(0).integers(0, len(values), (resamples, len(values)))
    return percentile_interval(np.asarray(values, dtype=np.float64)[draws].mean(1), confidence)


def percentile_interval(replicates: np.ndarray, confidence: float = 0.95) -> tuple[float, float]:
    """Return the central `confidence` range (low, high) of bootstrap replicates [n], ignoring undefined ones.

    Raises DataError when fewer than half of the replicates are defined.
    """
    check_confidence(confidence)
    defined = replicates[np.isfinite(replicates)]
    if 2 * len(defined) < len(replicates) or len(defined) == 0:
        raise DataError(
            f"The statistic is undefined on {len(replicates) - len(defined)} of {len(replicates)} resamples."
        )
    low, high = np.quantile(defined, [0.5 - confidence / 2, 0.5 + confidence / 2])
    return float(low), float(high)


def _pair(base: np.ndarray, tuned: np.ndarray, what: str) -> tuple[np.ndarray, np.ndarray]:
    if base.ndim != 1 or base.shape != tuned.shape or base.size == 0:
        raise DataError(
            f"{what} of shapes {base.shape} and {tuned.shape} cannot be paired: evaluate both on the same seeds."
        )
    return base, tuned


def _newcombe(both: int, improved: int, worsened: int, neither: int, confidence: float) -> tuple[float, float]:
    episodes = both + improved + worsened + neither
    tuned_rate, base = (both + improved) / episodes, (both + worsened) / episodes
    tuned_low, tuned_high = wilson(both + improved, episodes, confidence)
    base_low, base_high = wilson(both + worsened, episodes, confidence)
    margins = (both + improved) * (worsened + neither) * (both + worsened) * (improved + neither)
    agreement = both * neither - improved * worsened
    if agreement > 0:
        agreement = max(agreement - episodes / 2, 0.0)
    correlation = 0.0 if margins == 0 else agreement / np.sqrt(margins)

    def width(one: float, other: float) -> float:
        return float(np.sqrt(max(one**2 - 2 * correlation * one * other + other**2, 0.0)))

    difference = tuned_rate - base
    low = difference - width(tuned_rate - tuned_low, base_high - base)
    high = difference + width(tuned_high - tuned_rate, base - base_low)
    return max(low, -1.0), min(high, 1.0)


keep_former_names(__name__, {"shown": "plus_minus"})
