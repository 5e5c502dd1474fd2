"""Success by progress: a potential that is 0 where episodes succeed and lower elsewhere, compared with a threshold.

A classifier of success sees few positives, all of them at the edge, because episodes end there; its threshold makes
single frames unbiased, while an episode succeeds by the largest of its frames. A potential learns from every reward:
between any two frames of an episode it rises by the rewards between them, and it is 0 after the step that succeeds. Its
threshold is that which as many held-out episodes exceed at some frame as succeeded.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from robopolicy.core.transitions import Transitions
from robopolicy.nn.blocks import Members
from worldmodels.heads.outputs import calibrated_threshold


class GoalPotential(nn.Module):
    """A network from standardised states [..., S] to a potential [...] in `scale`, the deviation of the rewards between
    two frames of an episode.
    """

    scale: Tensor

    def __init__(self, states: int, width: int):
        super().__init__()
        self.network = Members(1, states, width, 2, 1)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, states: Tensor) -> Tensor:
        """Return the potential [...] of standardised states [..., S], in units of `scale`."""
        return self.network(states.reshape(1, -1, states.shape[-1])).reshape(states.shape[:-1])

    def fit_scale(self, data: Transitions) -> None:
        """Store the root mean square of the rewards from each step to its episode's last one."""
        assert data.episode is not None
        summed = data.reward.double().cumsum(0)
        last = torch.searchsorted(data.episode.contiguous(), data.episode, right=True) - 1
        self.scale.copy_((summed[last] - summed + data.reward).square().mean().sqrt().clamp_min(1e-6))

    def loss(self, first: Tensor, second: Tensor, gain: Tensor, state: Tensor, success: Tensor) -> Tensor:
        """Return the loss [N]: of the rise from states `first` to `second` [N, S], which is `gain` [N] in the world's
        rewards, and of the value 0 in those states `state` [N, S] that are successful, [N] bool. States are
        standardised.
        """
        rise = self(second) - self(first) - gain / self.scale
        value = self(state)
        each = (functional.huber_loss(error, torch.zeros_like(error), reduction="none") for error in (rise, value))
        of_rise, of_value = each
        return of_rise + torch.where(success, of_value, 0.0)


def pairs_of(data: Transitions, rows: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Return {"success_first", "success_second", "success_gain"}: the states before steps `rows` [N] and after a later
    step of the same episode, [N, S] each, and the rewards in between, [N].

    The later step is uniform among those that remain, the first one included.
    """
    assert data.episode is not None
    ends = torch.searchsorted(data.episode.contiguous(), data.episode[rows], right=True)
    draws = torch.rand(len(rows), generator=generator, device=generator.device, dtype=torch.float64).cpu()
    later = rows + (draws * (ends - rows)).long()
    summed = data.reward.double().cumsum(0)
    gain = summed[later] - summed[rows] + data.reward[rows]
    return {
        "success_first": data.state[rows],
        "success_second": data.next_state[later],
        "success_gain": gain.float(),
    }


def episode_threshold(value: Tensor, success: Tensor, episode: Tensor) -> Tensor:
    """Return the threshold [] that as many episodes exceed at some step as succeeded, of values [N], success [N] bool
    and the episode [N] of every step; infinity if none succeeded.
    """
    _, place = episode.unique(return_inverse=True)
    count = int(place.max()) + 1
    highest = torch.full((count,), -torch.inf, device=value.device).scatter_reduce(0, place, value.float(), "amax")
    succeeded = torch.zeros(count, device=value.device).scatter_reduce(0, place, success.float(), "amax") > 0
    return calibrated_threshold(highest, succeeded)
