"""What may be read off the transitions that agents learn from, recorded or imagined."""

import torch
from torch import Tensor

from robopolicy.core.segments import distinct
from robopolicy.core.transitions import Transitions


def value_bound(reward: Tensor, discount: float) -> tuple[float, float]:
    """Return the lowest and highest value that rewards like these allow: an episode may end at any time.

    reward: [N], of one step each; discount: of a step, below 1.
    """
    return min(float(reward.min()), 0.0) / (1 - discount), max(float(reward.max()), 0.0) / (1 - discount)


def edge_of_reach(batch: Transitions, resolution: float = 0.25) -> Tensor:
    """Return which transitions [N] lead to where none begins: states whose value is used but never learned.

    States are cells of `resolution` standard deviations. Source: the edge-of-reach problem, Sims et al. 2024,
    arXiv:2402.12527; there it is a state first reachable at the last imagined step, here it is counted.
    """
    scale = batch.state.std(0, correction=0).clamp_min(1e-6) * resolution
    here, there = ((value / scale).round().long() for value in (batch.state, batch.next_state))
    cells, inverse = distinct(torch.cat([here, there]))
    begun = torch.zeros(len(cells), dtype=torch.bool, device=inverse.device)
    begun[inverse[: len(here)]] = True
    return ~begun[inverse[len(here) :]] & ~batch.terminated
