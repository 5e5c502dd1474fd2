"""Recorded motions, and hypotheses on convention errors in them: the correction for each, and a search for the cause.

Hypotheses are tested alone and in combination until one explains the data; a score measures how far a corrected motion
is from agreeing with the world.
Axes: E episode, T step, A action dimension, S observation element (all vector fields, one after the other).
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from robopolicy.core.finite_values import element_names
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.spec import Field
from robopolicy.doctor.findings import FACTORS, Finding, Health, name_factor


@dataclass(frozen=True)
class Motion:
    """A batch of recorded episodes: actions [E, T, A] (NaN: unknown), frames [E, T + 1, S], known [E, T + 1] bool.

    Frame t is the observation on which action t was taken; frames that are not known (padding) are never compared.
    """

    actions: np.ndarray
    frames: np.ndarray
    known: np.ndarray

    def cut(self, steps: int) -> "Motion":
        """Keep the first `steps` steps."""
        return Motion(self.actions[:, :steps], self.frames[:, : steps + 1], self.known[:, : steps + 1])


@dataclass(frozen=True)
class Hypothesis:
    """A possible convention error: the finding's name, its text and remedy, and the function that corrects a motion."""

    check: str
    text: str
    remedy: str
    mend: Callable[[Motion], Motion]


def action_hypotheses(field: Field, largest: np.ndarray) -> list[Hypothesis]:
    """Return the possible errors of sign, order, scale and range for actions of this field.

    largest: [A], largest absolute action in the data; scale factors are omitted if the corrected actions would not fit
    the field's range (at most 1.5 times and at least 1/50 of the bounds).
    """
    names = element_names(field, "action")
    low, high = (np.broadcast_to(bound, field.shape).astype(float) for bound in (field.low, field.high))
    hypotheses = []
    for i, name in enumerate(names):
        middle = low[i] + high[i] if low[i] >= 0 and np.isfinite(high[i]) else 0.0
        remedy = f"Flip '{name}' in the data, or in the driver that records it."
        hypotheses.append(Hypothesis("action sign", f"'{name}' has the opposite sign", remedy, _flip(i, middle)))
    for i, j in itertools.combinations(range(len(names)), 2):
        text = f"'{names[i]}' and '{names[j]}' are swapped"
        hypotheses.append(
            Hypothesis(
                "action order", text, "Swap these two columns of the actions.", _reorder(_exchanged(i, j, len(names)))
            )
        )
    for order in _cycles(len(names)) if len(names) <= 7 else ():
        moves = [(names[i], names[j]) for i, j in enumerate(order) if i != j]
        text = ", ".join(f"'{place}' contains '{source}'" for place, source in moves)
        hypotheses.append(Hypothesis("action order", text, "Reorder these columns of the actions.", _reorder(order)))
    factors = [factor for known_factor in FACTORS for factor in (known_factor, 1 / known_factor)]
    share = largest / np.maximum(np.abs(low), np.abs(high))  # 0 where there are no bounds
    for factor in factors:
        if _fits(float(share.max()) / factor):
            hypotheses.append(_scale_hypothesis(factor, None, "every action"))
    for (i, name), factor in itertools.product(enumerate(names) if len(names) > 1 else (), factors):
        if _fits(float(share[i]) / factor) and largest[i] > 0:
            hypotheses.append(_scale_hypothesis(factor, i, f"'{name}'"))
    if np.isfinite(low).all() and np.isfinite(high).all():
        for first, last in ((-1.0, 1.0), (0.0, 1.0)):
            if np.allclose(low, first) and np.allclose(high, last):
                continue
            text = f"the actions are stored in the range {first:g} to {last:g} instead of the world's range"
            remedy = "Map them back to the world's bounds before writing the dataset."
            hypotheses.append(Hypothesis("action scale", text, remedy, _from_range(first, last, low, high)))
    return hypotheses


ALIGN = "Align them: an action belongs to the frame at which it was chosen."


LATEST = 8
"""Maximum time shift of actions or observations, in steps."""


