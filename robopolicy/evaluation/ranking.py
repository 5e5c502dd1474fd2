"""Ranking of policies by a world model, compared with the simulator (or the robot), with uncertainty.

The unit is an independently trained policy, not a checkpoint of one run: checkpoints of one run share their errors and
make any model look good. Axes: k policy, E episode.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from robopolicy.core.errors import DataError
from robopolicy.evaluation.intervals import percentile_interval
from robopolicy.evaluation.success import EvaluationResult


def pearson(real: np.ndarray, model: np.ndarray) -> np.ndarray:
    """Return the linear correlations [...] of scores [..., k]; NaN if either is constant. Raises DataError if they do
    not pair.
    """
    from scipy import stats  # seconds to import: who ranks, pays

    real, model = _pair(real, model)
    defined = (np.ptp(real, axis=-1) > 0) & (np.ptp(model, axis=-1) > 0)
    correlations = np.full(defined.shape, np.nan)
    if defined.any():
        correlations[defined] = stats.pearsonr(real[defined], model[defined], axis=-1)[0]
    return correlations


def spearman(real: np.ndarray, model: np.ndarray) -> np.ndarray:
    """Return the correlations [...] of the ranks of scores [..., k] (ties share the mean rank); NaN as in `pearson`.

    scipy's spearmanr takes one pair at a time, which is a hundred times slower for a bootstrap.
    """
    from scipy import stats

    real, model = _pair(real, model)
    return pearson(stats.rankdata(real, axis=-1), stats.rankdata(model, axis=-1))


def kendall(real: np.ndarray, model: np.ndarray) -> np.ndarray:
    """Return Kendall's tau-b [...] of scores [..., k]: concordant minus discordant pairs, corrected for ties.

    NaN if either is constant. Own implementation because scipy's kendalltau takes one pair at a time, 40 times slower.
    """
    real, model = _pair(real, model)
    first, second = (np.sign(scores[..., :, None] - scores[..., None, :]) for scores in (real, model))
    pairs = np.sqrt((first**2).sum((-2, -1)) * (second**2).sum((-2, -1)))
    with np.errstate(invalid="ignore"):  # 0 / 0, a constant, is the NaN that is promised
        return np.asarray((first * second).sum((-2, -1)) / pairs)


def mmrv(*, real: np.ndarray, model: np.ndarray) -> np.ndarray:
    """Return the mean maximum rank violation [...] of scores [..., k]: real success lost by trusting the model's order.

    For each policy i the largest |R_i - R_j| over the policies j that the model orders wrongly, averaged over i; 0 is a
    perfect order. Not symmetric in its arguments. Source: Li et al. 2024, SIMPLER, section 4.
    """
    real, model = _pair(real, model)
    differences = real[..., :, None] - real[..., None, :]
    violated = (model[..., :, None] > model[..., None, :]) != (differences > 0)
    return np.asarray((np.abs(differences) * violated).max(axis=-1).mean(axis=-1))


def mean_absolute_error(real: np.ndarray, model: np.ndarray) -> np.ndarray:
    """Return mean |S - R| [...] over policies, of scores [..., k]."""
    real, model = _pair(real, model)
    return np.asarray(np.abs(model - real).mean(axis=-1))


def bias(real: np.ndarray, model: np.ndarray) -> np.ndarray:
    """Return mean (S - R) [...] over policies, of scores [..., k]: positive when the model is optimistic."""
    real, model = _pair(real, model)
    return np.asarray((model - real).mean(axis=-1))


STATISTICS: Mapping[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "pearson": pearson,
    "spearman": spearman,
    "kendall": kendall,
    "mmrv": lambda real, model: mmrv(real=real, model=model),
    "mean_absolute_error": mean_absolute_error,
    "bias": bias,
}
"""Name -> function of (real [..., k], model [..., k])."""


def permutation_floor(policies: int) -> float:
    """Return the smallest p-value that any ranking of `policies` can reach by permutation, 1/k!."""
    return 1 / math.factorial(policies)


def permutation_p_value(
    real: np.ndarray, model: np.ndarray, generator: np.random.Generator, draws: int = 20_000
) -> float:
    """Return the fraction of random pairings of real [k] and model [k] that correlate (Pearson) at least as well.

    Uses all pairings for up to 8 policies, else `draws` random ones.
    """
    real, model = _pair(real, model)
    if np.ptp(real) == 0 or np.ptp(model) == 0:
        return 1.0
    count = len(real)
    if count <= 8:
        orders = np.array(list(itertools.permutations(range(count))))
    else:
        orders = np.vstack([np.arange(count), generator.permuted(np.tile(np.arange(count), (draws, 1)), axis=1)])
    products = model[orders] @ (real - real.mean())
    return float((products >= products[0] - 1e-12).mean())


@dataclass(frozen=True)
class Estimate:
    """A statistic with two bootstrap intervals (low, high), None if the resamples leave it undefined.

    policies: resampling the policies; episodes: resampling the episodes of the same policies.
    """

    value: float | None
    policies: tuple[float, float] | None
    episodes: tuple[float, float] | None


@dataclass(frozen=True)
class RankingResult:
    """Policies scored in both worlds. real, model: success rates by policy name, with Wilson intervals (low, high)."""

    real: Mapping[str, float]
    model: Mapping[str, float]
    real_intervals: Mapping[str, tuple[float, float]]
    model_intervals: Mapping[str, tuple[float, float]]
    statistics: Mapping[str, Estimate]
    permutation_p_value: float
    permutation_floor: float
    episodes: tuple[int, int]
    confidence: float
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary, policies in order of real success."""
        names = sorted(self.real, key=lambda name: self.real[name])
        policies = [
            {
                "name": name,
                "real": self.real[name],
                "real_interval": list(self.real_intervals[name]),
                "model": self.model[name],
                "model_interval": list(self.model_intervals[name]),
            }
            for name in names
        ]
        statistics = {
            name: {
                "value": estimate.value,
                "interval_over_policies": None if estimate.policies is None else list(estimate.policies),
                "interval_over_episodes": None if estimate.episodes is None else list(estimate.episodes),
            }
            for name, estimate in self.statistics.items()
        }
        return {
            "policies": policies,
            "statistics": statistics,
            "permutation_p_value": self.permutation_p_value,
            "permutation_floor": self.permutation_floor,
            "episodes": {"real": self.episodes[0], "model": self.episodes[1]},
            "confidence": self.confidence,
            "warnings": list(self.warnings),
        }


