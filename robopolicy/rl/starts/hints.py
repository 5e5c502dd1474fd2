"""Beginning where a demonstration has already gone: classes with depth(predicted, context) -> shares [n].

A start's group begins after that share of its demonstration (0: at the start itself), in a state the expert was in. No
action of the expert's is scored, so nothing has to be corrected for; success gets near enough to be found, and the
share shrinks as it is (reverse curricula). starts=N makes starts come back, so that something is known of them.
"""

import math
from typing import Any, Protocol

import numpy as np

from robopolicy.core.arrays import Array
from robopolicy.rl.context import Context
from robopolicy.rl.registry import Need, Slot, mechanism


class Hints(Protocol):
    """See the module."""

    def depth(self, start: Array, predicted: Array, context: Context, draws: np.random.Generator) -> Array:
        """Return the share of the demonstration to skip, [n] in [0, 1), for starts with predicted success rates."""
        ...

    def observe(self, start: Array, depth: Array, rate: Array) -> None:
        """Take in the success rates [n] of groups that began at `depth`."""
        ...

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs, JSON-able."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        ...


class _Rates:
    """Success rates per start and tenth of the demonstration, newest first with weight `fresh`."""

    def __init__(self, fresh: float = 0.5):
        self.fresh = fresh
        self.rates: dict[tuple[int, int], float] = {}

    def observe(self, start: Array, depth: Array, rate: Array) -> None:
        """Mix the new rates [n] in."""
        for number, share, found in zip(start.tolist(), depth.tolist(), rate.tolist(), strict=True):
            key = (number, _tenth_asked(share))
            self.rates[key] = (
                found if key not in self.rates else (1 - self.fresh) * self.rates[key] + self.fresh * found
            )

    def state(self) -> dict[str, Any]:
        """Return all rates."""
        return {"rates": [[*key, rate] for key, rate in self.rates.items()]}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from all rates."""
        self.rates = {(int(number), int(tenth)): rate for number, tenth, rate in state["rates"]}


def _tenth_asked(share: float) -> int:
    """Return which tenth was asked for where an episode began after `share` of a demonstration.

    It begins in the last recorded state up to there, so less than a tenth before it where ten states are recorded.
    """
    return math.ceil(10 * share - 1e-4)


@mechanism(Slot.HINT, "guide", source="Guide-GRPO, arXiv:2506.13923", needs=(Need.GROUPS, Need.DEMONSTRATIONS))
class Guide:
    """Help only where all of an unhelped group failed: that start's next group begins `share` into the demonstration.

    The group after a helped one is unhelped again and decides anew. Deviations: the paper plays the helped group in the
    same iteration, here it is the start's next visit; its hint is text in the prompt, for which the ratio corrects, and
    a state that the episode begins in needs no correction.
    """

    def __init__(self, *, share: float = 0.5):
        self.share = share
        self.failed: set[int] = set()

    def depth(self, start: Array, predicted: Array, context: Context, draws: np.random.Generator) -> Array:
        """Return `share`, [n], for starts whose newest group was unhelped and failed altogether, else 0."""
        return np.array([self.share if number in self.failed else 0.0 for number in start.tolist()])

    def observe(self, start: Array, depth: Array, rate: Array) -> None:
        """Remember the starts [n] whose newest group had no help, and no success."""
        for number, helped, found in zip(start.tolist(), (depth > 0).tolist(), rate.tolist(), strict=True):
            (self.failed.discard if helped or found > 0 else self.failed.add)(number)

    def state(self) -> dict[str, Any]:
        """Return the starts to help."""
        return {"failed": sorted(self.failed)}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from the starts to help."""
        self.failed = set(state["failed"])


@mechanism(Slot.HINT, "ad_hint", source="after ADHint, arXiv:2512.13095", needs=(Need.GROUPS, Need.DEMONSTRATIONS))
class AdaptiveHint(_Rates):
    """Skip the more of the demonstration, the harder the start: u most (1 - p) (1 - done / fades).

    p: the start's success rate, a moving average; u: uniform in [0, 1]; done: share of the run; fades: share of it
    after which no more help is given. As in the paper the share grows with difficulty under the present policy. Its
    further pieces have no counterpart: nothing of the demonstration is scored, so there are no gradients of hints to
    modulate or mask, and a group begins in one state, so no helped and unhelped episodes of one start are compared.
    Difficulty is the paper's success of unhelped rollouts; here a helped group counts as rate x (1 - depth).
    """

    def __init__(self, *, most: float = 0.8, fades: float = 0.8):
        super().__init__()
        self.most, self.fades = most, fades

    def depth(self, start: Array, predicted: Array, context: Context, draws: np.random.Generator) -> Array:
        """Return the shares [n]."""
        left = max(0.0, 1 - context.share / self.fades)
        rate = np.array([self.rates.get((number, 0), 0.0) for number in start.tolist()])
        return draws.uniform(size=len(start)) * self.most * (1 - rate) * left

    def observe(self, start: Array, depth: Array, rate: Array) -> None:
        """Judge starts [n] by unhelped groups, and by helped ones in proportion to what they had to do themselves."""
        super().observe(start, np.zeros_like(depth), rate * (1 - depth))


@mechanism(Slot.HINT, "pivot", source="PivotRL, arXiv:2603.21383", needs=(Need.GROUPS, Need.DEMONSTRATIONS))
class Pivot(_Rates):
    """Begin at pivots, demonstrated states of mixed outcome that are not easy: 0 < rate < easy.

    Candidates are the tenths of a demonstration. Those not tried yet come first, which finds their rates; then one of
    the pivots is drawn, and where there is none any candidate, since the policy changes. Deviations: the paper finds
    pivots once, with the policy as it came, here the newest group counts; it plays one step there, which is paid where
    it is as good as the demonstrated one, here the episode goes on to its end and its outcome pays.
    """

    def __init__(self, *, most: float = 0.9, easy: float = 0.9):
        super().__init__(fresh=1.0)
        self.most, self.easy = most, easy
        self.tried: set[tuple[int, int]] = set()

    def depth(self, start: Array, predicted: Array, context: Context, draws: np.random.Generator) -> Array:
        """Return the shares [n]."""
        return np.array([self._choose(number, draws) / 10 for number in start.tolist()])

    def _choose(self, number: int, draws: np.random.Generator) -> int:
        """Return which tenth of the demonstration from start `number` to skip."""
        candidates = range(int(10 * self.most + 1e-6) + 1)
        rates = {tenth: self.rates.get((number, tenth), 0.0) for tenth in candidates}
        untried = [tenth for tenth in candidates if (number, tenth) not in self.tried]
        pivots = [tenth for tenth, rate in rates.items() if 0 < rate < min(1.0, self.easy)]
        tenth = int(draws.choice(untried or pivots or list(candidates)))
        self.tried.add((number, tenth))
        return tenth

    def state(self) -> dict[str, Any]:
        """Return all rates, and what was tried."""
        return {**super().state(), "tried": sorted(self.tried)}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from all rates, and what was tried."""
        super().restore(state)
        self.tried = {(int(number), int(tenth)) for number, tenth in state["tried"]}
