"""The gate: a candidate replaces the incumbent only if all evaluators confirm, from the same initial states, that it is
better.

Both are scored anew every time from the same initial states with the same random numbers, so luck neither keeps an
incumbent nor selects a candidate. A lower confidence bound of the paired difference, by the bootstrap and by Student's
t, must exceed the margin. An evaluator on recorded data is not credible if it values a policy, on average, above nearly
all recorded successes. Rules used elsewhere and avoided here: a strict `>` between means of different batches (a
ratchet on noise), and a critic that evaluates the policy trained on it. Sources: RL-100 (arXiv:2510.14830) and Uni-O4
(arXiv:2311.03351) for gated offline updates; high-confidence policy improvement, Thomas et al. 2015, for lower bounds.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from robopolicy.core.arrays import Array
from robopolicy.core.errors import ConfigError, DataError
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.policy import Policy
from robopolicy.evaluation.classified import reason_to_refuse
from robopolicy.evaluation.intervals import mean_interval


class Evaluator(Protocol):
    """Off-policy evaluator: estimates a policy's value per initial state, without playing it in the real world.

    name: description for the log; independent: whether it was not used to train the candidates. An evaluator with a
    highest credible mean value provides it as `ceiling`.
    """

    name: str
    independent: bool

    def values(self, policy: Policy) -> Array:
        """Return the policy's estimated value from each of the evaluator's initial states [S]; the same states at every
        call.

        Random numbers, if any, are the same for every policy.
        """
        ...


@dataclass(frozen=True)
class EvaluatorResult:
    """Result of one evaluator: means over its initial states, their difference, and lower and upper bounds of the
    difference.

    bootstrap, student: (low, high) at `confidence`, by resampling initial states and by Student's t; ceiling: the
    highest credible mean, None for no limit.
    """

    judge: str
    starts: int
    candidate: float
    incumbent: float
    difference: float
    bootstrap: tuple[float, float]
    student: tuple[float, float]
    margin: float
    confidence: float
    ceiling: float | None = None

    @property
    def low(self) -> float:
        """The smaller of the two lower bounds."""
        return min(self.bootstrap[0], self.student[0])

    @property
    def better(self) -> bool:
        """Whether the candidate is better by more than the margin, with confidence, and the estimate is credible."""
        return self.low > self.margin and self.credible

    @property
    def credible(self) -> bool:
        """Whether the data makes the candidate's value credible."""
        return self.ceiling is None or self.candidate <= self.ceiling

    @property
    def text(self) -> str:
        """Text for logs: "+.060 [+.020, +.090] on 256 initial states, evaluated by ..."."""
        low, high = self.bootstrap
        bound = f" (Student's t from {self.student[0]:+.3f})" if self.student[0] < low else ""
        return (
            f"{self.difference:+.3f} [{low:+.3f}, {high:+.3f}]{bound} on {self.starts} initial states, evaluated "
            f"by {self.judge}"
        )


@dataclass(frozen=True)
class GateResult:
    """The gate's decision on one candidate.

    reasons: one sentence for each evaluator; env_steps: control steps played in the world for it; clipped: fraction of
    targets outside the reward bounds, for every critic fitted for it.
    """

    accepted: bool
    judgements: tuple[EvaluatorResult, ...]
    reasons: tuple[str, ...]
    env_steps: int = 0
    clipped: tuple[float, ...] = ()

    def line(self, what: str) -> str:
        """Return the line of the log: "accepted round 3: +.060 [+.020, +.090] on 256 initial states, ..."."""
        return f"{'accepted' if self.accepted else 'rejected'} {what}: {'; '.join(self.reasons)}"

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return {
            "accepted": self.accepted,
            "reasons": list(self.reasons),
            "env_steps": self.env_steps,
            "clipped": list(self.clipped),
            "judgements": [{**asdict(each), "low": each.low, "better": each.better} for each in self.judgements],
        }