def rank(
    *,
    real: Mapping[str, EvaluationResult],
    model: Mapping[str, EvaluationResult],
    generator: np.random.Generator,
    resamples: int = 2000,
    confidence: float = 0.95,
) -> RankingResult:
    """Compute how well a world model ranks policies.

    real, model: the same policies evaluated in the simulator (or on the robot) and in the world model. Intervals are
    percentile bootstraps over policies and over episodes (jointly by seed if the policies share their seeds, so that a
    difficult initial state is difficult for all). All statistics use the same resamples and ignore those where they are
    undefined, which scipy.stats.bootstrap does not offer. Raises DataError for fewer than three policies or different
    names.
    """
    if set(real) != set(model):
        raise DataError(
            f"The simulator and the world model evaluated different policies: {sorted(real)} and {sorted(model)}."
        )
    if len(real) < 3:
        raise DataError(f"Ranking needs at least three policies (better six), got {len(real)}.")
    names = list(real)
    scores = np.array([[results[name].success_rate for name in names] for results in (real, model)])
    over_policies = generator.integers(len(names), size=(resamples, len(names)))
    over_episodes = np.stack(
        [_resampled_rates([results[name] for name in names], generator, resamples) for results in (real, model)], 1
    )
    statistics: dict[str, Estimate] = {}
    warnings = _warnings(scores, min(result.episodes for result in real.values()))
    for name, function in STATISTICS.items():
        if name == "mmrv" and np.ptp(scores[0]) == 0:  # 0 by its formula: there is no order that could be violated
            statistics[name] = Estimate(None, None, None)
            warnings.append(f"{name} is undefined: all policies have the same real score.")
            continue
        value = float(function(*scores))
        by_policy = function(*scores[:, over_policies])
        by_episode = function(over_episodes[:, 0], over_episodes[:, 1])
        statistics[name] = Estimate(
            value if math.isfinite(value) else None,
            _interval(by_policy, confidence),
            _interval(by_episode, confidence),
        )
        if statistics[name].value is None:
            warnings.append(
                f"{name} is undefined: all policies have the same score in the simulator or in the world model."
            )
    return RankingResult(
        real={name: real[name].success_rate for name in names},
        model={name: model[name].success_rate for name in names},
        real_intervals={name: real[name].interval for name in names},
        model_intervals={name: model[name].interval for name in names},
        statistics=statistics,
        permutation_p_value=permutation_p_value(scores[0], scores[1], generator),
        permutation_floor=permutation_floor(len(names)),
        episodes=(min(result.episodes for result in real.values()), min(result.episodes for result in model.values())),
        confidence=confidence,
        warnings=tuple(warnings),
    )


FEW_EPISODES = 20
"""Real episodes per policy up to which agreement says little: a rate of one half is known to 20 points."""


def _warnings(scores: np.ndarray, episodes: int) -> list[str]:
    policies = scores.shape[1]
    warnings = list[str]()
    if episodes < FEW_EPISODES:
        warnings.append(
            f"The policies' real success is known from {episodes} episodes each, so agreement with it says "
            f"little about the model: play {FEW_EPISODES} or more."
        )
    if policies < 6:
        floor = permutation_floor(policies)
        warnings.append(
            f"Only {policies} policies: even a perfect order has a permutation p-value of 1/{policies}! = {floor:.3f}. "
            "Rank at least six independently trained policies."
        )
    spread = float(np.ptp(scores[0]))
    if spread < 0.5:
        warnings.append(
            f"The policies' real success spans only {spread:.0%}: correlations are uninformative. Add weaker or "
            "stronger policies."
        )
    return warnings


def _resampled_rates(results: list[EvaluationResult], generator: np.random.Generator, resamples: int) -> np.ndarray:
    """Return the success rates of k policies under resampled episodes, [resamples, k]."""
    same_seeds = all(np.array_equal(np.sort(result.seeds), np.sort(results[0].seeds)) for result in results)
    if not same_seeds:
        rates = [generator.binomial(r.episodes, r.success_rate, size=resamples) / r.episodes for r in results]
        return np.stack(rates, axis=1)
    success = np.stack([result.success[np.argsort(result.seeds)] for result in results]).astype(np.float64)
    counts = generator.multinomial(success.shape[1], np.full(success.shape[1], 1 / success.shape[1]), size=resamples)
    return counts @ success.T / success.shape[1]


def _interval(replicates: np.ndarray, confidence: float) -> tuple[float, float] | None:
    if 2 * np.isfinite(replicates).sum() < len(replicates):
        return None
    return percentile_interval(replicates, confidence)


def _pair(real: np.ndarray, model: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    real, model = np.asarray(real, dtype=np.float64), np.asarray(model, dtype=np.float64)
    if real.ndim < 1 or real.shape != model.shape or real.shape[-1] < 2:
        raise DataError(
            f"Scores of shapes {real.shape} and {model.shape} cannot be paired: pass one number per policy, for "
            "two or more policies."
        )
    return real, model
