"""Experimental samplers of initial states, an episode allocator, and hints, which start episodes inside a
demonstration.

With a hint, the group of an initial state starts after a fraction of its demonstration (`Hints.depth`; 0: at the
initial state itself), in a state that the expert visited. No expert action is scored, so no off-policy correction is
needed. Success becomes reachable, and the fraction decreases as it does (reverse curriculum). starts=N makes initial
states recur, so that statistics about them can accumulate.
"""

import math
from typing import Any

import numpy as np

from robopolicy.core.arrays import Array
from robopolicy.rl.context import Context
from robopolicy.rl.initial_states import Beliefs, Uniform, information_gain
from robopolicy.rl.registry import Need, Slot, mechanism


@mechanism(Slot.SAMPLER, "vade", source="VADE, arXiv:2511.18902")
class VadeSampler(Beliefs):
    """Thompson-sample the success rate p of every initial state and take those with the largest gain; beliefs decay on
    two scales.

    visited: fraction of an initial state's counts kept at its next visit, when its rate has been remeasured; decay:
    fraction of all counts kept per round, because the policy changes everywhere. The paper's abstract names Beta
    beliefs, Thompson draws that maximise information gain, and decay on two scales; its formulas were not available.
    Gain is p (1 - p)^2, the information gain of arXiv:2509.25849: largest at 1/3, since rare successes allow more
    improvement than rare failures.
    """

    def __init__(self, *, visited: float = 0.5, decay: float = 0.98):
        super().__init__(prior=1.0, decay=visited)
        self.everywhere = decay

    def propose(self, count: int, pool: int, generator: np.random.Generator) -> Array:
        """Return the `count` initial states [n] with the largest gain at a sampled rate."""
        rates = self.sampled_rates(pool, generator)
        return np.argsort(-information_gain(rates), kind="stable")[:count]

    def observe(self, index: Array, successes: Array, episodes: Array, advantage: Array) -> None:
        """Decay all beliefs, those of the played initial states [n] faster, and add their results, each [n]."""
        decay = self.everywhere
        self.counts = {
            number: (decay * a + (1 - decay) * self.prior, decay * b + (1 - decay) * self.prior)
            for number, (a, b) in self.counts.items()
        }
        super().observe(index, successes, episodes, advantage)


@mechanism(Slot.SAMPLER, "sec", source="SEC, self-evolving curriculum, arXiv:2505.14970")
class SecSampler(Beliefs):
    """Bandit over categories (instructions: state i belongs to category i mod `categories`) with reward mean |A|.

    Q <- (1 - rate) Q + rate mean |A|; categories are drawn with softmax(Q / temperature), initial states within them
    uniformly.
    """

    def __init__(self, *, categories: int = 4, rate: float = 0.3, temperature: float = 0.3):
        super().__init__(prior=1.0, decay=1.0)
        self.categories = categories
        self.rate = rate
        self.temperature = temperature
        self.values = np.zeros(categories)

    def propose(self, count: int, pool: int, generator: np.random.Generator) -> Array:
        """Return initial states [n], with categories drawn by value."""
        scaled = (self.values - self.values.max()) / self.temperature
        share = np.exp(scaled) / np.exp(scaled).sum()
        order = generator.permutation(pool)
        weight = share[order % self.categories]
        # Efraimidis and Spirakis: the largest log(u) / weight are a weighted draw without replacement.
        keys = np.log(np.maximum(generator.random(pool), 1e-300)) / np.maximum(weight, 1e-12)
        return order[np.argsort(-keys, kind="stable")[:count]]

    def observe(self, index: Array, successes: Array, episodes: Array, advantage: Array) -> None:
        """Move the value of every played category towards its mean |A|; arguments [n]."""
        super().observe(index, successes, episodes, advantage)
        for category in np.unique(index % self.categories):
            reward = advantage[index % self.categories == category].mean()
            self.values[category] += self.rate * (reward - self.values[category])

    def state(self) -> dict[str, Any]:
        """Return counts and values."""
        return {**super().state(), "values": self.values.tolist()}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore counts and values."""
        super().restore(state)
        self.values = np.array(state["values"])


@mechanism(Slot.SAMPLER, "prompt_replay", source="Prompt Replay, arXiv:2603.21177")
class ReplaySampler(Beliefs):
    """Mix new initial states with those whose last success rate was nearest to 0.5, with a cooldown and a maximum
    number of uses.

    share: fraction of a batch that is replayed; near: maximum distance from 0.5; cooldown: number of proposals before
    an initial state may recur; limit: maximum number of uses.
    """

    def __init__(self, *, share: float = 0.5, near: float = 0.3, cooldown: int = 3, limit: int = 5):
        super().__init__(prior=1.0, decay=0.0)
        self.share = share
        self.near = near
        self.cooldown = cooldown
        self.limit = limit
        self.round = 0
        self.last = {}
        self.used = {}

    def propose(self, count: int, pool: int, generator: np.random.Generator) -> Array:
        """Return initial states [n], replayed ones first, then the least used ones."""
        self.round += 1
        # Ties are broken by chance: `sorted` is stable, and the order is a random one.
        order = generator.permutation(pool)
        distance = dict(zip(order.tolist(), np.abs(self.predict(order) - 0.5).tolist(), strict=True))
        rested = [
            number
            for number in order.tolist()
            if number in self.counts
            and distance[number] <= self.near
            and self.round - self.last[number] > self.cooldown
            and self.used[number] < self.limit
        ]
        ready = sorted(rested, key=distance.__getitem__)[: round(self.share * count)]
        unused = sorted((number for number in order.tolist() if number not in ready), key=lambda n: self.used.get(n, 0))
        indices = (ready + unused)[:count]
        for number in indices:
            self.last[number], self.used[number] = self.round, self.used.get(number, 0) + 1
        return np.array(indices)

    def state(self) -> dict[str, Any]:
        """Return the complete state."""
        usage = {str(key): [self.used[key], self.last[key]] for key in self.used}
        return {**super().state(), "round": self.round, "used": usage}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state."""
        super().restore(state)
        self.round = state["round"]
        self.used = {int(key): value[0] for key, value in state["used"].items()}
        self.last = {int(key): value[1] for key, value in state["used"].items()}


