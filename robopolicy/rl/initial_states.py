"""Initial states of episodes: their choice, their numbers of episodes, and starting positions inside demonstrations.

Samplers choose initial states from a pool (seeds, and instructions if a world has several), allocators distribute
episodes over the chosen ones, and hints set the position in a demonstration at which an episode starts.
"""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from robopolicy.core.arrays import Array
from robopolicy.core.rollouts import Rollouts
from robopolicy.rl.context import Context
from robopolicy.rl.registry import Need, Slot, mechanism


class TaskSampler(Protocol):
    """Chooses initial states from a pool by their past results. Its state is JSON-able."""

    def propose(self, count: int, pool: int, generator: np.random.Generator) -> Array:
        """Return at most `count` different indices [n] into a pool of initial states; fewer if no more are wanted."""
        ...

    def observe(self, index: Array, successes: Array, episodes: Array, advantage: Array) -> None:
        """Update with the results per played initial state: its index, successes out of episodes, and mean absolute
        advantage, each [n].
        """
        ...

    def predict(self, index: Array) -> Array:
        """Return the expected success rate of initial states [n]."""
        ...

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Restore from `state`."""
        ...


@runtime_checkable
class SeesStarts(TaskSampler, Protocol):
    """A sampler that reads first observations. look: (index [n]) -> [n, D], resets the world; set by the collector."""

    look: Callable[[Array], Array] | None


class Hints(Protocol):
    """Chooses the position in its demonstration at which an initial state's group starts. Its state is JSON-able."""

    def depth(self, start: Array, predicted: Array, context: Context, draws: np.random.Generator) -> Array:
        """Return the fraction of the demonstration to skip, [n] in [0, 1), for initial states with predicted success
        rates.
        """
        ...

    def observe(self, start: Array, depth: Array, rate: Array) -> None:
        """Update with the success rates [n] of groups that started at `depth`."""
        ...

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`, JSON-able."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Restore from `state`."""
        ...


class Beliefs:
    """A Beta distribution over the success rate of every initial state seen so far; new ones have the prior. Base class
    of the samplers.
    """

    def __init__(self, prior: float, decay: float):
        self.prior, self.decay = prior, decay
        self.counts: dict[int, tuple[float, float]] = {}

    def beta(self, index: Array) -> tuple[Array, Array]:
        """Return the parameters (a, b) of initial states [n]."""
        pairs = [self.counts.get(number, (self.prior, self.prior)) for number in index.tolist()]
        return np.array([a for a, _ in pairs]), np.array([b for _, b in pairs])

    def sampled_rates(self, pool: int, generator: np.random.Generator) -> Array:
        """Return a success rate of every initial state of the pool [pool], drawn from its beta distribution."""
        # A draw and not the mean: starts that are hardly known are tried now and then.
        return generator.beta(*self.beta(np.arange(pool)))

    def observe(self, index: Array, successes: Array, episodes: Array, advantage: Array) -> None:
        """Add successes and failures, each [n]; earlier counts decay towards the prior by `decay`."""
        for number, successes_now, episodes_played in zip(
            index.tolist(), successes.tolist(), episodes.tolist(), strict=True
        ):
            a, b = self.counts.get(number, (self.prior, self.prior))
            # Faded before the new counts are added: the latest visit counts fully.
            faded = [self.decay * value + (1 - self.decay) * self.prior for value in (a, b)]
            self.counts[number] = (faded[0] + successes_now, faded[1] + episodes_played - successes_now)

    def predict(self, index: Array) -> Array:
        """Return the means a / (a + b), [n]."""
        a, b = self.beta(index)
        return a / (a + b)

    def observed(self, index: Array) -> Array:
        """Return success rates [n] without the prior, 0 and 1 included; NaN for initial states never seen."""
        successes, failures = (np.round(value - self.prior, 9) for value in self.beta(index))
        total = successes + failures
        return np.where(total > 0, successes / np.where(total > 0, total, 1.0), np.nan)

    def state(self) -> dict[str, Any]:
        """Return the counts."""
        return {"counts": {str(key): list(value) for key, value in self.counts.items()}}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore from the counts."""
        self.counts = {int(key): (value[0], value[1]) for key, value in state["counts"].items()}


@mechanism(Slot.SAMPLER, "uniform", source="all initial states alike")
class UniformSampler(Beliefs):
    """Draw initial states uniformly without replacement, and track their success rates."""

    def __init__(self) -> None:
        super().__init__(prior=1.0, decay=1.0)

    def propose(self, count: int, pool: int, generator: np.random.Generator) -> Array:
        """Return indices [n] drawn without replacement."""
        return generator.permutation(pool)[:count]


@mechanism(Slot.SAMPLER, "mopps", source="MoPPS, arXiv:2507.04632")
class MoppsSampler(Beliefs):
    """Thompson-sample every initial state's success rate from its Beta belief and take those nearest to `target`.

    decay: weight of earlier results at the next visit, because the policy changes. The whole pool is compared; the
    authors draw eight times as many candidates as are played.
    """

    def __init__(self, *, target: float = 0.5, decay: float = 0.5):
        super().__init__(prior=1.0, decay=decay)
        self.target = target

    def propose(self, count: int, pool: int, generator: np.random.Generator) -> Array:
        """Return the `count` initial states [n] whose sampled rate is nearest to the target."""
        rates = self.sampled_rates(pool, generator)
        return np.argsort(np.abs(rates - self.target), kind="stable")[:count]


class Allocator(Protocol):
    """Allocates episodes to initial states. rounds: how often `extend` is called for a batch, 1 without it."""

    def plan(self, predicted: Array, group_size: int) -> list[int]:
        """Return group sizes [n] for initial states with these predicted success rates; group_size is the target
        mean.
        """
        ...

    def extend(self, rate: Array, sizes: Array) -> list[int]:
        """Return the number of additional episodes per initial state, given its measured success rate and episodes so
        far, [n].
        """
        ...


@runtime_checkable
class LimitsLengths(Protocol):
    """An allocator that also limits the lengths of episodes."""

    def limits(self, index: Array) -> list[int]:
        """Return the number of chunks after which episodes from initial states [n] are truncated, 0 for none."""
        ...


@runtime_checkable
class SeesRollouts(Protocol):
    """An allocator that learns from an iteration's rollouts, with their extras."""

    def observe_rollouts(self, rollouts: Rollouts) -> None:
        """Update with the iteration's own episodes."""
        ...


@runtime_checkable
class SeesLengths(Protocol):
    """An allocator that learns from the lengths of episodes."""

    def observe_lengths(self, index: Array, chunks: Array, success: Array) -> None:
        """Update with the episodes' initial states, lengths in chunks and outcomes, each [B]."""
        ...


@runtime_checkable
class GivesHelp(Protocol):
    """An allocator that plays more episodes with help once a group's outcomes are known.

    together: compared with the group's other episodes, else with each other; forget: learned from as if there had been
    no help; ahead: fraction of the demonstration beyond what each failure of the group reached, to start after it
    instead, 0 for not. An allocator may define from_plain: only groups whose instruction is in its plain words get
    other ones.
    """

    together: bool
    forget: bool
    ahead: float

    def helped(self, rate: Array, sizes: Array, context: Context) -> list[int]:
        """Return the number of helped episodes for groups with these success rates and sizes, [n]."""
        ...

    def depths(self, rate: Array) -> list[float]:
        """Return the fraction of the demonstration to start after for groups with these success rates, [n]; 0: another
        wording of the instruction instead.
        """
        ...


@runtime_checkable
class ContinuesEpisodes(Protocol):
    """An allocator that plays more episodes, which continue from states of played ones.

    by_teacher: the teacher plays them, from there to the end.
    """

    by_teacher: bool

    def continuations(
        self, rollouts: Rollouts, values: Tensor | None, turn: int, context: Context
    ) -> list[tuple[int, int]]:
        """Return rows of the episodes so far, and the chunks before which other episodes continue from them.

        values: V of every chunk's state, [B, T], None before there are any; turn: number of earlier calls for these
        groups. Nothing ends the collection.
        """
        ...


@runtime_checkable
class RedrawsGroups(Protocol):
    """An allocator that plays groups from other initial states for those whose episodes all end alike, `redraws` times
    at most.
    """

    redraws: int


@runtime_checkable
class AsksTeacher(Protocol):
    """An allocator that lets the teacher play `samples` more episodes of each group, from its initial state.

    depth: where the teacher never succeeds, one more begins after this fraction of a demonstration, 0 for none.
    """

    samples: int
    depth: float


@runtime_checkable
class ComparesDemonstrated(Protocol):
    """An allocator whose episodes are compared with what a demonstration observed after the same time.

    What they are paid takes the place of their success for samplers and hints.
    """

    demonstrated: bool


@runtime_checkable
class SetsBudgets(Protocol):
    """An allocator that divides groups among budgets, as fractions of the world's horizon."""

    budgets: tuple[float, ...]


@mechanism(Slot.ALLOCATOR, "uniform", source="GRPO, arXiv:2402.03300")
class Uniform:
    """Give every initial state the same number of episodes."""

    reads_observed = False
    """Whether `plan` gets rates as `Beliefs.observed` instead of predicted ones, if the sampler has beliefs."""

    def plan(self, predicted: Array, group_size: int) -> list[int]:
        """Return equal sizes [n]."""
        return [group_size] * len(predicted)

    def extend(self, rate: Array, sizes: Array) -> list[int]:
        """Return zeros [n]."""
        return [0] * len(sizes)

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`, JSON-able."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore from `state`."""


