"""Fitted Q evaluation: the value of a policy, learned from data of other policies.

    Q(s, a) -> R + discount^h mean_i Q'(s_h, a_i),   a_i drawn from the policy at s_h

with Q' a target network copied every `renew` steps (Le et al. 2019, arXiv:1903.08738). Values diverge silently where a
policy leaves the data. Targets are therefore clipped to the range that rewards allow, and the fraction of clipped
targets raises the alarm. Policy actions are sampled once for all next observations, not at every step.
"""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from robopolicy.core.errors import ConfigError
from robopolicy.core.progress import progress
from robopolicy.core.transitions import Transitions
from robopolicy.rl.offline.agent import Critics


@dataclass(frozen=True)
class FqeConfig:
    """Settings of fitted Q evaluation. Raises ConfigError on sizes below 1.

    samples: actions sampled at every next state; members: independent fits, whose mean is the value and whose spread
    indicates its uncertainty; alarm: fraction of clipped targets above which the fit counts as diverged.
    """

    steps: int = 4000
    batch_size: int = 256
    width: int = 256
    depth: int = 2
    rate: float = 3e-4
    discount: float = 0.99
    renew: int = 100
    samples: int = 2
    members: int = 2
    layer_norm: bool = True
    clip: bool = True
    alarm: float = 0.05

    def __post_init__(self) -> None:
        if min(self.steps, self.batch_size, self.width, self.renew, self.samples, self.members) < 1:
            raise ConfigError("steps, batch_size, width, renew, samples and members of FQE must be at least 1.")


@dataclass(frozen=True)
class FittedQ:
    """Result of fitted Q evaluation. critics: of the policy; clipped: fraction of targets outside the range that
    rewards allow, in the last tenth of the fit.

    loss: mean squared error in that tenth; diverged: whether `clipped` exceeds the alarm.
    """

    critics: Critics
    clipped: float
    loss: float
    diverged: bool

    @torch.no_grad()
    def values(self, state: Tensor, actions: Tensor) -> Tensor:
        """Return the value of the policy [N] at states [N, S] for its sampled actions [N, n, A]."""
        count, samples = actions.shape[:2]
        all_values = self.critics(state.repeat_interleave(samples, 0), actions.flatten(0, 1))
        return all_values.mean(0).reshape(count, samples).mean(1)


def fit_q(
    data: Transitions,
    drawn: Tensor,
    bounds: tuple[float, float],
    config: FqeConfig,
    generator: torch.Generator,
    label: str = "FQE",
) -> FittedQ:
    """Fit Q of a policy with sampled actions `drawn` [N, n, A] at the next states of `data`, N transitions.

    bounds: the minimum and maximum value that rewards allow (`value_bound`). All random draws use `generator`.
    """
    device = data.state.device
    with torch.random.fork_rng(devices=[]):  # pyright: ignore[reportUnknownMemberType]
        # Of the generator's seed and not its state: how much was drawn before does not change the weights.
        torch.manual_seed(generator.initial_seed())  # pyright: ignore[reportUnknownMemberType]
        sizes = data.state.shape[1], data.action.shape[1], config.width, config.depth
        critics = Critics(config.members, *sizes, config.layer_norm).to(device)
    critics.state.fit(data.state)
    slow = copy.deepcopy(critics).requires_grad_(False)
    optimiser = torch.optim.Adam(critics.parameters(), config.rate)
    clipped: list[Tensor] = []
    losses: list[Tensor] = []
    with progress(label, config.steps) as advance:
        for step in range(config.steps):
            if step % config.renew == 0:
                slow.load_state_dict(critics.state_dict())
            index = torch.randint(len(data), (config.batch_size,), generator=generator, device=generator.device)
            batch, actions = data.take(index.to(device)), drawn[index.to(device)]
            raw = td_targets(slow, batch, actions, config.discount)
            target = raw.clamp(*bounds) if config.clip else raw
            # Summed over members: each has the gradient that it would have alone.
            loss = (critics(batch.state, batch.action) - target).square().mean(1).sum()
            optimiser.zero_grad()
            loss.backward()  # pyright: ignore[reportUnknownMemberType]
            optimiser.step()  # pyright: ignore[reportUnknownMemberType]
            if step >= min(0.9 * config.steps, config.steps - 1):
                clipped.append(((raw < bounds[0]) | (raw > bounds[1])).float().mean())
                losses.append(loss.detach() / config.members)
            advance()
    share = float(torch.stack(clipped).mean())
    return FittedQ(critics, share, float(torch.stack(losses).mean()), share > config.alarm)


@torch.no_grad()
def td_targets(slow: Critics, batch: Transitions, actions: Tensor, discount: float) -> Tensor:
    """Compute each member's target [M, N], with its own Q' averaged over the policy's samples [N, n, A] at the next
    states.
    """
    count, samples = actions.shape[:2]
    following = slow(batch.next_state.repeat_interleave(samples, 0), actions.flatten(0, 1))
    return torch.stack([batch.backup(each.reshape(count, samples).mean(1), discount) for each in following])
