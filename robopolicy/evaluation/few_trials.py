"""Success rates from few real trials and many episodes in a world model (`calibrated_rate`).

The trials start where some of the model's episodes start. Success is estimated where the model predicts success and
where it predicts failure, from the trials, and weighted by how often the model predicts each, from all its episodes:
this is the estimator with a control variate, mean(y) + beta (mean_N(x) - mean_n(x)), as MFRL (Ryou et al. 2024,
arXiv:2403.08152) and others combine fidelities, for outcomes that are 0 or 1. A biased model biases nothing; it only
saves fewer trials. The interval combines Wilson's of both groups (Donner and Zou 2012, Closed-form confidence intervals
for functions of the normal mean and standard deviation) and holds its coverage close to 0 and 1 as well, where that of
Student's t on residuals fails. Axes: n trial, N episode in the model.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np

from robopolicy.core.errors import DataError
from robopolicy.evaluation.ranking import spearman
from robopolicy.evaluation.wilson import wilson

if TYPE_CHECKING:
    from robopolicy.evaluation.success import EvaluationResult


@dataclass(frozen=True)
class CalibratedRate:
    """Success rate from trials and a model, with its interval (low, high).

    correlation: of the outcomes of trials and model from equal starts, NaN if either is constant; worth: number of
    trials alone with an interval of this width.
    """

    trials: int
    value: float
    low: float
    high: float
    correlation: float
    worth: float

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary, null for NaN."""
        return {name: None if value != value else value for name, value in asdict(self).items()}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "CalibratedRate":
        """Rebuild from `to_json`."""
        correlation = data["correlation"]
        return CalibratedRate(**{**data, "correlation": math.nan if correlation is None else correlation})

    @property
    def text(self) -> str:
        """The rate with its interval, and what the trials are worth with the model."""
        return f"{self.value:.1%} [{self.low:.1%}, {self.high:.1%}], as {self.worth:.0f} trials"


def calibrated_rate(
    trials: np.ndarray, paired: np.ndarray, model: np.ndarray, confidence: float = 0.95
) -> CalibratedRate:
    """Estimate the real success rate.

    trials: real outcomes [n] bool; paired: the model's from the same starts [n]; model: the model's outcomes [N], those
    among them. Raises DataError without trials, or with fewer episodes in the model than trials.
    """
    trials, paired, model = (np.asarray(each, dtype=bool) for each in (trials, paired, model))
    if not len(trials) or trials.shape != paired.shape or len(model) < len(trials):
        raise DataError(
            f"{len(trials)} trials cannot be combined with {len(paired)} of {len(model)} episodes in the model: every "
            "trial needs the model's episode from the same start."
        )
    share = float(model.mean())
    value = below = above = 0.0
    rates: list[float] = []
    for predicted, weight in ((True, share), (False, 1 - share)):
        outcomes = trials[paired == predicted]
        rate, low, high = _rate(outcomes, confidence) if len(outcomes) else (float(trials.mean()), 0.0, 1.0)
        value += weight * rate
        below, above = below + (weight * (rate - low)) ** 2, above + (weight * (high - rate)) ** 2
        rates.append(rate)
    z = NormalDist().inv_cdf(0.5 + 0.5 * confidence)
    of_share = (z * (rates[0] - rates[1])) ** 2 * share * (1 - share) / len(model)
    low = max(0.0, value - math.sqrt(below + of_share))
    high = min(1.0, value + math.sqrt(above + of_share))
    _, *alone = _rate(trials, confidence)
    varies = 0 < trials.sum() < len(trials) and 0 < paired.sum() < len(paired)
    return CalibratedRate(
        trials=len(trials),
        value=value,
        low=low,
        high=high,
        correlation=float(np.corrcoef(trials, paired)[0, 1]) if varies else math.nan,
        worth=len(trials) * ((alone[1] - alone[0]) / (high - low)) ** 2,
    )


