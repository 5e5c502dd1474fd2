"""Calibration of scores on held-out episodes: probabilities, and the threshold of a false-accept rate.

Axes: n frame or episode.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from robopolicy.core.arrays import Array
from robopolicy.core.errors import DataError

Calibration = Literal["temperature", "isotonic"]


def clopper_pearson(count: int, total: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the exact interval (low, high) of a rate, (0, 1) without trials.

    Source: Clopper and Pearson 1934: quantiles of Beta(k, n - k + 1) and Beta(k + 1, n - k).
    """
    from scipy.special import betaincinv  # half a second to import

    if total == 0:
        return 0.0, 1.0
    tail = (1 - confidence) / 2
    low = 0.0 if count == 0 else float(betaincinv(count, total - count + 1, tail))
    high = 1.0 if count == total else float(betaincinv(count + 1, total - count, 1 - tail))
    return low, high


def upper_bound(count: int, total: int, confidence: float = 0.95) -> float:
    """Return the one-sided upper Clopper-Pearson bound of a rate, 1 without trials."""
    return clopper_pearson(count, total, 2 * confidence - 1)[1]


@dataclass(frozen=True)
class Threshold:
    """Threshold on logits. accepted, failures: failed calibration episodes above it, and their number; bound: upper
    bound of the false-accept rate at `confidence`; rate: the requested one; met: whether the bound reaches it.
    """

    value: float
    accepted: int
    failures: int
    bound: float
    rate: float
    confidence: float

    @property
    def met(self) -> bool:
        """Whether the data prove the requested rate."""
        return self.bound <= self.rate


def choose_threshold(failures: Array, early: Array, rate: float, confidence: float = 0.95) -> Threshold:
    """Return the lowest threshold whose false-accept rate is at most `rate` with this confidence.

    failures: [n] highest score of each failed held-out episode; early: [m] highest score before success of each
    successful one, of which at most the fraction `rate` may exceed the threshold too. If k - 1 of n exchangeable scores
    exceed their k-th largest, the rate of new ones is Beta(k, n - k + 1) distributed, whose quantile is the
    Clopper-Pearson bound: choosing the threshold on the same scores costs nothing (training-conditional validity of
    split conformal prediction, Vovk 2012, arXiv:1209.2673). With too few failures for the rate, none of them is
    accepted, and the bound is above the rate. Raises DataError without failures.
    """
    if not len(failures):
        raise DataError("A threshold needs failed episodes to calibrate on.")
    ranked = np.sort(np.asarray(failures, dtype=np.float64))[::-1]
    accepted = 0
    while accepted + 1 < len(ranked) and upper_bound(accepted + 1, len(ranked), confidence) <= rate:
        accepted += 1
    value = float(ranked[accepted])
    if len(early):
        before_success = np.sort(np.asarray(early, dtype=np.float64))[::-1]
        value = max(value, float(before_success[min(int(rate * len(early)), len(early) - 1)]))
    accepted = int((ranked > value).sum())
    return Threshold(value, accepted, len(ranked), upper_bound(accepted, len(ranked), confidence), rate, confidence)


def failures_needed(rate: float, confidence: float = 0.95) -> int:
    """Return the number of failed episodes without a false accept that proves a false-accept rate."""
    return int(np.ceil(np.log(1 - confidence) / np.log(1 - rate))) if 0 < rate < 1 else 0


def fit_calibration(method: Calibration, logits: Array, labels: Array) -> dict[str, Any]:
    """Fit the map from logits [n] to probabilities on labels [n] bool; `probabilities` applies it.

    temperature: sigmoid(scale * logit + offset), scale >= 0 by maximum likelihood; the offset corrects the balanced
    classes of training (Platt 1999; with offset 0 it is temperature scaling, Guo et al. 2017, arXiv:1706.04599).
    isotonic: the best non-decreasing step function (Zadrozny and Elkan 2002).
    """
    logits, labels = np.asarray(logits, dtype=np.float64), np.asarray(labels, dtype=np.float64)
    if method == "isotonic":
        from scipy.optimize import isotonic_regression

        order = np.argsort(logits, kind="stable")
        fitted = isotonic_regression(labels[order]).x
        places = np.unique(np.concatenate([[0], np.flatnonzero(np.diff(fitted)) + 1, [len(fitted) - 1]]))
        return {"method": method, "logits": logits[order][places].tolist(), "values": fitted[places].tolist()}
    from scipy.optimize import minimize

    # Platt's targets: labels of n examples are never certain, so that the scale stays finite for separable data.
    positive, negative = labels.sum(), (1 - labels).sum()
    targets = np.where(labels > 0, (positive + 1) / (positive + 2), 1 / (negative + 2))

    def loss(parameters: Array) -> float:
        scaled = np.exp(parameters[0]) * logits + parameters[1]
        return float((np.logaddexp(0, scaled) - targets * scaled).mean())

    scale, offset = minimize(loss, np.zeros(2), method="Nelder-Mead").x
    return {"method": method, "scale": float(np.exp(scale)), "offset": float(offset)}


def probabilities(calibration: dict[str, Any], logits: Array) -> Array:
    """Return calibrated probabilities of logits [...]."""
    logits = np.asarray(logits, dtype=np.float64)
    if calibration["method"] == "isotonic":
        places = np.searchsorted(np.asarray(calibration["logits"]), logits, side="right") - 1
        return np.asarray(calibration["values"])[np.maximum(places, 0)]
    scaled = np.clip(calibration["scale"] * logits + calibration["offset"], -500, 500)
    return 1 / (1 + np.exp(-scaled))
