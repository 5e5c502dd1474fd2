"""A critic of noisy actions: what a decision is worth while it is still being denoised (AC-Flow)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from robopolicy.core.policy import MatchesNoise
from robopolicy.core.rollouts import Rollouts, visible
from robopolicy.rl.advantages.gae import chunk_rewards, gae, next_values
from robopolicy.rl.context import Context, Tools
from robopolicy.rl.registry import Need, Slot, mechanism
from robopolicy.rl.returns import ReturnScale
from robopolicy.rl.side_models.base import SidePerceptron, StatePerceptron, device_of, minibatches, rows_of


@mechanism(
    Slot.MODEL,
    "flow_critic",
    source="AC-Flow, arXiv:2510.18072",
    needs=(Need.MATCHING,),
    gives=(Need.FLOW_VALUES,),
)
class FlowCritic(SidePerceptron):
    """V(s, x_t, t): the expected return of a decision of which only a noisy version x_t is known, t in [0, 1].

    It learns where the policy does: at the noise levels that score a decision, x_t made of its own action; and at
    t = 1, where x_t is noise alone and says nothing. So V(s, noise, 1) is the value of the state, and bootstraps the
    lambda-returns R that V is regressed on. Rewards are shaped: divided by the running spread of returns (deviation:
    the paper has one decision an episode and normalises its reward). Adds extras["flow_value"] [B, T, K] and
    ["flow_return"] [B, T], both as they were before this iteration's learning; advantage=flow_values uses them. The
    policy waits for critic_warmup iterations. It sees the vectors of the state and the executed steps of the chunk.
    """

    def __init__(self, tools: Tools, *, rate: float = 1e-3, epochs: int = 8, minibatch: int = 1024, width: int = 256):
        spec, self.policy = tools.policy.spec, tools.policy
        self.shape, device = (spec.chunk, spec.action.size), device_of(tools)
        super().__init__(StatePerceptron(tools, spec.chunk * spec.action.size + 1, 1, width).to(device), rate)
        self.epochs = epochs
        self.minibatch = minibatch
        self.scale = ReturnScale().to(device)

    def values(self, observation: Mapping[str, Any], noisy: Tensor, time: Tensor) -> Tensor:
        """Return V [N] of observations [N, H, ...], noisy actions [N, C, A] and times [N]."""
        return self.network(observation, noisy.flatten(1), time[:, None]).squeeze(-1)

    def annotate(self, rollouts: Rollouts, context: Context) -> Rollouts:
        """Add values and returns, then learn."""
        assert isinstance(self.policy, MatchesNoise)  # which Need.MATCHING asks for
        self.network.fit(rollouts)
        alive = rollouts.alive
        seen = visible(rollouts, alive)
        noisy, time = self.policy.noisy_actions({name: value[alive] for name, value in rollouts.latents.items()})
        noisy = noisy[:, :, : self.shape[0]]
        with torch.no_grad():
            levels = [self.values(seen, noisy[:, level], time[:, level]) for level in range(time.shape[1])]
            returns = self._returns(rollouts, context)
        goal = returns[alive]
        for index in minibatches(len(goal), self.minibatch, self.epochs, context):
            here, draws = rows_of(seen, index), context.generator
            level = torch.randint(time.shape[1], index.shape, generator=draws, device=draws.device)
            inside = self.values(here, noisy[index, level], time[index, level])
            outside = self._state_values(here, context)
            self.step((inside - goal[index]).square().mean() + (outside - goal[index]).square().mean())
        empty = torch.zeros((*alive.shape, time.shape[1]), device=alive.device)
        return rollouts.with_extras(flow_value=empty.index_put((alive,), torch.stack(levels, 1)), flow_return=returns)

    def _state_values(self, observation: Mapping[str, Any], context: Context) -> Tensor:
        """Return V(s, noise, 1) [N], with a fresh draw of the noise."""
        draws, count = context.generator, len(next(iter(observation.values())))
        noise = torch.randn((count, *self.shape), generator=draws, device=draws.device)
        return self.values(observation, noise, torch.ones(count, device=noise.device))

    def _returns(self, rollouts: Rollouts, context: Context) -> Tensor:
        """Return lambda-returns of scaled rewards [B, T], bootstrapped by the values of states as they are now."""
        rewards, everywhere = torch.stack(list(rollouts.rewards.values())).sum(0), torch.ones_like(rollouts.alive)
        discount = context.discount ** rollouts.duration.float()
        self.scale.update(chunk_rewards(rewards, rollouts.valid, context.discount), rollouts.ended, discount)
        values = self._state_values(visible(rollouts, everywhere), context).reshape(rollouts.shape)
        needed = rollouts.ended & ~rollouts.terminated
        needed[:, -1] = True
        after = torch.zeros_like(values)
        after[needed] = self._state_values(visible(rollouts, needed, following=True), context)
        return gae(
            rewards / self.scale.scale.to(rewards.dtype),
            rollouts.valid,
            values,
            next_values(values, after, rollouts.ended),
            rollouts.terminated,
            rollouts.ended,
            context.discount,
            context.gae_lambda,
        ).returns

    def tree(self) -> dict[str, Any]:
        """Return weights, moments, whether the inputs are standardised, and the scale of returns."""
        return {**super().tree(), "scale": self.scale.state_dict()}

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Go on from `tree`."""
        super().restore(tree)
        self.scale.load_state_dict(tree["scale"])
