"""Experimental side models: discriminator, critics of actions (also noisy ones), progress, per-step rewards."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from robopolicy.core.arrays import integers, is_mapping
from robopolicy.core.policy import MatchingLikelihood, ScoredPolicy
from robopolicy.core.rollouts import Rollouts, critic_observation
from robopolicy.core.spec import TASK
from robopolicy.nn.blocks import follow
from robopolicy.rl.advantages.gae import chunk_rewards, gae, next_values
from robopolicy.rl.context import Context, Tools, require_input
from robopolicy.rl.critic import ReturnScale, StateFeatures
from robopolicy.rl.registry import Need, Slot, mechanism, unknown_option
from robopolicy.rl.side_models import (
    ImplicitReward,
    SideNetwork,
    SidePerceptron,
    StatePerceptron,
    device_of,
    minibatches,
    rows_of,
    succeeds_later,
)


@mechanism(Slot.MODEL, "discriminator", source="AFD, arXiv:2605.26105", needs=(Need.TEACHER,), gives=(Need.PREFERENCE,))
class Discriminator(SidePerceptron):
    """Discriminate the teacher's action chunks from the student's in the states that the student visits.

    Bradley-Terry: -log sigmoid(D(s, teacher's) - D(s, student's)). Adds extras["preference"] [B, T], D(s, student's)
    minus the mean of D over `draws` other chunks of the student in s: pairs are of one state, so their loss leaves D
    free to differ from state to state by any amount, and the paper compares rollouts of one prompt too.
    advantage=discriminator makes of it the teacher-likeness of a chunk; the teacher may be any policy, and its
    probabilities are not needed.
    """

    def __init__(
        self,
        tools: Tools,
        *,
        rate: float = 1e-3,
        epochs: int = 4,
        minibatch: int = 1024,
        width: int = 256,
        draws: int = 4,
    ):
        spec = tools.policy.spec
        super().__init__(StatePerceptron(tools, spec.chunk * spec.action.size, 1, width).to(device_of(tools)), rate)
        self.tools = tools
        self.epochs = epochs
        self.minibatch = minibatch
        self.draws = draws

    def annotate(self, rollouts: Rollouts, context: Context) -> Rollouts:
        """Query the teacher's action in every state, train, then add the preferences."""
        self.network.fit(rollouts)
        alive = rollouts.alive
        features, observation = critic_observation(rollouts, alive), self.tools.observe(rollouts, alive)
        chunk, teacher = rollouts.actions.shape[2], require_input(self.tools.teacher, "teacher")
        teacher_actions = teacher.act(observation, context.generator, deterministic=True).actions[:, :chunk].flatten(1)
        policy_actions = rollouts.actions[alive].flatten(1)
        for index in minibatches(len(policy_actions), self.minibatch, self.epochs, context):
            batch = rows_of(features, index)
            margin = self.network(batch, teacher_actions[index]) - self.network(batch, policy_actions[index])
            # softplus(-m) = -log sigmoid(m), without overflow.
            self.step(functional.softplus(-margin).mean())
        with torch.no_grad():
            preferences = self.network(features, policy_actions).squeeze(-1)
            for _ in range(self.draws):
                other = self.tools.policy.act(observation, context.generator).actions[:, :chunk].flatten(1)
                preferences = preferences - self.network(features, other).squeeze(-1) / self.draws
        return rollouts.with_extras(
            preference=torch.zeros(alive.shape, device=alive.device).index_put((alive,), preferences)
        )


@mechanism(
    Slot.MODEL,
    "flow_critic",
    source="AC-Flow, arXiv:2510.18072",
    needs=(Need.MATCHING,),
    gives=(Need.FLOW_VALUES,),
)
class FlowCritic(SidePerceptron):
    """V(s, x_t, t): expected return of a chunk of which only a noisy version x_t is known, t in [0, 1].

    It is trained at the noise levels at which a chunk is scored, with x_t computed from its own action, and at t = 1,
    where x_t is pure noise. So V(s, noise, 1) is the value of the state, and bootstraps the lambda-returns R that V is
    regressed on. Rewards are divided by the running standard deviation of returns (deviation: the paper has one chunk
    per episode and normalises its reward). Adds extras["flow_value"] [B, T, K] and ["flow_return"] [B, T], both from
    before this iteration's training; advantage=flow_values uses them. The policy is not updated during critic_warmup
    iterations. It reads the state vectors and the executed steps of the chunk.
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
        """Add values and returns, then train."""
        assert isinstance(self.policy, MatchingLikelihood)  # which Need.MATCHING asks for
        self.network.fit(rollouts)
        alive = rollouts.alive
        features = critic_observation(rollouts, alive)
        noisy, time = self.policy.noisy_actions({name: value[alive] for name, value in rollouts.latents.items()})
        noisy = noisy[:, :, : self.shape[0]]
        with torch.no_grad():
            levels = [self.values(features, noisy[:, level], time[:, level]) for level in range(time.shape[1])]
            returns = self._returns(rollouts, context)
        goal = returns[alive]
        for index in minibatches(len(goal), self.minibatch, self.epochs, context):
            batch, draws = rows_of(features, index), context.generator
            level = torch.randint(time.shape[1], index.shape, generator=draws, device=draws.device)
            flow_values = self.values(batch, noisy[index, level], time[index, level])
            state_values = self._state_values(batch, context)
            self.step((flow_values - goal[index]).square().mean() + (state_values - goal[index]).square().mean())
        empty = torch.zeros((*alive.shape, time.shape[1]), device=alive.device)
        return rollouts.with_extras(flow_value=empty.index_put((alive,), torch.stack(levels, 1)), flow_return=returns)

    def _state_values(self, observation: Mapping[str, Any], context: Context) -> Tensor:
        """Return V(s, noise, 1) [N], with newly sampled noise."""
        draws, count = context.generator, len(next(iter(observation.values())))
        noise = torch.randn((count, *self.shape), generator=draws, device=draws.device)
        return self.values(observation, noise, torch.ones(count, device=noise.device))

    def _returns(self, rollouts: Rollouts, context: Context) -> Tensor:
        """Compute lambda-returns of scaled rewards [B, T], bootstrapped with the current values of states."""
        rewards, everywhere = torch.stack(list(rollouts.rewards.values())).sum(0), torch.ones_like(rollouts.alive)
        discount = context.discount ** rollouts.duration.float()
        self.scale.update(chunk_rewards(rewards, rollouts.valid, context.discount), rollouts.ended, discount)
        values = self._state_values(critic_observation(rollouts, everywhere), context).reshape(rollouts.shape)
        bootstrap_mask = rollouts.ended & ~rollouts.terminated
        bootstrap_mask[:, -1] = True
        after = torch.zeros_like(values)
        after[bootstrap_mask] = self._state_values(
            critic_observation(rollouts, bootstrap_mask, following=True), context
        )
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
        """Restore the state from `tree`."""
        super().restore(tree)
        self.scale.load_state_dict(tree["scale"])


@mechanism(Slot.MODEL, "progress", source="SPA-RL, arXiv:2505.20732", needs=(Need.EPISODES,))
class Progress(SidePerceptron):
    """Distribute an episode's outcome over its chunks: contributions c_t that minimise (sum_t c_t - success)^2.

    c_t is predicted from the states before and after the chunk, and alpha c_t replaces the world's rewards (at the last
    step of the chunk); use it with any advantage. On robots every chunk can be executed, so SPA's grounding term has no
    effect.
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
        """Train, then replace the rewards."""
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
        after = self.network.features(critic_observation(rollouts, alive, following=True))
        contributions = self.network(critic_observation(rollouts, alive), after).squeeze(-1)
        return torch.zeros(alive.shape, device=alive.device).index_put((alive,), contributions)