def short_shifts() -> list[Hypothesis]:
    """Return the time shifts that are tested in combination with other errors."""
    actions = [_actions_late(1), _actions_early(1), _actions_late(2)]
    return [*actions, _observations_late(1), observations_early(1), _observations_late(2)]


def long_shifts() -> list[Hypothesis]:
    """Return time shifts by several steps."""
    late_shifts = [shift(steps) for steps in range(3, LATEST + 1) for shift in (_actions_late, _observations_late)]
    return [*late_shifts, *(_actions_early(steps) for steps in range(2, LATEST + 1))]


def _actions_late(steps: int) -> Hypothesis:
    return _shift("actions", steps, "late", _late(steps))


def _actions_early(steps: int) -> Hypothesis:
    return _shift("actions", steps, "early", _early(steps))


def _observations_late(steps: int) -> Hypothesis:
    return _shift("observations", steps, "late", _frames_late(steps))


def observations_early(steps: int) -> Hypothesis:
    """Return the hypothesis that every observation is stored `steps` steps too early."""
    return _shift("observations", steps, "early", _frames_early(steps))


def _shift(what: str, steps: int, way: str, mend: Callable[[Motion], Motion]) -> Hypothesis:
    text = f"{what} are stored {'one step' if steps == 1 else f'{steps} steps'} too {way}"
    return Hypothesis("time shift", text, ALIGN, mend)


def rate_hypotheses(fps: float) -> list[Hypothesis]:
    """Return the hypotheses of a control rate that is wrong by an integer factor; fps: the world's."""
    hypotheses = []
    for factor in (2, 3, 4, 5):
        for times, mend in ((1 / factor, _hold(factor)), (factor, _skip(factor))):
            text = f"the data moves as if recorded at {fps * times:g} steps/s; the world runs at {fps:g}"
            remedy = f"Resample the data to {fps:g} steps/s and correct its fps."
            hypotheses.append(Hypothesis("control rate", text, remedy, mend))
    return hypotheses


def scaled_actions(factor: float, dimension: int | None = None) -> Callable[[Motion], Motion]:
    """Return the correction of actions (or of one dimension) that are `factor` times too large."""

    def mend(motion: Motion) -> Motion:
        actions = motion.actions.copy()
        actions[..., slice(None) if dimension is None else dimension] /= factor
        return replace(motion, actions=actions)

    return mend


def _fits(share: float) -> bool:
    return share == 0 or 0.02 < share < 1.5


def _scale_hypothesis(factor: float, dimension: int | None, what: str) -> Hypothesis:
    remedy = "Divide by this factor in the data, or set the correct unit in the recorder."
    return Hypothesis("action scale", f"{what} is {name_factor(factor)}", remedy, scaled_actions(factor, dimension))


def _flip(dimension: int, middle: float) -> Callable[[Motion], Motion]:
    def mend(motion: Motion) -> Motion:
        actions = motion.actions.copy()
        actions[..., dimension] = middle - actions[..., dimension]
        return replace(motion, actions=actions)

    return mend


def _exchanged(first: int, second: int, count: int) -> tuple[int, ...]:
    order = list(range(count))
    order[first], order[second] = second, first
    return tuple(order)


def _cycles(count: int) -> list[tuple[int, ...]]:
    """Return every cyclic permutation of three of `count` elements."""
    permutations = []
    for i, j, k in itertools.combinations(range(count), 3):
        for first, second, third in ((i, j, k), (i, k, j)):
            order = list(range(count))
            order[first] = second
            order[second] = third
            order[third] = first
            permutations.append(tuple(order))
    return permutations


def _reorder(order: tuple[int, ...]) -> Callable[[Motion], Motion]:
    """Element i of the data contains element order[i] of the world."""
    return lambda motion: replace(motion, actions=motion.actions[..., np.argsort(order)])


def _from_range(first: float, last: float, low: np.ndarray, high: np.ndarray) -> Callable[[Motion], Motion]:
    return lambda motion: replace(motion, actions=low + (motion.actions - first) / (last - first) * (high - low))


def _unknown(motion: Motion) -> Motion:
    """Return a motion without known frames: it is too short for the shift, so nothing can be compared."""
    return replace(motion, known=np.zeros_like(motion.known))