@mechanism(Slot.ALLOCATOR, "dars", source="DARS, arXiv:2508.13755")
class Dars(Uniform):
    """Play once, then give initial states with a success rate a < 0.5 more episodes; rarer success gets more.

    Equal schedule, S = 2 a (1 - a): dN = (N / 2 - N S) / S, rounded up and capped at `most` episodes in total;
    hardness-weighted (weighted=true): dN = (2 (1 - a) N / 2 - N S) / S. Without any success a is 0.5 / N.
    """

    def __init__(self, *, weighted: bool = False, most: int = 32):
        self.weighted, self.most = weighted, most

    def extend(self, rate: Array, sizes: Array) -> list[int]:
        """Return the additional episodes [n], up to `most` in total."""
        rate = np.where(rate <= 1e-6, 0.5 / sizes, rate)
        spread = np.maximum(2 * rate * (1 - rate), 1e-6)
        target = (2 * (1 - rate) if self.weighted else 1.0) * sizes / 2
        extra_episodes = np.where(rate < 0.5, (target - sizes * spread) / spread, 0.0)
        return np.clip(np.ceil(extra_episodes - 1e-9), 0, np.maximum(self.most - sizes, 0)).astype(int).tolist()


class _Rates:
    """Success rates per initial state and tenth of the demonstration; the newest result has weight `fresh`."""

    def __init__(self, fresh: float = 0.5):
        self.fresh = fresh
        self.rates: dict[tuple[int, int], float] = {}

    def observe(self, start: Array, depth: Array, rate: Array) -> None:
        """Update with the new rates [n]."""
        for number, share, new_rate in zip(start.tolist(), depth.tolist(), rate.tolist(), strict=True):
            key = (number, _tenth_asked(share))
            self.rates[key] = (
                new_rate if key not in self.rates else (1 - self.fresh) * self.rates[key] + self.fresh * new_rate
            )

    def state(self) -> dict[str, Any]:
        """Return all rates."""
        return {"rates": [[*key, rate] for key, rate in self.rates.items()]}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore all rates."""
        self.rates = {(int(number), int(tenth)): rate for number, tenth, rate in state["rates"]}


def _tenth_asked(share: float) -> int:
    """Return the tenth that was requested if an episode started after the fraction `share` of a demonstration.

    It starts at the last recorded state up to there, i.e. less than a tenth earlier if at least ten states are
    recorded.
    """
    return math.ceil(10 * share - 1e-4)


@mechanism(Slot.HINT, "guide", source="Guide-GRPO, arXiv:2506.13923", needs=(Need.GROUPS, Need.DEMONSTRATIONS))
class Guide:
    """Hints for initial states where a group without hint failed completely: their next group starts `share` into the
    demonstration.

    The group after a hinted one has no hint, and its result decides about the next hint. Deviations: the paper runs the
    hinted group in the same iteration, here it is the next visit of the initial state; its hint is text in the prompt,
    which the ratio corrects for, while a different initial state needs no correction.
    """

    def __init__(self, *, share: float = 0.5):
        self.share = share
        self.failed: set[int] = set()

    def depth(self, start: Array, predicted: Array, context: Context, draws: np.random.Generator) -> Array:
        """Return `share`, [n], for initial states whose newest group was unhinted and failed completely, else 0."""
        return np.array([self.share if number in self.failed else 0.0 for number in start.tolist()])

    def observe(self, start: Array, depth: Array, rate: Array) -> None:
        """Record the initial states [n] whose newest group had neither a hint (demonstration prefix) nor a success."""
        for number, helped, success_rate in zip(start.tolist(), (depth > 0).tolist(), rate.tolist(), strict=True):
            (self.failed.discard if helped or success_rate > 0 else self.failed.add)(number)

    def state(self) -> dict[str, Any]:
        """Return the initial states that get a hint."""
        return {"failed": sorted(self.failed)}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the initial states that get a hint."""
        self.failed = set(state["failed"])


