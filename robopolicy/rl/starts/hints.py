"""Beginning where a demonstration has already gone: classes with depth(predicted, context) -> shares [n].

A start's group begins after that share of its demonstration (0: at the start itself), in a state the expert was in. No
action of the expert's is scored, so nothing has to be corrected for; success gets near enough to be found, and the
share shrinks as it is (reverse curricula). starts=N makes starts come back, so that something is known of them.
"""

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
            key = (number, int(10 * share))
            self.rates[key] = (
                found if key not in self.rates else (1 - self.fresh) * self.rates[key] + self.fresh * found
            )

    def state(self) -> dict[str, Any]:
        """Return all rates."""
        return {"rates": [[*key, rate] for key, rate in self.rates.items()]}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from all rates."""
        self.rates = {(int(number), int(tenth)): rate for number, tenth, rate in state["rates"]}


@mechanism(Slot.HINT, "guide", source="Guide-GRPO, arXiv:2506.13923", needs=(Need.GROUPS, Need.DEMONSTRATIONS))
class Guide(_Rates):
    """Help only where the whole group failed at the last visit: begin `share` into the demonstration there.

    In the paper the hint is text in the prompt and the ratio corrects for it; a state needs no correction.
    """

    def __init__(self, *, share: float = 0.5):
        super().__init__(fresh=1.0)
        self.share = share

    def depth(self, start: Array, predicted: Array, context: Context, draws: np.random.Generator) -> Array:
        """Return `share`, [n], for starts whose last unhelped group failed, 0 if they were helped just before."""
        failed = np.array([self.rates.get((number, 0)) == 0.0 for number in start.tolist()])
        helped = np.array([self.rates.get((number, int(10 * self.share)), 0.0) > 0.5 for number in start.tolist()])
        return np.where(failed & ~helped, self.share, 0.0)


@mechanism(Slot.HINT, "ad_hint", source="ADHint (adaptive hint ratio)", needs=(Need.GROUPS, Need.DEMONSTRATIONS))
class AdaptiveHint(_Rates):
    """Skip the more of the demonstration, the harder the start: most * (1 - p) of it, p its success rate from there.

    fades: share of the run after which no more help is given. (The paper's schedule and masks are uncertain; nothing of
    the demonstration is scored here, so there is nothing to mask.)
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


@mechanism(Slot.HINT, "pivot", source="PivotRL", needs=(Need.GROUPS, Need.DEMONSTRATIONS))
class Pivot(_Rates):
    """Begin at demonstrated states of uncertain outcome: the tenth of the demonstration whose rate is nearest to 1/2.

    Tenths not yet tried come first. Deviation: the episode is played to its end and paid by its outcome, where the
    paper plays one step and pays for being equivalent to the demonstration's.
    """

    def __init__(self, *, most: float = 0.9, target: float = 0.5):
        super().__init__()
        self.most, self.target = most, target

    def depth(self, start: Array, predicted: Array, context: Context, draws: np.random.Generator) -> Array:
        """Return the shares [n]."""
        tenths = np.arange(int(10 * self.most) + 1)
        shares: list[float] = []
        for number in start.tolist():
            known = np.array([self.rates.get((number, int(tenth)), -1.0) for tenth in tenths])
            untried = np.flatnonzero(known < 0)
            best = draws.choice(untried) if len(untried) else int(np.abs(known - self.target).argmin())
            shares.append(best / 10)
        return np.array(shares)
