"""How many episodes every start gets: classes with `plan` before playing and `extend` after."""

from typing import Protocol

import numpy as np

from robopolicy.core.arrays import Array
from robopolicy.rl.registry import Slot, mechanism


class Allocator(Protocol):
    """Shares out episodes among starts."""

    def plan(self, predicted: Array, group_size: int) -> list[int]:
        """Return group sizes [n] for starts with these predicted success rates; group_size is the mean to aim at."""
        ...

    def extend(self, rate: Array, sizes: Array) -> list[int]:
        """Return how many more episodes each start gets, given its measured success rate and episodes so far, [n]."""
        ...


@mechanism(Slot.ALLOCATOR, "uniform", source="GRPO, arXiv:2402.03300")
class Uniform:
    """Give every start the same number of episodes."""

    def plan(self, predicted: Array, group_size: int) -> list[int]:
        """Return equal sizes [n]."""
        return [group_size] * len(predicted)

    def extend(self, rate: Array, sizes: Array) -> list[int]:
        """Return zeros [n]."""
        return [0] * len(sizes)


def information_gain(rate: Array) -> Array:
    """Return p (1 - p)^2 [n]: what a gradient step on starts of these success rates [n] gains (arXiv:2509.25849)."""
    return rate * (1 - rate) ** 2


def signal_value(size: Array, rate: Array) -> Array:
    """Return the expected value of groups [n]: (1 - p^N - (1 - p)^N) p (1 - p)^2, Knapsack RL's.

    The chance that outcomes are mixed, times how much a gradient step gains there.
    """
    return (1 - rate**size - (1 - rate) ** size) * information_gain(rate)


def knapsack(rate: Array, budget: int, low: int, high: int) -> Array:
    """Return sizes [n] in [low, high], of sum `budget`, that maximise the summed value: exact, dynamic programming.

    Raises ValueError where no such sizes exist.
    """
    count = len(rate)
    if not low * count <= budget <= high * count:
        raise ValueError(f"{budget} episodes cannot be shared among {count} starts with {low} to {high} each.")
    sizes = np.arange(low, high + 1)
    value = signal_value(sizes[None], rate[:, None])
    spare = budget - low * count
    # best[e]: largest value of the starts so far with e episodes beyond `low` each; -inf where e is impossible.
    best = np.full(spare + 1, -np.inf)
    best[0] = 0.0
    choice = np.zeros((count, spare + 1), dtype=np.int64)
    for start in range(count):
        options = np.full((len(sizes), spare + 1), -np.inf)
        for extra in range(min(len(sizes), spare + 1)):
            # This start takes `extra`, those before it the rest.
            options[extra, extra:] = best[: spare + 1 - extra] + value[start, extra]
        choice[start] = options.argmax(0)
        best = options.max(0)
    result, left = np.zeros(count, dtype=np.int64), spare
    # Back through the choices from where all of `spare` is spent.
    for start in reversed(range(count)):
        result[start] = low + choice[start, left]
        left -= choice[start, left]
    return result


@mechanism(Slot.ALLOCATOR, "knapsack", source="Knapsack RL, arXiv:2509.25849")
class Knapsack(Uniform):
    """Solve a knapsack: starts of uncertain outcome get large groups, the same number of episodes in all.

    Predicted rates come from the sampler, so starts have to come back: starts=N. least, most: group sizes. Rates here
    are means of Beta beliefs, never 0 or 1, and a start never seen counts as one half. The authors' code gives it the
    usual size, those that always succeed the least, and to those that never succeed what the others do not need.
    """

    def __init__(self, *, least: int = 2, most: int = 32):
        self.least, self.most = least, most

    def plan(self, predicted: Array, group_size: int) -> list[int]:
        """Return the optimal sizes [n]; predicted: success rates [n]."""
        low, high = min(self.least, group_size), max(self.most, group_size)
        return knapsack(predicted, group_size * len(predicted), low, high).tolist()