@mechanism(Slot.MODEL, "oprl", source="OPRL, arXiv:2509.19199", needs=(Need.GROUPS,), gives=(Need.IMPLICIT,))
class Oprl(ImplicitReward):
    """Implicit rewards from preferences: the better episode of a pair with the same initial state gets the larger sum
    (DPO).

    r = beta (log phi - log pi) against the policy before the update, so that what phi prefers to it is rewarded. L =
    -log sigmoid(sum r+ - sum r-) over all pairs of a group with different returns; use it with advantage=process_steps.
    Rewards are those of the updated model, as in the paper; the authors' script pays those from before its update.
    """

    def __init__(self, tools: Tools, *, beta: float = 0.05, rate: float = 1e-4, epochs: int = 1, minibatch: int = 64):
        super().__init__(tools, beta, rate, epochs, minibatch)

    def annotate(self, rollouts: Rollouts, context: Context) -> Rollouts:
        """Train with the episodes of a group in the same minibatch."""
        order = rollouts.group.argsort(stable=True)
        back = order.argsort()
        return super().annotate(rollouts.take(order), context).take(back)

    def reference(self) -> ScoredPolicy:
        """Return the policy before the update."""
        return self.tools.policy

    def loss(self, logits: Tensor, rollouts: Rollouts) -> Tensor:
        """Return the pairwise loss of logits [b], a scalar; without gradient if no pair differs."""
        returns, group = rollouts.row_return, rollouts.group
        better = (group[:, None] == group[None]) & (returns[:, None] > returns[None] + 1e-6)
        if not bool(better.any()):
            # Without a gradient, which tells `annotate` to take no step.
            return logits.sum().detach()
        margin = logits[:, None] - logits[None]
        return functional.softplus(-margin[better]).mean()