@mechanism(Slot.HINT, "ad_hint", source="after ADHint, arXiv:2512.13095", needs=(Need.GROUPS, Need.DEMONSTRATIONS))
class AdaptiveHint(_Rates):
    """Skip more of the demonstration for harder initial states: u most (1 - p) (1 - done / fades).

    p: moving average of the success rate; u: uniform in [0, 1]; done: fraction of the run; fades: fraction of the run
    after which hints stop. As in the paper, the skipped fraction grows with difficulty under the current policy. Its
    other parts have no counterpart: no step of the demonstration is scored, so there are no hint gradients to modulate
    or mask. A group starts in one state, so hinted and unhinted episodes of one initial state are not compared.
    Difficulty is the paper's success of unhinted rollouts; here a hinted group counts as rate x (1 - depth).
    """

    def __init__(self, *, most: float = 0.8, fades: float = 0.8):
        super().__init__()
        self.most, self.fades = most, fades

    def depth(self, start: Array, predicted: Array, context: Context, draws: np.random.Generator) -> Array:
        """Return the skipped fractions [n]."""
        strength = max(0.0, 1 - context.share / self.fades)
        rate = np.array([self.rates.get((number, 0), 0.0) for number in start.tolist()])
        # A start never seen counts as failing: it gets the most help.
        return draws.uniform(size=len(start)) * self.most * (1 - rate) * strength

    def observe(self, start: Array, depth: Array, rate: Array) -> None:
        """Update the rates of initial states [n]; the success of a group with a hint is scaled by 1 - depth."""
        super().observe(start, np.zeros_like(depth), rate * (1 - depth))


@mechanism(Slot.HINT, "pivot", source="PivotRL, arXiv:2603.21383", needs=(Need.GROUPS, Need.DEMONSTRATIONS))
class Pivot(_Rates):
    """Start at pivots, demonstrated states with mixed outcomes that are not easy: 0 < rate < easy.

    Candidates are the tenths of a demonstration. Untried ones come first, to measure their rates; then a pivot is
    drawn, or any candidate if there is none, since the policy changes. Deviations: the paper finds pivots once, with
    the initial policy, here the newest group counts; it plays one step there, rewarded if it is as good as the
    demonstrated one, here the episode continues to its end and its outcome is the reward.
    """

    def __init__(self, *, most: float = 0.9, easy: float = 0.9):
        super().__init__(fresh=1.0)
        self.most, self.easy = most, easy
        self.tried: set[tuple[int, int]] = set()

    def depth(self, start: Array, predicted: Array, context: Context, draws: np.random.Generator) -> Array:
        """Return the skipped fractions [n]."""
        return np.array([self._choose(number, draws) / 10 for number in start.tolist()])

    def _choose(self, number: int, draws: np.random.Generator) -> int:
        """Choose the tenth of the demonstration of initial state `number` to skip."""
        candidates = range(int(10 * self.most + 1e-6) + 1)
        rates = {tenth: self.rates.get((number, tenth), 0.0) for tenth in candidates}
        untried = [tenth for tenth in candidates if (number, tenth) not in self.tried]
        pivots = [tenth for tenth, rate in rates.items() if 0 < rate < min(1.0, self.easy)]
        tenth = int(draws.choice(untried or pivots or list(candidates)))
        self.tried.add((number, tenth))
        return tenth

    def state(self) -> dict[str, Any]:
        """Return all rates and the tried candidates."""
        return {**super().state(), "tried": sorted(self.tried)}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore all rates and the tried candidates."""
        super().restore(state)
        self.tried = {(int(number), int(tenth)) for number, tenth in state["tried"]}
