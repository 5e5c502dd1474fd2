"""Models learned beside the policy: a discriminator, a critic of noisy actions, progress, rewards of every step."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from robopolicy.core.policy import MatchesNoise
from robopolicy.core.rollouts import Rollouts, visible
from robopolicy.rl.advantages.gae import chunk_rewards, gae, next_values
from robopolicy.rl.context import Context, Tools, given
from robopolicy.rl.critic import StateFeatures
from robopolicy.rl.registry import Need, Slot, mechanism
from robopolicy.rl.returns import ReturnScale
from robopolicy.rl.side_models.base import SidePerceptron, StatePerceptron, device_of, minibatches, rows_of
from robopolicy.rl.side_models.implicit_reward import ImplicitReward


@mechanism(Slot.MODEL, "discriminator", source="AFD, arXiv:2605.26105", needs=(Need.TEACHER,), gives=(Need.PREFERENCE,))
class Discriminator(SidePerceptron):
    """Tell the teacher's action chunks from the student's in the states the student visits: who is preferred where.

    Bradley-Terry: -log sigmoid(D(s, teacher's) - D(s, student's)). Adds extras["preference"] [B, T] = D(s, student's),
    which advantage=discriminator turns into how teacher-like a decision was; the teacher may be any policy, and none of
    its probabilities are needed.
    """

    def __init__(self, tools: Tools, *, rate: float = 1e-3, epochs: int = 4, minibatch: int = 1024, width: int = 256):
        spec = tools.policy.spec
        super().__init__(StatePerceptron(tools, spec.chunk * spec.action.size, 1, width).to(device_of(tools)), rate)
        self.tools = tools
        self.epochs = epochs
        self.minibatch = minibatch

    def annotate(self, rollouts: Rollouts, context: Context) -> Rollouts:
        """Ask the teacher what it would do in every state, learn, then add the preferences."""
        self.network.fit(rollouts)
        alive = rollouts.alive
        seen, shown = visible(rollouts, alive), self.tools.observe(rollouts, alive)
        chunk, teacher = rollouts.actions.shape[2], given(self.tools.teacher, "teacher")
        theirs = teacher.act(shown, context.generator, deterministic=True).actions[:, :chunk].flatten(1)
        mine = rollouts.actions[alive].flatten(1)
        for index in minibatches(len(mine), self.minibatch, self.epochs, context):
            here = rows_of(seen, index)
            margin = self.network(here, theirs[index]) - self.network(here, mine[index])
            # softplus(-m) = -log sigmoid(m), without overflow.
            self.step(functional.softplus(-margin).mean())
        with torch.no_grad():
            found = self.network(seen, mine).squeeze(-1)
        return rollouts.with_extras(preference=torch.zeros(alive.shape, device=alive.device).index_put((alive,), found))


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


@mechanism(Slot.MODEL, "progress", source="SPA-RL, arXiv:2505.20732", needs=(Need.EPISODES,))
class Progress(SidePerceptron):
    """Share an episode's outcome out among its decisions: contributions c_t with (sum_t c_t - success)^2 small.

    c_t is read from the states before and after the decision, and alpha c_t replaces the world's rewards (at the last
    step of the decision); use it with any advantage. On robots every decision can be executed, so SPA's grounding term
    has nothing to say.
    """

    def __init__(
        self, tools: Tools, *, alpha: float = 1.0, rate: float = 1e-3, epochs: int = 4, minibatch: int = 64,
        width: int = 128,
    ):  # fmt: skip
        features = StateFeatures(tools.fields, tools.history, tools.instructions).features
        super().__init__(StatePerceptron(tools, features, 1, width).to(device_of(tools)), rate)
        self.alpha = alpha
        self.epochs = epochs
        self.minibatch = minibatch

    def annotate(self, rollouts: Rollouts, context: Context) -> Rollouts:
        """Learn, then replace the rewards."""
        self.network.fit(rollouts)
        for index in minibatches(len(rollouts.group), self.minibatch, self.epochs, context):
            part = rollouts.take(index)
            self.step((self._contributions(part).sum(1) - part.row_success.float()).square().mean())
        with torch.no_grad():
            contribution = self.alpha * self._contributions(rollouts)
        last = (rollouts.valid.sum(-1) - 1).clamp(min=0)
        reward = torch.zeros_like(rollouts.valid, dtype=torch.float32)
        return replace(rollouts, rewards={"progress": reward.scatter(-1, last[..., None], contribution[..., None])})

    def _contributions(self, rollouts: Rollouts) -> Tensor:
        """Return c [b, t], 0 on padding."""
        alive = rollouts.alive
        after = self.network.features(visible(rollouts, alive, following=True))
        found = self.network(visible(rollouts, alive), after).squeeze(-1)
        return torch.zeros(alive.shape, device=alive.device).index_put((alive,), found)


@mechanism(Slot.MODEL, "oprl", source="OPRL, arXiv:2509.19199", needs=(Need.GROUPS, Need.BASE), gives=(Need.IMPLICIT,))
class Oprl(ImplicitReward):
    """Implicit rewards from preferences: the better episode of a pair with the same start gets the larger sum (DPO).

    L = -log sigmoid(sum r+ - sum r-) over all pairs of a group with different returns; use it with
    advantage=process_steps.
    """

    def __init__(self, tools: Tools, *, beta: float = 0.05, rate: float = 1e-4, epochs: int = 1, minibatch: int = 64):
        super().__init__(tools, beta, rate, epochs, minibatch)

    def annotate(self, rollouts: Rollouts, context: Context) -> Rollouts:
        """Learn with whole groups side by side."""
        order = rollouts.group.argsort(stable=True)
        back = order.argsort()
        return super().annotate(rollouts.take(order), context).take(back)

    def loss(self, logits: Tensor, rollouts: Rollouts) -> Tensor:
        """Return the pairwise loss of logits [b], a scalar; without gradient where no pair differs."""
        returns, group = rollouts.row_return, rollouts.group
        better = (group[:, None] == group[None]) & (returns[:, None] > returns[None] + 1e-6)
        if not bool(better.any()):
            # Without a gradient, which tells `annotate` to take no step.
            return logits.sum().detach()
        margin = logits[:, None] - logits[None]
        return functional.softplus(-margin[better]).mean()
