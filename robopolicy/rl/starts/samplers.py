"""Which starts to play next, out of a pool: seeds, and instructions where a world has several."""

from typing import Any, Protocol

import numpy as np

from robopolicy.core.arrays import Array
from robopolicy.rl.registry import Slot, mechanism
from robopolicy.rl.starts.allocation import information_gain


class TaskSampler(Protocol):
    """Chooses among a pool of starts by what happened on them. Its state is JSON-able."""

    def propose(self, count: int, pool: int, generator: np.random.Generator) -> Array:
        """Return `count` different indices [n] into a pool of starts (all of them where the pool is smaller)."""
        ...

    def observe(self, index: Array, successes: Array, episodes: Array, advantage: Array) -> None:
        """Take in, per start played: its index, successes out of episodes, and mean absolute advantage, each [n]."""
        ...

    def predict(self, index: Array) -> Array:
        """Return the expected success rate of starts [n]."""
        ...

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        ...


class _Beliefs:
    """A Beta distribution over the success rate of every start seen; others have the prior. Common to the samplers."""

    def __init__(self, prior: float, decay: float):
        self.prior, self.decay = prior, decay
        self.counts: dict[int, tuple[float, float]] = {}

    def beta(self, index: Array) -> tuple[Array, Array]:
        """Return (a, b) of starts [n]."""
        pairs = [self.counts.get(number, (self.prior, self.prior)) for number in index.tolist()]
        return np.array([a for a, _ in pairs]), np.array([b for _, b in pairs])

    def observe(self, index: Array, successes: Array, episodes: Array, advantage: Array) -> None:
        """Add successes and failures, each [n]; what was counted before fades towards the prior by `decay`."""
        for number, won, played in zip(index.tolist(), successes.tolist(), episodes.tolist(), strict=True):
            a, b = self.counts.get(number, (self.prior, self.prior))
            kept = [self.decay * value + (1 - self.decay) * self.prior for value in (a, b)]
            self.counts[number] = (kept[0] + won, kept[1] + played - won)

    def predict(self, index: Array) -> Array:
        """Return the means a / (a + b), [n]."""
        a, b = self.beta(index)
        return a / (a + b)

    def state(self) -> dict[str, Any]:
        """Return the counts."""
        return {"counts": {str(key): list(value) for key, value in self.counts.items()}}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from the counts."""
        self.counts = {int(key): (value[0], value[1]) for key, value in state["counts"].items()}


@mechanism(Slot.SAMPLER, "uniform", source="every start alike")
class UniformSampler(_Beliefs):
    """Draw starts uniformly without replacement, and remember their success rates."""

    def __init__(self) -> None:
        super().__init__(prior=1.0, decay=1.0)

    def propose(self, count: int, pool: int, generator: np.random.Generator) -> Array:
        """Return indices [n] drawn without replacement."""
        return generator.permutation(pool)[:count]


@mechanism(Slot.SAMPLER, "mopps", source="MoPPS, arXiv:2507.04632")
class MoppsSampler(_Beliefs):
    """Thompson-sample every start's success rate from its Beta belief and take those nearest to `target`.

    decay: how much of what was seen before counts at the next visit, because the policy changes.
    """

    def __init__(self, *, target: float = 0.5, decay: float = 0.5):
        super().__init__(prior=1.0, decay=decay)
        self.target = target

    def propose(self, count: int, pool: int, generator: np.random.Generator) -> Array:
        """Return the `count` starts [n] whose drawn rate is nearest to the target."""
        a, b = self.beta(np.arange(pool))
        drawn = generator.beta(a, b)
        return np.argsort(np.abs(drawn - self.target), kind="stable")[:count]


@mechanism(Slot.SAMPLER, "vade", source="VADE, arXiv:2511.18902")
class VadeSampler(_Beliefs):
    """Thompson-sample every start's success rate p and take those from which most is gained; beliefs fade twice.

    visited, decay: what is kept of a start's counts at its next visit, after which its rate has been measured anew, and
    of everybody's at every round, because the policy moves on also where nobody looks.
    The paper's abstract names Beta beliefs, Thompson draws that maximise information gain, and decay on two scales; its
    formulas were not at hand. Gain is p (1 - p)^2, the information gain of arXiv:2509.25849: largest at 1/3, since
    what succeeds rarely has more to gain than what fails rarely.
    """

    def __init__(self, *, visited: float = 0.5, decay: float = 0.98):
        super().__init__(prior=1.0, decay=visited)
        self.everywhere = decay

    def propose(self, count: int, pool: int, generator: np.random.Generator) -> Array:
        """Return the `count` starts [n] with the largest gain at a drawn rate."""
        a, b = self.beta(np.arange(pool))
        drawn = generator.beta(a, b)
        return np.argsort(-information_gain(drawn), kind="stable")[:count]

    def observe(self, index: Array, successes: Array, episodes: Array, advantage: Array) -> None:
        """Let every belief fade, those of the starts played [n] faster, and add what came of them, each [n]."""
        kept = self.everywhere
        self.counts = {
            number: (kept * a + (1 - kept) * self.prior, kept * b + (1 - kept) * self.prior)
            for number, (a, b) in self.counts.items()
        }
        super().observe(index, successes, episodes, advantage)


@mechanism(Slot.SAMPLER, "sec", source="SEC, self-evolving curriculum, arXiv:2505.14970")
class SecSampler(_Beliefs):
    """A bandit over categories (instructions: start i belongs to category i mod `categories`) paid in mean |A|.

    Q <- (1 - rate) Q + rate mean |A|; categories are drawn with softmax(Q / temperature), starts inside uniformly.
    """

    def __init__(self, *, categories: int = 4, rate: float = 0.3, temperature: float = 0.3):
        super().__init__(prior=1.0, decay=1.0)
        self.categories = categories
        self.rate = rate
        self.temperature = temperature
        self.values = np.zeros(categories)

    def propose(self, count: int, pool: int, generator: np.random.Generator) -> Array:
        """Return starts [n], their categories drawn by value."""
        scaled = (self.values - self.values.max()) / self.temperature
        share = np.exp(scaled) / np.exp(scaled).sum()
        order = generator.permutation(pool)
        weight = share[order % self.categories]
        keys = np.log(np.maximum(generator.random(pool), 1e-300)) / np.maximum(weight, 1e-12)
        return order[np.argsort(-keys, kind="stable")[:count]]

    def observe(self, index: Array, successes: Array, episodes: Array, advantage: Array) -> None:
        """Move the value of every category played towards its mean |A|; arguments [n]."""
        super().observe(index, successes, episodes, advantage)
        for category in np.unique(index % self.categories):
            paid = advantage[index % self.categories == category].mean()
            self.values[category] += self.rate * (paid - self.values[category])

    def state(self) -> dict[str, Any]:
        """Return counts and values."""
        return {**super().state(), "values": self.values.tolist()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from counts and values."""
        super().restore(state)
        self.values = np.array(state["values"])


@mechanism(Slot.SAMPLER, "prompt_replay", source="Prompt Replay, arXiv:2603.21177")
class ReplaySampler(_Beliefs):
    """Mix fresh starts with those whose last success rate was nearest to 0.5, each after a pause and not too often.

    share: of a batch that is replayed; near: how far from 0.5 still counts; cooldown: proposals before a start may come
    back; limit: how often it may.
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
        """Return starts [n], replayed ones first, then those used least."""
        self.round += 1
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
        fresh = sorted((number for number in order.tolist() if number not in ready), key=lambda n: self.used.get(n, 0))
        chosen = (ready + fresh)[:count]
        for number in chosen:
            self.last[number], self.used[number] = self.round, self.used.get(number, 0) + 1
        return np.array(chosen)

    def state(self) -> dict[str, Any]:
        """Return everything."""
        used = {str(key): [self.used[key], self.last[key]] for key in self.used}
        return {**super().state(), "round": self.round, "used": used}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on."""
        super().restore(state)
        self.round = state["round"]
        self.used = {int(key): value[0] for key, value in state["used"].items()}
        self.last = {int(key): value[1] for key, value in state["used"].items()}
