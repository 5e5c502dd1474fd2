"""A policy that takes the best of several of its own decisions, by a critic's values.

Source: IDQL, Hansen-Estruch et al. 2023, arXiv:2304.10573: an expectile critic, a policy that imitates what was
recorded, and the argmax over samples of it. What it does is always something that the policy would have done.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from robopolicy.core.candidates import ScoreCandidates, best_of
from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import Decision, Policy, TensorObservation
from robopolicy.core.spec import PolicySpec
from robopolicy.core.world import Rows
from robopolicy.rl.offline.agent import OfflineAgent
from robopolicy.rl.offline.interface import Interface


class BestOfPolicy(nn.Module):
    """A `Policy` that decides `count` times and does what the critic's smallest member finds best.

    critic: sees observations and chunks through `interface`, whose chunk is the policy's. Log-probabilities are those
    of the policy's decision; choosing is not scored. Raises ConfigError where chunks differ or count is below 1.
    """

    def __init__(self, policy: Policy, critic: OfflineAgent, interface: Interface, count: int = 16):
        super().__init__()
        if count < 1:
            raise ConfigError(f"The best of {count} decisions: at least 1.")
        if interface.chunk != policy.spec.chunk:
            raise ConfigError(
                f"The critic judges chunks of {interface.chunk}, the policy decides on {policy.spec.chunk}."
            )
        self.policy, self.critic, self.interface, self.count = policy, critic, interface, count

    @property
    def spec(self) -> PolicySpec:
        """That of the policy, which also needs to see what the critic sees."""
        seen = {key: self.interface.fields[key] for key in self.interface.keys}
        return replace(self.policy.spec, observation={**self.policy.spec.observation, **seen})

    def reset(self, rows: Rows = None) -> None:
        """Reset the policy. rows: indices [R] of the episodes to forget, None for all."""
        self.policy.reset(rows)

    @torch.no_grad()
    def act(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Decision:
        """Return the best decision: actions [B, C, A], with the policy's latents, logp and mask.

        deterministic: its noise-free choice is among those tried. Raises what policy and critic raise.
        """
        score = smallest_value(self.critic, self.interface)
        return best_of(self.policy, observation, generator, self.count, score, deterministic=deterministic)[0]


def smallest_value(critic: OfflineAgent, interface: Interface) -> ScoreCandidates:
    """Return what scores candidates, chunks [N, C, A] in the world's units, by the smallest member of `critic`, [N]."""

    def score(several: TensorObservation, actions: Tensor) -> Tensor:
        return critic.action_values(interface.state(several), interface.to_agent(actions)).amin(0)

    return score
