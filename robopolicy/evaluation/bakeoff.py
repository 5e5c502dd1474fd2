"""Which judge to trust: each scores policies whose true value is known, and is scored itself.

For every judge: the rank correlation with the truth, the regret of taking its favourite, its error, and what the gate
would do with it: how often it lets a policy through that is no better than the incumbent (type I error), and how often
it keeps out one that is (type II). Source of the first three: DOPE, Fu et al. 2021, arXiv:2103.16596; of the last two:
SCOPE-RL, arXiv:2311.18206. Axes: k policies, S starts of a judge.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from robopolicy.core.arrays import Array
from robopolicy.core.errors import DataError
from robopolicy.evaluation.gate import judged
from robopolicy.evaluation.intervals import percentile_interval
from robopolicy.evaluation.ranking import spearman


@dataclass(frozen=True)
class JudgeScore:
    """How good a judge is.

    spearman: with its bootstrap interval over policies, NaN with three or where they are hardly told apart; regret: of
    the favourite, as a share of the range of true values, NaN where they are all the same; error: mean absolute, of
    values in the truth's units (NaN where the judge has others, `comparable`); accepted, good: how many pairs the gate
    let through, and how many of all pairs (candidate, incumbent) should have been; false_accepts: type I, share of the
    candidates that are no better which it let through; false_rejects: type II, share of the better ones which it kept
    out (NaN where there are none).
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


def score_judge(
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
) -> JudgeScore:
    """Score a judge's values `found` [k, S] of k policies, whose true values are `truth` [k].

    threshold: a candidate is good where it is truly better than the incumbent by more than this; margin, relative,
    confidence: of the gate; ceiling: the highest mean value that is believed. Every ordered pair of two policies is a
    candidate and its incumbent. Raises DataError with fewer than three policies, and where values are not finite.
    """
    truth, found = np.asarray(truth, dtype=np.float64), np.asarray(found, dtype=np.float64)
    count = len(truth)
    if count < 3 or found.ndim != 2 or len(found) != count:
        raise DataError(f"A judge is scored on at least three policies of known value, each scored alike; got {count}.")
    if not (np.isfinite(truth).all() and np.isfinite(found).all()):
        raise DataError(f"{judge}: a value is not finite.")
    means = found.mean(1)
    draws = np.random.default_rng(0).integers(0, count, (resamples, count))
    spread = float(np.ptp(truth))
    ranked = spearman(truth[draws], means[draws])
    told = count > 3 and 2 * np.isfinite(ranked).sum() >= len(ranked)
    low, high = percentile_interval(ranked, confidence) if told else (math.nan, math.nan)
    pairs = [(one, other) for one in range(count) for other in range(count) if one != other]
    good = np.array([truth[one] - truth[other] > threshold for one, other in pairs])
    let = np.array(
        [judged(judge, found[one], found[other], margin, relative, confidence, ceiling).better for one, other in pairs]
    )
    return JudgeScore(
        judge=judge,
        policies=count,
        spearman=float(spearman(truth, means)),
        spearman_low=low,
        spearman_high=high,
        regret=math.nan if spread == 0 else float(truth.max() - truth[means.argmax()]) / spread,
        error=float(np.abs(means - truth).mean()) if comparable else math.nan,
        pairs=len(pairs),
        good=int(good.sum()),
        accepted=int(let.sum()),
        false_accepts=_share(let, ~good),
        false_rejects=_share(~let, good),
    )


def best_judge(scores: Mapping[str, JudgeScore], allowed: float = 0.05) -> str | None:
    """Return the judge to use: of those with at most `allowed` false accepts the one that rejects least wrongly.

    None where no judge is safe, or none that is lets anything through: nothing is known of those.
    """
    safe = {name: score for name, score in scores.items() if score.accepted and not score.false_accepts > allowed}
    return min(
        safe, key=lambda name: (safe[name].false_rejects, -np.nan_to_num(safe[name].spearman, nan=-1)), default=None
    )


def _share(what: Array, among: Array) -> float:
    return float(what[among].mean()) if among.any() else math.nan
