"""From "these do not agree" to "because": try breaks of convention, alone and together, until one explains the data.

A judge measures how far a motion is from agreeing with the world.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from robopolicy.doctor.findings import Finding, Health
from robopolicy.doctor.motion import Hypothesis, Motion

BEAM, DEPTH = 3, 3
"""How many partial explanations are pursued at once, and how many breaks one explanation may combine."""
PARTIAL = 0.9
"""Share of the error that may remain to go on."""
LIKELY = 0.75
"""Share of the error that may remain of a likely explanation."""
RIVAL = 1.15
"""How near the error of a rival is."""


@dataclass(frozen=True)
class Score:
    """How a motion agrees: its error (1: no better than chance); exact: nothing is left to explain."""

    error: float
    exact: bool


Judge = Callable[[Motion], Score]


@dataclass(frozen=True)
class Explanation:
    """Breaks that, mended together, bring a motion to `score`."""

    breaks: tuple[Hypothesis, ...]
    motion: Motion
    score: Score


def explain_exactly(
    motion: Motion, hypotheses: Sequence[Hypothesis], judge: Judge, depth: int = DEPTH
) -> list[Explanation]:
    """Return the simplest explanations after which nothing is left to explain; several if none is more right.

    depth: breaks that one explanation may combine.
    All hypotheses are tried on the motion; those that help are then tried on the best partial mendings (a beam
    search). It stops at the first depth with an exact explanation; [] if there is none.
    """
    for tried in _search(motion, hypotheses, judge, depth):
        exact = _distinct([item for item in tried if item.score.exact])
        if exact:
            return sorted(exact, key=lambda item: item.score.error)
    return []


def explain_nearly(motion: Motion, hypotheses: Sequence[Hypothesis], judge: Judge) -> list[Explanation]:
    """Return the one break that leaves least of the error; several if they are about as good.

    [] unless something takes a good part of the error away.
    """
    start = Explanation((), motion, judge(motion))
    limit = LIKELY * min(start.score.error, 1.0)
    tried = [_mended(start, item, judge) for item in hypotheses]
    likely = sorted((item for item in tried if item.score.error < limit), key=lambda item: item.score.error)
    return _distinct([item for item in likely if item.score.error < RIVAL * likely[0].score.error])


def _search(motion: Motion, hypotheses: Sequence[Hypothesis], judge: Judge, depth: int) -> Iterator[list[Explanation]]:
    """Yield, for each number of breaks up to `depth`, the explanations tried."""
    start = Explanation((), motion, judge(motion))
    beam, useful = [start], list(hypotheses)
    for _ in range(depth):
        grown = [(partial, [_mended(partial, item, judge) for item in useful]) for partial in beam]
        tried = [item for _, items in grown for item in items]
        yield tried
        if beam == [start]:
            useful = [item.breaks[0] for item in tried if item.score.error < start.score.error]
        better = [item for partial, items in grown for item in items if _helps(item, partial)]
        beam = _distinct(sorted(better, key=lambda item: item.score.error))[:BEAM]


def _helps(item: Explanation, partial: Explanation) -> bool:
    return item.score.error < PARTIAL * partial.score.error and len(set(item.breaks)) == len(item.breaks)


def report(explanations: Sequence[Explanation], exactly: str, nearly: str) -> list[Finding]:
    """Turn explanations into findings, and say so where they are approximate or cannot be told apart.

    exactly, nearly: what mending achieves, e.g. "replays follow the recording", "replays still miss {error:.0%}".
    """
    findings = []
    for explanation in explanations:
        exact, several = explanation.score.exact, len(explanations) > 1
        text = " and ".join(item.text for item in explanation.breaks)
        likely = "" if exact else "most likely: " if explanation.score.error < 0.5 else "perhaps: "
        either = f"one of {len(explanations)} explanations that this data cannot tell apart: " if several else ""
        outcome = "mended, " + (exactly if exact else nearly.format(error=explanation.score.error))
        remedies = " ".join(dict.fromkeys(item.remedy for item in explanation.breaks))
        for check in dict.fromkeys(item.check for item in explanation.breaks):
            findings.append(Finding(check, Health.BAD, f"{either}{likely}{text} ({outcome})", remedies))
    return findings


def _mended(partial: Explanation, hypothesis: Hypothesis, judge: Judge) -> Explanation:
    motion = hypothesis.mend(partial.motion)
    return Explanation((*partial.breaks, hypothesis), motion, judge(motion))


def _distinct(explanations: Sequence[Explanation]) -> list[Explanation]:
    """Drop explanations that mend a motion in the same way as one before them."""
    kept: list[Explanation] = []
    for item in explanations:
        if not any(_same(item.motion, other.motion) for other in kept):
            kept.append(item)
    return kept


def _same(first: Motion, second: Motion) -> bool:
    pairs = ((first.actions, second.actions), (first.frames, second.frames), (first.known, second.known))
    return all(a.shape == b.shape and np.allclose(a, b, equal_nan=True) for a, b in pairs)