class ValueModel(nn.Module):
    """Ensemble of Q(state, action chunk) and a V(state), in units of success or of scaled return."""

    def __init__(self, tools: Tools, members: int, width: int):
        super().__init__()
        chunk = tools.policy.spec.chunk * tools.policy.spec.action.size
        self.q = nn.ModuleList(StatePerceptron(tools, chunk, 1, width) for _ in range(members))
        self.v = StatePerceptron(tools, 0, 1, width)

    def fit(self, rollouts: Rollouts) -> None:
        """Fit the standardisation of the inputs, once."""
        for part in (*self.q, self.v):
            part.fit(rollouts)  # type: ignore[operator]

    def values(self, observation: Mapping[str, Any]) -> Tensor:
        """Return V [N]."""
        return self.v(observation).squeeze(-1)

    def members(self, observation: Mapping[str, Any], actions: Tensor) -> Tensor:
        """Return Q of every ensemble member for action chunks [N, C, A], [M, N]."""
        flat = actions.flatten(1)
        return torch.stack([member(observation, flat).squeeze(-1) for member in self.q])

    def action_values(self, observation: Mapping[str, Any], actions: Tensor) -> Tensor:
        """Return the minimum Q over the members for action chunks [N, C, A], [N]."""
        return self.members(observation, actions).min(0).values


def td_target(reward: Tensor, decay: Tensor, following: Tensor, over: Tensor) -> Tensor:
    """Compute R + decay V(s'), or R alone where the task is `over` [N] bool; all of them [N].

    decay: discount ** duration; following: V(s') of the observation before any reset.
    """
    return reward + decay * torch.where(over, 0.0, following)


