"""Which starts to play next, out of a pool: seeds, and instructions where a world has several; and where they begin."""

from typing import Any, Protocol

import numpy as np

from robopolicy.core.arrays import Array
from robopolicy.rl.context import Context
from robopolicy.rl.registry import Slot, mechanism


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


class Hints(Protocol):
    """How far along its demonstration a start's group begins. Its state is JSON-able."""

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


class Beliefs:
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
            # Faded before the new counts are added: the latest visit counts fully.
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
class UniformSampler(Beliefs):
    """Draw starts uniformly without replacement, and remember their success rates."""

    def __init__(self) -> None:
        super().__init__(prior=1.0, decay=1.0)

    def propose(self, count: int, pool: int, generator: np.random.Generator) -> Array:
        """Return indices [n] drawn without replacement."""
        return generator.permutation(pool)[:count]


@mechanism(Slot.SAMPLER, "mopps", source="MoPPS, arXiv:2507.04632")
class MoppsSampler(Beliefs):
    """Thompson-sample every start's success rate from its Beta belief and take those nearest to `target`.

    decay: how much of what was seen before counts at the next visit, because the policy changes.
    """

    def __init__(self, *, target: float = 0.5, decay: float = 0.5):
        super().__init__(prior=1.0, decay=decay)
        self.target = target

    def propose(self, count: int, pool: int, generator: np.random.Generator) -> Array:
        """Return the `count` starts [n] whose drawn rate is nearest to the target."""
        a, b = self.beta(np.arange(pool))
        # A draw and not the mean: starts that are hardly known are tried now and then.
        drawn = generator.beta(a, b)
        return np.argsort(np.abs(drawn - self.target), kind="stable")[:count]