def _late(steps: int) -> Callable[[Motion], Motion]:
    def mend(motion: Motion) -> Motion:
        count = motion.actions.shape[1] - steps
        if count < 1:
            return _unknown(motion)
        valid = motion.known[:, : count + 1] & motion.known[:, steps:]
        return Motion(motion.actions[:, steps:], motion.frames[:, : count + 1], valid)

    return mend


def _frames_late(steps: int) -> Callable[[Motion], Motion]:
    def mend(motion: Motion) -> Motion:
        count = motion.actions.shape[1] - steps
        if count < 1:
            return _unknown(motion)
        return Motion(motion.actions[:, :count], motion.frames[:, steps:], motion.known[:, steps:])

    return mend


def _early(steps: int) -> Callable[[Motion], Motion]:
    def mend(motion: Motion) -> Motion:
        if motion.actions.shape[1] <= steps:
            return _unknown(motion)
        fill = np.full_like(motion.actions[:, :steps], np.nan)
        valid = motion.known.copy()
        valid[:, : steps + 1] = False  # the unknown actions are found from these frames, which so are no evidence
        return replace(motion, actions=np.concatenate([fill, motion.actions[:, :-steps]], axis=1), known=valid)

    return mend


def _frames_early(steps: int) -> Callable[[Motion], Motion]:
    """Return the correction that moves every frame `steps` steps later; frames before the action of step `steps` become
    unknown.
    """

    def mend(motion: Motion) -> Motion:
        if motion.actions.shape[1] <= steps:
            return _unknown(motion)
        frames = np.concatenate([np.repeat(motion.frames[:, :1], steps, axis=1), motion.frames[:, :-steps]], axis=1)
        fill = np.zeros_like(motion.known[:, :steps])
        return replace(motion, frames=frames, known=np.concatenate([fill, motion.known[:, :-steps]], axis=1))

    return mend


def _hold(factor: int) -> Callable[[Motion], Motion]:
    """Correct a recording whose steps last `factor` steps of the world; actions in between are interpolated."""

    def mend(motion: Motion) -> Motion:
        steps = motion.actions.shape[1]
        frames = np.repeat(motion.frames, factor, axis=1)[:, : steps + 1]
        valid = np.repeat(motion.known, factor, axis=1)[:, : steps + 1]
        valid[:, np.arange(steps + 1) % factor != 0] = False
        share = (np.arange(steps) % factor / factor)[:, None]
        following = np.concatenate([motion.actions[:, 1:], motion.actions[:, -1:]], axis=1)
        current, following_part = (
            np.repeat(actions, factor, axis=1)[:, :steps] for actions in (motion.actions, following)
        )
        return Motion((1 - share) * current + share * following_part, frames, valid)

    return mend


def _skip(factor: int) -> Callable[[Motion], Motion]:
    """Correct a recording in which `factor` steps last one step of the world."""

    def mend(motion: Motion) -> Motion:
        count = motion.actions.shape[1] // factor
        frames, valid = motion.frames[:, ::factor][:, : count + 1], motion.known[:, ::factor][:, : count + 1]
        return Motion(motion.actions[:, ::factor][:, :count], frames, valid)

    return mend


BEAM, DEPTH = 3, 3
"""Number of partial explanations kept in the beam search, and maximum number of convention errors per explanation."""
PARTIAL = 0.9
"""Maximum remaining fraction of the error for a partial explanation to be continued."""
LIKELY = 0.75
"""Maximum remaining fraction of the error for a likely explanation."""
RIVAL = 1.15
"""Maximum ratio of the error of an alternative explanation to the smallest error."""


@dataclass(frozen=True)
class Score:
    """Agreement of a motion: its error (1: no better than chance); exact: whether no error is left."""

    error: float
    exact: bool


ScoreMotion = Callable[[Motion], Score]


@dataclass(frozen=True)
class Explanation:
    """Convention errors that, when corrected together, bring a motion to `score`."""

    breaks: tuple[Hypothesis, ...]
    motion: Motion
    score: Score


