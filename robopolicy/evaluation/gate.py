"""The gate: a candidate replaces the incumbent only where judges are sure, on the same starts, that it is better.

Both are scored anew every time on the same starts with the same draws, so that an incumbent that was lucky once is not
kept by its luck, and a candidate is not chosen by it. What must exceed the margin is a lower confidence bound of the
paired difference, by the bootstrap and by Student's t; and no judge by recorded data is believed that values a policy,
on average, above nearly all recorded successes. Rules that were tried elsewhere and are avoided here: a strict `>`
between means of different batches (a ratchet on noise), and a critic that judges the policy it has trained.
Sources: RL-100 (arXiv:2510.14830) and Uni-O4 (arXiv:2311.03351) for gated offline updates; high-confidence policy
improvement, Thomas et al. 2015, for lower bounds.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from robopolicy.core.arrays import Array
from robopolicy.core.errors import ConfigError, DataError
from robopolicy.core.policy import Policy
from robopolicy.evaluation.intervals import mean_interval


class Judge(Protocol):
    """What says how good a policy is, start by start, without playing it in the real world.

    name: in words, for the log; independent: whether it had no part in the training of the candidates. One that knows
    the highest mean value that its data makes credible says so as `ceiling`.
    """

    name: str
    independent: bool

    def values(self, policy: Policy) -> Array:
        """Return what the policy is worth from each of the judge's starts [S]; the same starts at every call.

        Where it draws, it draws the same for every policy.
        """
        ...


@dataclass(frozen=True)
class Judgement:
    """What one judge found: means over its starts, their difference, and lower and upper bounds of that.

    bootstrap, student: (low, high) at `confidence`, by resampling starts and by Student's t; ceiling: the highest mean
    that is believed, None for any.
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
        """The lower of both bounds."""
        return min(self.bootstrap[0], self.student[0])

    @property
    def better(self) -> bool:
        """Whether the candidate is better by more than the margin, for sure, and that can be believed."""
        return self.low > self.margin and self.credible

    @property
    def credible(self) -> bool:
        """Whether the data makes the candidate's value credible."""
        return self.ceiling is None or self.candidate <= self.ceiling

    @property
    def text(self) -> str:
        """For people: "+.06 [.02, .09] on 256 starts, judged by ..."."""
        low, high = self.bootstrap
        bound = f" (Student's t from {self.student[0]:+.3f})" if self.student[0] < low else ""
        return (
            f"{self.difference:+.3f} [{low:+.3f}, {high:+.3f}]{bound} on {self.starts} starts, judged by {self.judge}"
        )


@dataclass(frozen=True)
class GateResult:
    """The verdict on one candidate.

    reasons: one sentence for each judge; env_steps: played in the world for it; clipped: share of targets that left
    what rewards allow, of every critic that was fitted for it.
    """

    accepted: bool
    judgements: tuple[Judgement, ...]
    reasons: tuple[str, ...]
    env_steps: int = 0
    clipped: tuple[float, ...] = ()

    def line(self, what: str) -> str:
        """Return the line of the log: "accepted round 3: +.06 [.02, .09] on 256 starts, judged by ..."."""
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
    """Judges that all must be sure.

    margin: by how much a candidate must be better, in the judges' units, at least 0; relative: margin as a share of
    the incumbent's value instead (RL-100 has .05). Raises ConfigError without a judge, and where every judge had a part
    in the training: nobody judges what they trained alone.
    """

    def __init__(
        self, judges: Sequence[Judge], *, margin: float = 0.0, relative: float = 0.0, confidence: float = 0.95
    ):
        if not judges:
            raise ConfigError("A gate needs a judge: a world model, or a critic of data that training has not seen.")
        if not any(judge.independent for judge in judges):
            raise ConfigError(
                f"{', '.join(judge.name for judge in judges)}: whoever trained a policy does not judge it alone. Add a "
                "judge of its own: a world model, or a critic of held-out data."
            )
        if margin < 0 or relative < 0 or not 0 < confidence < 1:
            raise ConfigError(
                f"margin {margin} and relative {relative} are at least 0, confidence {confidence} in (0, 1)."
            )
        self.judges = tuple(judges)
        self.margin = margin
        self.relative = relative
        self.confidence = confidence

    def decide(self, candidate: Policy, incumbent: Policy) -> GateResult:
        """Score both with every judge, and say whether the candidate may replace the incumbent.

        Raises DataError where a judge's values are not finite or do not pair.
        """
        before, fitted = _trials(self.judges), [len(_clipped(judge)) for judge in self.judges]
        found = [
            judged(
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
        return GateResult(
            accepted=all(each.better for each in found),
            judgements=tuple(found),
            reasons=tuple(_reason(each) for each in found),
            env_steps=_trials(self.judges) - before,
            clipped=tuple(
                share for judge, count in zip(self.judges, fitted, strict=True) for share in _clipped(judge)[count:]
            ),
        )


def judged(
    judge: str,
    candidate: Array,
    incumbent: Array,
    margin: float,
    relative: float = 0.0,
    confidence: float = 0.95,
    ceiling: float | None = None,
) -> Judgement:
    """Return the judgement of paired values [S] of two policies from the same S starts.

    ceiling: the highest mean value that is believed. Raises DataError unless they pair, are finite and at least two.
    """
    candidate, incumbent = (np.asarray(values, dtype=np.float64) for values in (candidate, incumbent))
    if candidate.shape != incumbent.shape or candidate.ndim != 1 or len(candidate) < 2:
        raise DataError(f"Values {list(candidate.shape)} and {list(incumbent.shape)} do not pair: score both alike.")
    if not (np.isfinite(candidate).all() and np.isfinite(incumbent).all()):
        raise DataError(f"{judge} returned values that are not finite: it cannot judge these policies.")
    from scipy.special import stdtrit  # half a second to import: who judges, pays

    difference = candidate - incumbent
    mean, error = float(difference.mean()), float(difference.std(ddof=1)) / math.sqrt(len(difference))
    half = float(stdtrit(len(difference) - 1, 0.5 + confidence / 2)) * error
    return Judgement(
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


def ceiling_of(judge: Judge) -> float | None:
    """Return the highest mean value that a judge's data makes credible, None where it does not say."""
    return getattr(judge, "ceiling", None)


def _trials(judges: Sequence[Judge]) -> int:
    """Return how many control steps judges have played in the world so far, those that do."""
    return sum(int(getattr(judge, "env_steps", 0)) for judge in judges)


def _clipped(judge: Judge) -> Sequence[float]:
    """Return the shares of a judge that fits critics; see `FittedJudge`."""
    return getattr(judge, "clipped", ())


def _reason(found: Judgement) -> str:
    if found.better:
        return found.text
    if not found.credible and found.low > found.margin:
        return (
            f"{found.text}: not credible, a mean of {found.candidate:.3g} where the data shows no more than "
            f"{found.ceiling:.3g}"
        )
    if found.margin and found.low > 0:
        return f"{found.text}: better, but not by the margin of {found.margin:.3g}"
    return f"{found.text}: {'worse' if max(found.bootstrap[1], found.student[1]) < 0 else 'not surely better'}"