class Gate:
    """A set of evaluators that must all confirm an improvement.

    margin: minimum improvement of a candidate, in the evaluators' units, at least 0; relative: margin as a fraction of
    the incumbent's value instead (RL-100 uses .05). Raises ConfigError without an evaluator, and when every evaluator
    was used in training: a model must not be the only evaluator of policies trained on it.
    """

    def __init__(
        self, judges: Sequence[Evaluator], *, margin: float = 0.0, relative: float = 0.0, confidence: float = 0.95
    ):
        if not judges:
            raise ConfigError("A gate needs an evaluator: a world model, or a critic trained on held-out data.")
        if not any(judge.independent for judge in judges):
            raise ConfigError(
                f"{', '.join(judge.name for judge in judges)} was used in training, so it cannot be the only "
                "evaluator. Add an independent one: a world model, or a critic on held-out data."
            )
        if margin < 0 or relative < 0 or not 0 < confidence < 1:
            raise ConfigError(
                f"margin={margin} and relative={relative} must be at least 0, and confidence={confidence} in (0, 1)."
            )
        self.judges = tuple(judges)
        self.margin = margin
        self.relative = relative
        self.confidence = confidence

    def decide(self, candidate: Policy, incumbent: Policy) -> GateResult:
        """Score both policies with every evaluator, and decide whether the candidate may replace the incumbent.

        Trials whose success a classifier supplies count only if it keeps its false-accept rate (`reason_to_refuse`).

        Raises DataError when an evaluator's values are not finite or do not pair.
        """
        before, fit_counts = _trials(self.judges), [len(_clipped(judge)) for judge in self.judges]
        judgements = [
            evaluator_result(
                judge.name,
                judge.values(candidate),
                judge.values(incumbent),
                self.margin,
                self.relative,
                self.confidence,
                ceiling_of(judge),
            )
            for judge in self.judges
        ]
        refusals = [text for judge in self.judges if (text := reason_to_refuse(getattr(judge, "classified", ())))]
        return GateResult(
            accepted=all(each.better for each in judgements) and not refusals,
            judgements=tuple(judgements),
            reasons=(*(_reason(each) for each in judgements), *refusals),
            env_steps=_trials(self.judges) - before,
            clipped=tuple(
                share for judge, count in zip(self.judges, fit_counts, strict=True) for share in _clipped(judge)[count:]
            ),
        )


def evaluator_result(
    judge: str,
    candidate: Array,
    incumbent: Array,
    margin: float,
    relative: float = 0.0,
    confidence: float = 0.95,
    ceiling: float | None = None,
) -> EvaluatorResult:
    """Compare paired values [S] of two policies from the same S initial states.

    ceiling: the highest credible mean value. Raises DataError unless the values pair, are finite and at least two.
    """
    candidate, incumbent = (np.asarray(values, dtype=np.float64) for values in (candidate, incumbent))
    if candidate.shape != incumbent.shape or candidate.ndim != 1 or len(candidate) < 2:
        raise DataError(
            f"Values of shape {list(candidate.shape)} and {list(incumbent.shape)} cannot be paired: evaluate "
            "both policies on the same initial states."
        )
    if not (np.isfinite(candidate).all() and np.isfinite(incumbent).all()):
        raise DataError(f"{judge} returned values that are not finite: it cannot evaluate these policies.")
    from scipy.special import stdtrit  # half a second to import: who judges, pays

    difference = candidate - incumbent
    mean, error = float(difference.mean()), float(difference.std(ddof=1)) / math.sqrt(len(difference))
    half = float(stdtrit(len(difference) - 1, 0.5 + confidence / 2)) * error
    return EvaluatorResult(
        judge=judge,
        starts=len(difference),
        candidate=float(candidate.mean()),
        incumbent=float(incumbent.mean()),
        difference=mean,
        bootstrap=mean_interval(difference, confidence),
        student=(mean - half, mean + half),
        margin=max(margin, relative * abs(float(incumbent.mean()))),
        confidence=confidence,
        ceiling=ceiling,
    )


def ceiling_of(judge: Evaluator) -> float | None:
    """Return the highest mean value that an evaluator's data makes credible, None if it declares none."""
    return getattr(judge, "ceiling", None)


def _trials(judges: Sequence[Evaluator]) -> int:
    """Return the number of control steps that evaluators have played in the world so far."""
    return sum(int(getattr(judge, "env_steps", 0)) for judge in judges)


def _clipped(judge: Evaluator) -> Sequence[float]:
    """Return the clipped fractions of an evaluator that fits critics; see `FqeEvaluator`."""
    return getattr(judge, "clipped", ())


def _reason(found: EvaluatorResult) -> str:
    if found.better:
        return found.text
    if not found.credible and found.low > found.margin:
        return (
            f"{found.text}: not credible: the mean is {found.candidate:.3g}, but the recorded data supports at most "
            f"{found.ceiling:.3g}"
        )
    if found.margin and found.low > 0:
        return f"{found.text}: better, but by less than the margin of {found.margin:.3g}"
    return f"{found.text}: {'worse' if max(found.bootstrap[1], found.student[1]) < 0 else 'not significantly better'}"


keep_former_names(__name__, {"Judge": "Evaluator", "Judgement": "EvaluatorResult", "judged": "evaluator_result"})
