"""Which starts to play next, how many episodes each, and which of the played ones to learn from."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.rollouts import Rollouts
from robopolicy.core.segments import Segments
from robopolicy.rl.context import Context
from robopolicy.rl.mechanisms import Need, Slot, mechanism


class TaskSampler(Protocol):
    """Chooses among a pool of starts (seed and instruction) by what happened on them. Its state is JSON-able."""

    def propose(self, count: int, pool: int, generator: np.random.Generator) -> np.ndarray:
        """Return `count` different indices into a pool of starts (all of them where the pool is smaller)."""
        ...

    def observe(self, index: np.ndarray, successes: np.ndarray, episodes: np.ndarray, advantage: np.ndarray) -> None:
        """Take in, per start played: its index, successes out of episodes, and mean absolute advantage, each [n]."""
        ...

    def predict(self, index: np.ndarray) -> np.ndarray:
        """Return the expected success rate of starts [n]."""
        ...

    def state(self) -> dict:
        """Return what `restore` needs."""
        ...

    def restore(self, state: dict) -> None:
        """Go on from `state`."""
        ...


@mechanism(Slot.SAMPLER, "uniform", source="every start alike")
class UniformSampler:
    """Draw starts uniformly without replacement, and remember their success rates."""

    def __init__(self) -> None:
        self.successes: dict[int, float] = {}
        self.episodes: dict[int, float] = {}

    def propose(self, count: int, pool: int, generator: np.random.Generator) -> np.ndarray:
        """Return indices drawn without replacement."""
        return generator.permutation(pool)[:count]

    def observe(self, index: np.ndarray, successes: np.ndarray, episodes: np.ndarray, advantage: np.ndarray) -> None:
        """Count."""
        for number, won, played in zip(index.tolist(), successes.tolist(), episodes.tolist(), strict=True):
            self.successes[number] = self.successes.get(number, 0.0) + won
            self.episodes[number] = self.episodes.get(number, 0.0) + played

    def predict(self, index: np.ndarray) -> np.ndarray:
        """Return the observed rates with one success and one failure added."""
        return np.array([(self.successes.get(i, 0) + 1) / (self.episodes.get(i, 0) + 2) for i in index.tolist()])

    def state(self) -> dict:
        """Return the counts."""
        return {
            "successes": {str(key): value for key, value in self.successes.items()},
            "episodes": {str(key): value for key, value in self.episodes.items()},
        }

    def restore(self, state: dict) -> None:
        """Go on from the counts."""
        self.successes = {int(key): value for key, value in state["successes"].items()}
        self.episodes = {int(key): value for key, value in state["episodes"].items()}


@mechanism(Slot.ALLOCATOR, "uniform", source="GRPO, arXiv:2402.03300")
def allocate_uniformly(predicted: np.ndarray, group_size: int) -> Sequence[int]:
    """Give every start the same number of episodes."""
    return [group_size] * len(predicted)


@mechanism(Slot.SELECTION, "mixed_outcomes", source="DAPO, arXiv:2503.14476", needs=(Need.GROUPS,))
def keep_mixed(rollouts: Rollouts, context: Context) -> Tensor:
    """Drop groups in which every episode succeeded or every one failed: their advantages carry no signal."""
    groups = Segments.of(rollouts.group)
    rate = groups.mean(rollouts.row_success.float())[groups.index]
    return (rate > 0) & (rate < 1) if bool(((rate > 0) & (rate < 1)).any()) else torch.ones_like(rate, dtype=torch.bool)