def calibrated(
    trials: "Mapping[str, EvaluationResult]", model: "Mapping[str, EvaluationResult]"
) -> dict[str, CalibratedRate]:
    """Return the calibrated success rate of every policy, by name, where trials are some of the model's episodes.

    Raises DataError when a trial's seed has no episode in the model.
    """
    rates: dict[str, CalibratedRate] = {}
    for name, real in trials.items():
        imagined = model[name]
        place_of = {int(seed): place for place, seed in enumerate(imagined.seeds)}
        missing = [int(seed) for seed in real.seeds if int(seed) not in place_of]
        if missing:
            raise DataError(f"The model has no episode from the start of trial {missing[0]} of {name}.")
        paired = imagined.success[[place_of[int(seed)] for seed in real.seeds]]
        rates[name] = calibrated_rate(real.success, paired, imagined.success)
    return rates


COUNTS = (5, 10, 20, 50, 100)
"""Trials per policy in `savings`."""


@dataclass(frozen=True)
class Saving:
    """Rates from a number of trials per policy, alone and with the model, against those of all real episodes.

    error: mean absolute; order: Spearman with the real rates, NaN where undefined; covered: fraction of the intervals
    with the model that hold the real rate; worth: trials alone with an interval as wide, median.
    """

    trials: int
    error_alone: float
    error: float
    order_alone: float
    order: float
    covered: float
    worth: float

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary, null for NaN."""
        return {name: None if value != value else value for name, value in asdict(self).items()}


def savings(
    real: "Mapping[str, EvaluationResult]",
    model: "Mapping[str, EvaluationResult]",
    generator: np.random.Generator,
    draws: int = 100,
) -> list[Saving]:
    """Return the error and order of all policies' rates from trials alone and with the model, for each of `COUNTS`.

    Every draw resamples the episodes, jointly for all policies and both worlds; the first n are the trials, and the
    real rate is that of all episodes. Policies must have been played from the same starts in both worlds; otherwise, or
    without episodes for the smallest count, there is nothing to say: an empty list.
    """
    names = list(real)
    seeds = np.sort(real[names[0]].seeds)
    results = [each[name] for each in (real, model) for name in names]
    if any(not np.array_equal(np.sort(each.seeds), seeds) for each in results):
        return []
    success = np.stack([each.success[np.argsort(each.seeds)] for each in results]).astype(bool)
    truth, imagined = success[: len(names)], success[len(names) :]
    rates = truth.mean(1)
    found: list[Saving] = []
    for count in (count for count in COUNTS if count <= len(seeds)):
        alone, combined = np.empty((draws, len(names))), np.empty((draws, len(names)))
        covered, worth = np.empty((draws, len(names)), dtype=bool), np.empty((draws, len(names)))
        for draw in range(draws):
            drawn = generator.integers(len(seeds), size=len(seeds))
            alone[draw] = truth[:, drawn[:count]].mean(1)
            for index in range(len(names)):
                model_outcomes = imagined[index, drawn]
                each = calibrated_rate(truth[index, drawn[:count]], model_outcomes[:count], model_outcomes)
                combined[draw, index] = each.value
                covered[draw, index] = each.low <= rates[index] <= each.high
                worth[draw, index] = each.worth
        found.append(
            Saving(
                trials=count,
                error_alone=float(np.abs(alone - rates).mean()),
                error=float(np.abs(combined - rates).mean()),
                order_alone=_order(alone, rates),
                order=_order(combined, rates),
                covered=float(covered.mean()),
                worth=float(np.median(worth)),
            )
        )
    return found


def savings_rows(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return header and lines of a table of `Saving`s."""
    header = ["trials per policy", "error alone", "error with the model", "order alone", "order with the model"]
    lines = [
        [
            f"{row['trials']:.0f}",
            *(f"{100 * row[name]:.1f} points" for name in ("error_alone", "error")),
            *("undefined" if row[name] is None else f"{row[name]:.3f}" for name in ("order_alone", "order")),
            f"{row['covered']:.1%}",
            f"{row['worth']:.0f} trials",
        ]
        for row in rows
    ]
    return [*header, "95 % intervals that hold", "worth"], lines


def _order(estimates: np.ndarray, rates: np.ndarray) -> float:
    """Return the mean Spearman correlation of estimates [draws, policies] with the rates, over draws that have one."""
    orders = spearman(np.broadcast_to(rates, estimates.shape), estimates)
    return float(orders[np.isfinite(orders)].mean()) if np.isfinite(orders).any() else math.nan


def _rate(outcomes: np.ndarray, confidence: float) -> tuple[float, float, float]:
    return float(outcomes.mean()), *wilson(int(outcomes.sum()), len(outcomes), confidence)