@mechanism(Slot.MODEL, "q_ensemble", source="Digi-Q, arXiv:2502.15760; PAV, arXiv:2410.08146", gives=(Need.VALUES,))
class QEnsemble(SideNetwork[ValueModel]):
    """Action values of collected chunks: Q(s, a) by temporal differences to a V(s) (target=td), or from outcomes alone.

    td (Digi-Q): Q -> R + discount^h V(s'), V(s) -> Q(s, a') of an a' that the current policy samples there, with V and
    Q of a target network as targets. So chunks of older policies also inform the current policy's values. The last
    `capacity` chunks of earlier iterations are stored (part of checkpoints). Training adds `replayed` times as many of
    them as there are new ones, with newly sampled actions. monte_carlo: both -> 1 if the episode succeeded later;
    nothing is stored, q is the mean over the members, and v is shifted to the same mean as q. Adds extras["q"] and
    ["v"] [B, T]; advantage=q_values, rewards=[pav] and auxiliaries=[best_of_n, spo] use them. held_out: predict before
    learning from an iteration's outcomes, which values that credit these outcomes must not have seen; in the first
    iteration, before anything is learned, both are the batch's success rate. Deviations: it reads the state vectors,
    which take the place of Digi-Q's frozen features; V follows the minimum over the members, while the paper's two
    critics each have their own V; the policy imitates in the states of this iteration, not in the stored ones.
    """

    def __init__(
        self,
        tools: Tools,
        *,
        target: str = "monte_carlo",
        members: int = 2,
        rate: float = 1e-3,
        epochs: int = 16,
        minibatch: int = 1024,
        width: int = 256,
        tau: float = 0.05,
        capacity: int = 16384,
        replayed: float = 1.0,
        held_out: bool = False,
    ):
        super().__init__(ValueModel(tools, members, width).to(device_of(tools)), rate)
        if target not in ("td", "monte_carlo"):
            raise unknown_option("q_ensemble.target", target, ("td", "monte_carlo"))
        self.slow = copy.deepcopy(self.network).requires_grad_(False)
        self.by_outcome = target == "monte_carlo"
        self.epochs = epochs
        self.minibatch = minibatch
        self.tau = tau
        self.tools = tools
        self.capacity = capacity
        self.replayed = replayed
        self.held_out = held_out
        self.kept: dict[str, Any] = {}

    def values(self, observation: Mapping[str, Any]) -> Tensor:
        """Return V [N] of an observation [N, H, ...]."""
        return self.network.values(observation)

    def action_values(self, observation: Mapping[str, Any], actions: Tensor) -> Tensor:
        """Return the minimum Q [N] over the members for action chunks [N, C, A]."""
        return self.network.action_values(observation, actions)

    def annotate(self, rollouts: Rollouts, context: Context) -> Rollouts:
        """Train, then add the values of every chunk; in the other order with `held_out`."""
        has_learned = self.network.v.fitted
        if not has_learned:
            self.network.fit(rollouts)
            # Also for the standardisation, without which the slow copy would read other inputs.
            self.slow.load_state_dict(self.network.state_dict())
        if self.held_out:
            rate = torch.where(rollouts.alive, rollouts.row_success.float().mean(), 0.0)
            annotated = self._with_values(rollouts) if has_learned else rollouts.with_extras(q=rate, v=rate)
            self._learn(rollouts, context)
            return annotated
        self._learn(rollouts, context)
        return self._with_values(rollouts)

    def _learn(self, rollouts: Rollouts, context: Context) -> None:
        alive = rollouts.alive
        if self.by_outcome:
            before, actions = critic_observation(rollouts, alive), rollouts.actions[alive]
            self._learn_outcomes(before, actions, succeeds_later(rollouts)[alive].float(), context)
        else:
            self._learn_differences(self._with_kept(self._transitions(rollouts, context), context), context)

    def _with_values(self, rollouts: Rollouts) -> Rollouts:
        """Return the rollouts with `q` and `v` of every chunk."""
        alive = rollouts.alive
        before, actions = critic_observation(rollouts, alive), rollouts.actions[alive]
        with torch.no_grad():
            members, v = self.network.members(before, actions), self.network.values(before)
            if self.by_outcome:
                # Regression on outcomes overestimates nothing, so no minimum is needed. V is the mean of Q over the
                # policy's actions, which these are: what differs on average is an error of the two regressions, which
                # PAV would pay or charge at every decision.
                q = members.mean(0)
                v = v + (q - v).mean()
            else:
                q = members.min(0).values
        empty = torch.zeros(alive.shape, device=alive.device)
        return rollouts.with_extras(q=empty.index_put((alive,), q), v=empty.index_put((alive,), v))

    def _learn_outcomes(self, before: Mapping[str, Tensor], actions: Tensor, outcome: Tensor, context: Context) -> None:
        for index in minibatches(len(actions), self.minibatch, self.epochs, context):
            batch = rows_of(before, index)
            q, v = self.network.members(batch, actions[index]), self.network.values(batch)
            self.step((q - outcome[index]).square().mean() + (v - outcome[index]).square().mean())
            follow(self.slow, self.network, self.tau)

    def _learn_differences(self, data: Mapping[str, Any], context: Context) -> None:
        """Train on n chunks as returned by `_transitions`."""
        policy_actions, ends = self._drawn(data["before"], context), data["over"]
        for index in minibatches(len(policy_actions), self.minibatch, self.epochs, context):
            batch, then = rows_of(data["before"], index), rows_of(data["after"], index)
            q, v = self.network.members(batch, data["actions"][index]), self.network.values(batch)
            with torch.no_grad():
                following = self.slow.values(then)
                goal = td_target(data["reward"][index], data["decay"][index], following, ends[index])
                # V follows what the policy would do here, not what was done: this is what makes the data off-policy.
                policy_value = self.slow.action_values(batch, policy_actions[index])
            self.step((q - goal).square().mean() + (v - policy_value).square().mean())
            follow(self.slow, self.network, self.tau)

    def _transitions(self, rollouts: Rollouts, context: Context) -> dict[str, Any]:
        """Convert the n chunks of the rollouts to independent transitions for temporal differences.

        before: the policy's observation, key -> [n, H, ...], `task` as index; after: without images; actions [n, C, A];
        reward, decay, over: [n].
        """
        alive = rollouts.alive
        return {
            "before": critic_observation(rollouts, alive, images=len(self.tools.policy.spec.cameras) > 0),
            "after": critic_observation(rollouts, alive, following=True),
            "actions": rollouts.actions[alive],
            "reward": rollouts.reward[alive],
            "decay": context.discount ** rollouts.duration[alive].float(),
            "over": rollouts.terminated[alive],
        }

    def _with_kept(self, fresh: dict[str, Any], context: Context) -> dict[str, Any]:
        """Return the `fresh` chunks and a sample of those stored from earlier iterations, and store the fresh ones
        too.
        """
        count = round(self.replayed * len(fresh["reward"]))
        if not count or not self.capacity:
            return fresh
        data, draws = fresh, context.generator
        if self.kept:
            order = torch.randperm(len(self.kept["reward"]), generator=draws, device=draws.device)[:count]
            data = _joined(fresh, _taken(self.kept, order))
            fresh = _joined(self.kept, fresh)
        # The newest stay.
        self.kept = _taken(fresh, slice(-self.capacity, None))
        return data

    @torch.no_grad()
    def _drawn(self, before: Mapping[str, Tensor], context: Context) -> Tensor:
        """Sample an action chunk [n, C, A] from the current policy for each of n observations."""
        names = self.tools.instructions
        parts: list[Tensor] = []
        for rows in torch.split(torch.arange(len(before[TASK])), 4096):
            observation: dict[str, Any] = {key: value[rows] for key, value in before.items() if key != TASK}
            observation[TASK] = [names[index] for index in integers(before[TASK][rows])]
            parts.append(self.tools.policy.act(observation, context.generator).actions)
        return torch.cat(parts)

    def tree(self) -> dict[str, Any]:
        """Return weights, moments, the target network, whether the inputs are standardised, and the stored chunks."""
        return {
            **super().tree(),
            "slow": self.slow.state_dict(),
            "fitted": self.network.v.fitted,
            "replayed": self.kept,
        }

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Restore the state from `tree`."""
        super().restore(tree)
        self.slow.load_state_dict(tree["slow"])
        self.kept = _moved(tree["replayed"], next(self.network.parameters()).device)
        for part in (*self.network.q, self.network.v):
            part.fitted = tree["fitted"]  # type: ignore[assignment]


def _moved(data: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    return {key: _moved(value, device) if is_mapping(value) else value.to(device) for key, value in data.items()}


def _taken(data: Mapping[str, Any], index: Tensor | slice) -> dict[str, Any]:
    return {key: _taken(value, index) if is_mapping(value) else value[index] for key, value in data.items()}


def _joined(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _joined(value, second[key]) if is_mapping(value) else torch.cat([value, second[key]])
        for key, value in first.items()
    }


def first_falls(rollouts: Rollouts, values: Tensor, drop: float) -> Tensor:
    """Return the first chunk of every failed episode after which its value falls by at least `drop`, [B, T] bool.

    values: V of the states before chunks [B, T], held in 0..1; after the last one it is 0.
    """
    values = torch.where(rollouts.alive, values.clamp(0, 1), 0.0)
    following = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], 1)
    falls = (values - following >= drop - 1e-6) & rollouts.alive & ~rollouts.row_success[:, None]
    return falls & (falls.cumsum(1) == 1)


@mechanism(
    Slot.MODEL,
    "first_error",
    source="InT, arXiv:2601.14209",
    needs=(Need.EPISODES, Need.VALUES),
    gives=(Need.FIRST_ERRORS,),
)
class FirstError:
    """Mark the first decision of every failed episode after which the value falls by at least `drop`.

    V of q_ensemble (target=monte_carlo), which stands before it in models; after the last decision of a failure it is
    0. In the paper a language model finds the first wrong step of a solution. Adds extras["first_error"] and, for the
    decisions before it, extras["before_error"], [B, T] bool.
    """

    def __init__(self, tools: Tools, *, drop: float = 0.2):
        self.drop = drop

    def annotate(self, rollouts: Rollouts, context: Context) -> Rollouts:
        """Add the marks."""
        error = first_falls(rollouts, rollouts.extras["v"], self.drop)
        before = error.any(1, keepdim=True) & (error.cumsum(1) == 0)
        return rollouts.with_extras(first_error=error, before_error=before)

    def tree(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Do nothing; there is no state."""