def information_gain(rate: Array) -> Array:
    """Return p (1 - p)^2 [n]: the gain of a gradient step on initial states with success rates p [n]
    (arXiv:2509.25849).
    """
    return rate * (1 - rate) ** 2


def signal_value(size: Array, rate: Array) -> Array:
    """Return the expected value of groups [n] in Knapsack RL: (1 - p^N - (1 - p)^N) p (1 - p)^2.

    The probability of mixed outcomes, times the gain of a gradient step.
    """
    return (1 - rate**size - (1 - rate) ** size) * information_gain(rate)


def knapsack(rate: Array, budget: int, low: int, high: int) -> Array:
    """Find sizes [n] in [low, high], with sum `budget`, that maximise the total value; exact, by dynamic programming.

    Raises ValueError if no such sizes exist.
    """
    count = len(rate)
    if not low * count <= budget <= high * count:
        raise ValueError(
            f"{budget} episodes cannot be divided among {count} initial states with {low} to {high} episodes each."
        )
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
    result, budget_left = np.zeros(count, dtype=np.int64), spare
    # Back through the choices from where all of `spare` is spent.
    for start in reversed(range(count)):
        result[start] = low + choice[start, budget_left]
        budget_left -= choice[start, budget_left]
    return result


@mechanism(Slot.ALLOCATOR, "knapsack", source="Knapsack RL, arXiv:2509.25849", needs=(Need.STARTS,))
class Knapsack(Uniform):
    """Solve a knapsack problem: initial states with uncertain outcome get large groups, with a fixed total of episodes.

    Predicted rates come from the sampler, so initial states must recur (num_initial_states=N). least, most: bounds of
    group sizes. Rates are means of Beta beliefs, never 0 or 1, and a new initial state counts as one half. surplus: as
    in the authors' code, rates are those observed. New initial states get the usual size, those that always succeeded
    or never did the least. The others share, beyond the least, n = log(1 - confidence) / log(max(p, 1 - p)) episodes
    each: among n both outcomes occur with about this probability. The rest of the budget goes to those that never
    succeeded or, if there are none, to those that always did and new ones; what exceeds `most` is not played.
    """

    def __init__(self, *, least: int = 2, most: int = 32, surplus: bool = False, confidence: float = 0.9):
        self.least = least
        self.most = most
        self.confidence = confidence
        self.reads_observed = surplus

    def plan(self, predicted: Array, group_size: int) -> list[int]:
        """Return the optimal sizes [n]; predicted: success rates [n]."""
        low, high = min(self.least, group_size), max(self.most, group_size)
        budget = group_size * len(predicted)
        if not self.reads_observed:
            return knapsack(predicted, budget, low, high).tolist()
        is_mixed, is_hopeless = (predicted > 0) & (predicted < 1), predicted == 0
        takes_rest = is_hopeless if is_hopeless.any() else ~is_mixed
        if not (is_mixed | is_hopeless).any():
            return [group_size] * len(predicted)
        sizes = np.where(np.isnan(predicted), group_size, low)
        rate, spare = predicted[is_mixed], budget - int(sizes.sum())
        if takes_rest.any():
            needed = np.log(1 - self.confidence) / np.log(np.maximum(rate, 1 - rate))
            spare = min(spare, int(np.minimum(needed, high).astype(int).sum()))
        spare = min(spare, (high - low) * len(rate))
        sizes[is_mixed] = knapsack(rate, low * len(rate) + spare, low, high)
        share, rest = divmod(budget - int(sizes.sum()), max(1, int(takes_rest.sum())))
        sizes[takes_rest] += share + (np.arange(int(takes_rest.sum())) < rest)
        return np.minimum(sizes, high).tolist()
