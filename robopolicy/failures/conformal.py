"""Thresholds of failure indices by split conformal prediction on successful episodes. Axes: n decisions, N at most.

The guarantee of `constant_threshold` and `band_threshold`: among successful episodes exchangeable with the n given
ones, the expected share with an alarm, at any decision, is at most max(alpha, 1 / (n + 1)) (Vovk et al. 2005). Fewer
than 1 / alpha - 1 episodes do not suffice for alpha: the threshold is then their maximum.
"""

from collections.abc import Sequence

import numpy as np

from robopolicy.core.arrays import Array
from robopolicy.core.errors import DataError


def conformal_quantile(scores: Array, alpha: float) -> float:
    """Return the ceil((n + 1) (1 - alpha))-th smallest of scores [n], their maximum if n is too small for alpha."""
    if not len(scores):
        raise DataError("A threshold needs successful rollouts to calibrate on: detect.episodes=NUMBER.")
    rank = int(np.ceil(round((len(scores) + 1) * (1 - alpha), 9)))  # rounded: 20 * .95 is 19, not 19.000000000000004
    return float(np.sort(scores)[min(rank, len(scores)) - 1])


def constant_threshold(indices: Sequence[Array], decisions: int, alpha: float) -> Array:
    """Return one threshold for all decisions, [N], from the indices [n] of successful episodes."""
    return np.full(decisions, conformal_quantile(np.array([each.max() for each in indices]), alpha))


def percentile_threshold(indices: Sequence[Array], decisions: int, alpha: float) -> Array:
    """Return the percentile 100 (1 - alpha) of the indices at the ends of successful episodes, for all decisions, [N].

    This is FLOAT's own rule (arXiv:2510.02298); unlike the others it promises no rate of false alarms.
    """
    if not indices:
        raise DataError("A threshold needs successful rollouts to calibrate on: detect.episodes=NUMBER.")
    return np.full(decisions, np.quantile([each[-1] for each in indices], 1 - alpha))


def band_threshold(indices: Sequence[Array], decisions: int, alpha: float) -> Array:
    """Return a threshold per decision, [N], from the indices [n] of successful episodes: mean + q deviation.

    Mean and deviation of each decision are those of one half of the episodes; q is the conformal quantile of the other
    half's largest standardised index (a band for functions, Diquigiovanni et al. 2021, arXiv:2102.06746). After the
    longest episode both stay as they are.
    """
    if len(indices) < 2:
        raise DataError("A threshold per decision needs two successful rollouts or more: detect.episodes=NUMBER.")
    shape, rest = indices[0::2], indices[1::2]
    mean, deviation = np.zeros(decisions), np.zeros(decisions)
    for step in range(decisions):
        values = np.array([each[step] for each in shape if step < len(each)])
        if len(values):
            mean[step], deviation[step] = values.mean(), values.std()
        else:
            mean[step], deviation[step] = mean[step - 1], deviation[step - 1]
    deviation = np.maximum(deviation, max(1e-3 * float(deviation.max()), 1e-9))
    largest = [((each - mean[: len(each)]) / deviation[: len(each)]).max() for each in rest]
    return mean + conformal_quantile(np.array(largest), alpha) * deviation


THRESHOLDS = {"constant": constant_threshold, "band": band_threshold, "percentile": percentile_threshold}
"""Kinds of thresholds by name, for detect.threshold."""
