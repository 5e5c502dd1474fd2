"""Experimental allocators: episodes one by one to the initial states that gain most from them, or of one chunk each."""

from typing import Any, cast

import numpy as np

from robopolicy.core.arrays import Array
from robopolicy.rl.initial_states import Uniform
from robopolicy.rl.registry import Need, Slot, mechanism


def chance_of_mixed(rate: Array, size: Array) -> Array:
    """Return the probability 1 - v^m - (1 - v)^m that m episodes with success rate v have both outcomes, [...]."""
    return np.where(size > 0, 1 - rate**size - (1 - rate) ** size, 0.0)


def chance_of_other(outcome: Array, value: Array, count: Array | int) -> Array:
    """Return the probability that one of `count` continuations of a played episode ends differently, [...].

    1 - [r V + (1 - r) (1 - V)]^k for an outcome r of 0 or 1, and a success rate V from the state of its prefix.
    """
    return 1 - (outcome * value + (1 - outcome) * (1 - value)) ** count


@mechanism(Slot.ALLOCATOR, "mixed", source="TRACE, arXiv:2606.11119", needs=(Need.STARTS,))
class Mixed(Uniform):
    """Give episodes one by one to the initial state whose chance of mixed outcomes grows most by one more.

    Every initial state gets one first, since the second is the first that can differ; `most`: maximum per initial
    state. Predicted success rates come from the sampler, so initial states must recur (num_initial_states=N), or with
    sampler=value come from a pool. Among equal gains the first is chosen. The paper also continues played episodes from
    their middle: allocator=prefixes.
    """

    def __init__(self, *, most: int = 32):
        self.most = most

    def plan(self, predicted: Array, group_size: int) -> list[int]:
        """Return group sizes [n] with mean group_size; predicted: success rates [n]."""
        sizes = np.ones(len(predicted), dtype=int)
        most = max(self.most, group_size)
        for _ in range(group_size * len(predicted) - len(predicted)):
            gain = chance_of_mixed(predicted, sizes + 1) - chance_of_mixed(predicted, sizes)
            sizes[np.where(sizes < most, gain, -np.inf).argmax()] += 1
        return sizes.tolist()


@mechanism(Slot.ALLOCATOR, "redraw", source="DAPO, arXiv:2503.14476", needs=(Need.GROUPS,))
class Redraw(Uniform):
    """Play other groups for those in which all episodes succeed or all fail, until enough groups have both outcomes.

    rounds: times that new initial states are drawn at most, for as many groups as lack (dynamic sampling; 10 batches in
    the authors' script). selection=[mixed_outcomes] leaves the others out of learning; their episodes count in the
    reported success, for samplers, and as steps in the world. From a pool, an initial state may come again.
    """

    def __init__(self, *, rounds: int = 9):
        self.redraws = rounds


@mechanism(
    Slot.ALLOCATOR,
    "one_chunk",
    source="PivotRL, arXiv:2603.21383",
    needs=(Need.GROUPS, Need.STARTS, Need.DEMONSTRATIONS),
    gives=(Need.DEMONSTRATED,),
)
class OneChunk(Uniform):
    """Truncate every episode after its first chunk, to be paid at once: hint=pivot, rewards=[as_demonstrated].

    Adds extras["demonstrated"]. What an episode is paid takes the place of its success for samplers and hints; the
    success that is reported is that of the chunk.
    """

    demonstrated = True

    def limits(self, index: Array) -> list[int]:
        """Return 1 for every initial state [n]."""
        return [1] * len(index)


def half_width(rate: Array, sizes: Array, later: Array, alpha: float) -> Array:
    """Return the half width of the Student interval of a mean, t_(1 - alpha / 2, m - 1) s / sqrt(m), [n].

    s: sample deviation of outcomes 0 and 1 with this rate over `sizes` (at least 2) episodes; m: number of episodes of
    the interval, `later`, all [n].
    """
    # Half a second to import: who allocates this way, pays.
    from scipy import special  # pyright: ignore[reportMissingTypeStubs]

    spread = np.sqrt(rate * (1 - rate) * sizes / (sizes - 1))
    return cast(Any, special).stdtrit(later - 1, 1 - alpha / 2) * spread / np.sqrt(later)


@mechanism(Slot.ALLOCATOR, "interval", source="XRPO, arXiv:2510.06672")
class Interval(Uniform):
    """Play a part of every group, then give the other episodes to the initial states whose interval shrinks most.

        gain = h(n) - h(n + 1) + bonus sqrt(log(1 + T) / n),   h(n) = t_(1 - alpha / 2, n - 1) s / sqrt(n)

    n: episodes of an initial state so far, s: their sample deviation, T: episodes so far in total. first: episodes of
    every initial state in the first round, at least 2; the other rounds are of equal size, and inside a round s stays.
    Together they have as many episodes as equal groups. Source: two public re-implementations; the paper, which also
    shows an example to the policy where all failed (here hint=guide), could not be read.
    """

    def __init__(self, *, first: int = 4, rounds: int = 2, alpha: float = 0.05, bonus: float = 0.1):
        self.first, self.rounds = max(2, first), rounds
        self.alpha, self.bonus = alpha, bonus
        self.spare, self.rounds_left = 0, 0

    def plan(self, predicted: Array, group_size: int) -> list[int]:
        """Return the sizes of the first round, [n]."""
        size = min(self.first, group_size)
        self.spare, self.rounds_left = (group_size - size) * len(predicted), self.rounds
        return [size] * len(predicted)

    def gain(self, rate: Array, measured: Array, sizes: Array) -> Array:
        """Return the gain of one more episode, [n]; measured: number of episodes that `rate` is of."""
        now, then = (half_width(rate, measured, count, self.alpha) for count in (sizes, sizes + 1))
        return now - then + self.bonus * np.sqrt(np.log1p(sizes.sum()) / sizes)

    def extend(self, rate: Array, sizes: Array) -> list[int]:
        """Return the additional episodes of a round, [n]; zeros after the last."""
        added = np.zeros(len(sizes), dtype=int)
        if not self.spare or not self.rounds_left or sizes.min() < 2:
            return added.tolist()
        count = -(-self.spare // self.rounds_left)
        self.spare, self.rounds_left = self.spare - count, self.rounds_left - 1
        for _ in range(count):
            added[self.gain(rate, sizes, sizes + added).argmax()] += 1
        return added.tolist()