def explain_exactly(
    motion: Motion, hypotheses: Sequence[Hypothesis], judge: ScoreMotion, depth: int = DEPTH
) -> list[Explanation]:
    """Return the simplest explanations that leave no error; several if they explain equally well.

    depth: maximum number of convention errors in one explanation. All hypotheses are tested on the motion; those that
    reduce the error are then tested on the best partial corrections (a beam search). The search stops at the first
    depth with an exact explanation; [] if there is none.
    """
    for explanations in _search(motion, hypotheses, judge, depth):
        exact = _distinct([item for item in explanations if item.score.exact])
        if exact:
            return sorted(exact, key=lambda item: item.score.error)
    return []


def explain_nearly(motion: Motion, hypotheses: Sequence[Hypothesis], judge: ScoreMotion) -> list[Explanation]:
    """Return the single convention error whose correction leaves the smallest error; several if they are about equal.

    Returns [] unless a correction removes a substantial part of the error.
    """
    start = Explanation((), motion, judge(motion))
    limit = LIKELY * min(start.score.error, 1.0)
    explanations = [_mended(start, item, judge) for item in hypotheses]
    likely = sorted((item for item in explanations if item.score.error < limit), key=lambda item: item.score.error)
    return _distinct([item for item in likely if item.score.error < RIVAL * likely[0].score.error])


def _search(
    motion: Motion, hypotheses: Sequence[Hypothesis], judge: ScoreMotion, depth: int
) -> Iterator[list[Explanation]]:
    """Yield, for each number of convention errors up to `depth`, the explanations tested."""
    start = Explanation((), motion, judge(motion))
    beam, useful = [start], list(hypotheses)
    for _ in range(depth):
        expansions = [(partial, [_mended(partial, item, judge) for item in useful]) for partial in beam]
        explanations = [item for _, items in expansions for item in items]
        yield explanations
        if beam == [start]:
            useful = [item.breaks[0] for item in explanations if item.score.error < start.score.error]
        better = [item for partial, items in expansions for item in items if _helps(item, partial)]
        beam = _distinct(sorted(better, key=lambda item: item.score.error))[:BEAM]


def _helps(item: Explanation, partial: Explanation) -> bool:
    return item.score.error < PARTIAL * partial.score.error and len(set(item.breaks)) == len(item.breaks)


def report(explanations: Sequence[Explanation], exactly: str, nearly: str) -> list[Finding]:
    """Turn explanations into findings, stating when they are approximate or cannot be distinguished.

    exactly, nearly: effect of the correction, e.g. "replays follow the recording", "replays still miss {error:.0%}".
    """
    findings = []
    for explanation in explanations:
        exact, are_several = explanation.score.exact, len(explanations) > 1
        text = " and ".join(item.text for item in explanation.breaks)
        likely = "" if exact else "most likely: " if explanation.score.error < 0.5 else "perhaps: "
        either = f"one of {len(explanations)} explanations that fit this data equally: " if are_several else ""
        outcome = "after the fix " + (exactly if exact else nearly.format(error=explanation.score.error))
        remedies = " ".join(dict.fromkeys(item.remedy for item in explanation.breaks))
        for check in dict.fromkeys(item.check for item in explanation.breaks):
            findings.append(Finding(check, Health.BAD, f"{either}{likely}{text} ({outcome})", remedies))
    return findings


def _mended(partial: Explanation, hypothesis: Hypothesis, judge: ScoreMotion) -> Explanation:
    motion = hypothesis.mend(partial.motion)
    return Explanation((*partial.breaks, hypothesis), motion, judge(motion))


def _distinct(explanations: Sequence[Explanation]) -> list[Explanation]:
    """Drop explanations that correct a motion in the same way as an earlier one."""
    distinct: list[Explanation] = []
    for item in explanations:
        if not any(_same(item.motion, other.motion) for other in distinct):
            distinct.append(item)
    return distinct


def _same(first: Motion, second: Motion) -> bool:
    pairs = ((first.actions, second.actions), (first.frames, second.frames), (first.known, second.known))
    return all(a.shape == b.shape and np.allclose(a, b, equal_nan=True) for a, b in pairs)


keep_former_names(__name__, {"Judge": "ScoreMotion"})
