"""Comparison of off-policy evaluators: each scores policies of known true performance, and the scores are compared with
it.

For every evaluator: rank correlation with the true values, regret of its top choice, its error, and the gate's errors
when using it: the rate of accepting a policy that is no better than the incumbent (type I error) and of rejecting a
better one (type II). Source of the first three: DOPE, Fu et al. 2021, arXiv:2103.16596; of the last two: SCOPE-RL,
arXiv:2311.18206. Axes: k policies, S initial states of an evaluator.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from robopolicy.core.arrays import Array
from robopolicy.core.errors import DataError
from robopolicy.core.former_names import keep_former_names
from robopolicy.evaluation.gate import evaluator_result
from robopolicy.evaluation.intervals import percentile_interval
from robopolicy.evaluation.ranking import spearman


@dataclass(frozen=True)
class EvaluatorScore:
    """Quality measures of an evaluator.

    spearman: with its bootstrap interval over policies, NaN for three policies or if most resamples leave it undefined;
    regret: of the top choice, as a fraction of the range of true values, NaN if these are all equal; error: mean
    absolute, in the units of the true values (NaN if the evaluator uses others, `comparable`); accepted, good: number
    of pairs accepted by the gate, and number of all pairs (candidate, incumbent) that should have been; false_accepts:
    type I, fraction of no better candidates that were accepted; false_rejects: type II, fraction of better candidates
    that were rejected (NaN if there are none).
    """

    judge: str
    policies: int
    spearman: float
    spearman_low: float
    spearman_high: float
    regret: float
    error: float
    pairs: int
    good: int
    accepted: int
    false_accepts: float
    false_rejects: float

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return asdict(self)


def score_evaluator(
    judge: str,
    truth: Array,
    found: Array,
    *,
    threshold: float = 0.0,
    margin: float = 0.0,
    relative: float = 0.0,
    confidence: float = 0.95,
    comparable: bool = True,
    resamples: int = 1000,
    ceiling: float | None = None,
) -> EvaluatorScore:
    """Score an evaluator's values `found` [k, S] of k policies with true values `truth` [k].

    threshold: a candidate is good if its true value exceeds the incumbent's by more than this; margin, relative,
    confidence: of the gate; ceiling: the highest credible mean value. Every ordered pair of two policies is a candidate
    and its incumbent. Raises DataError with fewer than three policies, and when values are not finite.
    """
    truth, found = np.asarray(truth, dtype=np.float64), np.asarray(found, dtype=np.float64)
    count = len(truth)
    if count < 3 or found.ndim != 2 or len(found) != count:
        raise DataError(
            "Comparing evaluators needs at least three policies of known value, each evaluated from the same "
            f"initial states; got {count}."
        )
    if not (np.isfinite(truth).all() and np.isfinite(found).all()):
        raise DataError(f"{judge}: a value is not finite.")
    means = found.mean(1)
    draws = np.random.default_rng(0).integers(0, count, (resamples, count))
    spread = float(np.ptp(truth))
    ranked = spearman(truth[draws], means[draws])
    has_interval = count > 3 and 2 * np.isfinite(ranked).sum() >= len(ranked)
    low, high = percentile_interval(ranked, confidence) if has_interval else (math.nan, math.nan)
    pairs = [(first, other) for first in range(count) for other in range(count) if first != other]
    is_better = np.array([truth[first] - truth[other] > threshold for first, other in pairs])
    let = np.array(
        [
            evaluator_result(judge, found[first], found[other], margin, relative, confidence, ceiling).better
            for first, other in pairs
        ]
    )
    return EvaluatorScore(
        judge=judge,
        policies=count,
        spearman=float(spearman(truth, means)),
        spearman_low=low,
        spearman_high=high,
        regret=math.nan if spread == 0 else float(truth.max() - truth[means.argmax()]) / spread,
        error=float(np.abs(means - truth).mean()) if comparable else math.nan,
        pairs=len(pairs),
        good=int(is_better.sum()),
        accepted=int(let.sum()),
        false_accepts=_share(let, ~is_better),
        false_rejects=_share(~let, is_better),
    )


def best_evaluator(scores: Mapping[str, EvaluatorScore], allowed: float = 0.05) -> str | None:
    """Return the evaluator to use: of those with at most `allowed` false accepts, the one with the fewest false
    rejects.

    Return None if no evaluator is safe, or if no safe one accepts anything: then nothing is known about it.
    """
    safe = {name: score for name, score in scores.items() if score.accepted and not score.false_accepts > allowed}
    return min(
        safe, key=lambda name: (safe[name].false_rejects, -np.nan_to_num(safe[name].spearman, nan=-1)), default=None
    )


def _share(what: Array, among: Array) -> float:
    return float(what[among].mean()) if among.any() else math.nan


keep_former_names(
    __name__, {"JudgeScore": "EvaluatorScore", "score_judge": "score_evaluator", "best_judge": "best_evaluator"}
)
