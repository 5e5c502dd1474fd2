"""`Batch`: transitions that agents learn from, recorded or imagined, and what may be read off them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from robopolicy.core.spec import check_finite


@dataclass(frozen=True)
class Batch:
    """N transitions.

    state, next_state: [N, S]; action: [N, A]; reward: [N]; terminated: [N] bool, the task ended there. A time limit or
    the end of imagination is no end: its next state has a value.
    """

    state: Tensor
    action: Tensor
    reward: Tensor
    next_state: Tensor
    terminated: Tensor

    def __len__(self) -> int:
        return len(self.state)

    def check(self) -> "Batch":
        """Raise NonFiniteError naming what is not finite."""
        for name in ("state", "action", "reward", "next_state"):
            check_finite(f"transitions: {name}", getattr(self, name))
        return self

    def take(self, index: Tensor) -> "Batch":
        """Select transitions."""
        return Batch(*(value[index] for value in self.__dict__.values()))

    def draw(self, count: int, generator: torch.Generator) -> "Batch":
        """Draw `count` transitions, with replacement."""
        return self.take(torch.randint(len(self), (count,), generator=generator).to(self.state.device))

    @staticmethod
    def join(parts: Sequence["Batch"]) -> "Batch":
        """Return the transitions of all parts."""
        return Batch(*(torch.cat(values) for values in zip(*(part.__dict__.values() for part in parts), strict=True)))


def value_bound(reward: Tensor, discount: float) -> tuple[float, float]:
    """Return the lowest and highest value that rewards like these allow: an episode may end at any time."""
    return min(float(reward.min()), 0.0) / (1 - discount), max(float(reward.max()), 0.0) / (1 - discount)


def edge_of_reach(batch: Batch, resolution: float = 0.25) -> Tensor:
    """Return which transitions [N] lead to where none begins: states whose value is used but never learned.

    States are cells of `resolution` standard deviations. Source: the edge-of-reach problem, Sims et al. 2024,
    arXiv:2402.12527; there it is a state first reachable at the last imagined step, here it is counted.
    """
    scale = batch.state.std(0, correction=0).clamp_min(1e-6) * resolution
    here, there = ((value / scale).round().long() for value in (batch.state, batch.next_state))
    cells, inverse = torch.unique(torch.cat([here, there]), dim=0, return_inverse=True)
    begun = torch.zeros(len(cells), dtype=torch.bool, device=inverse.device)
    begun[inverse[: len(here)]] = True
    return ~begun[inverse[len(here) :]] & ~batch.terminated
