"""Action values Q(s, a) of recorded decisions, as an ensemble, by temporal differences or by outcomes (Digi-Q, PAV)."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from robopolicy.core.arrays import integers, is_mapping
from robopolicy.core.rollouts import Rollouts, visible
from robopolicy.core.spec import TASK
from robopolicy.nn.members import follow
from robopolicy.rl.context import Context, Tools
from robopolicy.rl.registry import Need, Slot, mechanism, unknown_option
from robopolicy.rl.side_models.base import (
    SideNetwork,
    StatePerceptron,
    device_of,
    minibatches,
    rows_of,
    succeeds_later,
)


class ValueModel(nn.Module):
    """An ensemble of Q(state, action chunk) and a V(state), in units of success or of scaled return."""

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
        """V [N]."""
        return self.v(observation).squeeze(-1)

    def members(self, observation: Mapping[str, Any], actions: Tensor) -> Tensor:
        """Q of every member for action chunks [N, C, A], [M, N]."""
        flat = actions.flatten(1)
        return torch.stack([member(observation, flat).squeeze(-1) for member in self.q])

    def action_values(self, observation: Mapping[str, Any], actions: Tensor) -> Tensor:
        """The smallest member's Q of action chunks [N, C, A], [N]."""
        return self.members(observation, actions).min(0).values


def td_target(reward: Tensor, decay: Tensor, following: Tensor, over: Tensor) -> Tensor:
    """Return R + decay V(s'), and R alone where the task is `over` [N] bool; all of them [N].

    decay: discount ** duration; following: V(s') of the observation before any reset.
    """
    return reward + decay * torch.where(over, 0.0, following)


@mechanism(Slot.MODEL, "q_ensemble", source="Digi-Q, arXiv:2502.15760; PAV, arXiv:2410.08146", gives=(Need.VALUES,))
class QEnsemble(SideNetwork[ValueModel]):
    """Action values of what was done: Q(s, a) by temporal differences to a V(s) (target=td), or by outcomes alone.

    td (Digi-Q): Q -> R + discount^h V(s'), V(s) -> Q(s, a') of an a' that the current policy draws there, whatever was
    done, with a slow copy's V and Q as targets. So decisions of older policies teach what the present one is worth: the
    last `capacity` of earlier iterations are kept (part of checkpoints), and `replayed` times as many of them as there
    are new ones are learned from beside those, with actions drawn anew. monte_carlo: both -> 1 where the episode
    succeeded later; nothing is kept. Adds extras["q"] and ["v"] [B, T]; advantage=q_values, rewards=[pav] and
    auxiliaries=[best_of_n, spo] use them. Deviations: it sees the vectors of the state, which are the frozen features
    of Digi-Q here; V follows the smallest member where the paper's two critics each have a V of their own; the policy
    imitates in the states of this iteration, not in those that are kept.
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
        self.kept: dict[str, Any] = {}

    def values(self, observation: Mapping[str, Any]) -> Tensor:
        """Return V [N] of an observation [N, H, ...]."""
        return self.network.values(observation)

    def action_values(self, observation: Mapping[str, Any], actions: Tensor) -> Tensor:
        """Return the smallest member's Q [N] of action chunks [N, C, A]."""
        return self.network.action_values(observation, actions)

    def annotate(self, rollouts: Rollouts, context: Context) -> Rollouts:
        """Learn, then add what it thinks of every decision."""
        if not self.network.v.fitted:
            self.network.fit(rollouts)
            # Also for the standardisation, without which the slow copy would read other inputs.
            self.slow.load_state_dict(self.network.state_dict())
        alive = rollouts.alive
        before, actions = visible(rollouts, alive), rollouts.actions[alive]
        if self.by_outcome:
            self._learn_outcomes(before, actions, succeeds_later(rollouts)[alive].float(), context)
        else:
            self._learn_differences(self._with_kept(self._transitions(rollouts, context), context), context)
        with torch.no_grad():
            q, v = self.network.action_values(before, actions), self.network.values(before)
        empty = torch.zeros(alive.shape, device=alive.device)
        return rollouts.with_extras(q=empty.index_put((alive,), q), v=empty.index_put((alive,), v))

    def _learn_outcomes(self, before: Mapping[str, Tensor], actions: Tensor, outcome: Tensor, context: Context) -> None:
        for index in minibatches(len(actions), self.minibatch, self.epochs, context):
            here = rows_of(before, index)
            q, v = self.network.members(here, actions[index]), self.network.values(here)
            self.step((q - outcome[index]).square().mean() + (v - outcome[index]).square().mean())
            follow(self.slow, self.network, self.tau)

    def _learn_differences(self, data: Mapping[str, Any], context: Context) -> None:
        """Learn from n decisions as `_transitions` returns them."""
        drawn, over = self._drawn(data["before"], context), data["over"]
        for index in minibatches(len(drawn), self.minibatch, self.epochs, context):
            here, then = rows_of(data["before"], index), rows_of(data["after"], index)
            q, v = self.network.members(here, data["actions"][index]), self.network.values(here)
            with torch.no_grad():
                following = self.slow.values(then)
                goal = td_target(data["reward"][index], data["decay"][index], following, over[index])
                # V follows what the policy would do here, not what was done: this is what makes the data off-policy.
                settled = self.slow.action_values(here, drawn[index])
            self.step((q - goal).square().mean() + (v - settled).square().mean())
            follow(self.slow, self.network, self.tau)

    def _transitions(self, rollouts: Rollouts, context: Context) -> dict[str, Any]:
        """Return the n decisions of the rollouts as what temporal differences need, on their own from now on.

        before: what the policy is shown, key -> [n, H, ...], `task` as index; after: without images; actions [n, C, A];
        reward, decay, over: [n].
        """
        alive = rollouts.alive
        return {
            "before": visible(rollouts, alive, images=len(self.tools.policy.spec.cameras) > 0),
            "after": visible(rollouts, alive, following=True),
            "actions": rollouts.actions[alive],
            "reward": rollouts.reward[alive],
            "decay": context.discount ** rollouts.duration[alive].float(),
            "over": rollouts.terminated[alive],
        }

    def _with_kept(self, fresh: dict[str, Any], context: Context) -> dict[str, Any]:
        """Return `fresh` decisions and a draw of those kept from earlier iterations, and keep the fresh ones too."""
        wanted = round(self.replayed * len(fresh["reward"]))
        if not wanted or not self.capacity:
            return fresh
        data, draws = fresh, context.generator
        if self.kept:
            order = torch.randperm(len(self.kept["reward"]), generator=draws, device=draws.device)[:wanted]
            data = _joined(fresh, _taken(self.kept, order))
            fresh = _joined(self.kept, fresh)
        # The newest stay.
        self.kept = _taken(fresh, slice(-self.capacity, None))
        return data

    @torch.no_grad()
    def _drawn(self, before: Mapping[str, Tensor], context: Context) -> Tensor:
        """Return an action chunk [n, C, A] of the policy as it is now for each of n observations."""
        names = self.tools.instructions
        parts: list[Tensor] = []
        for rows in torch.split(torch.arange(len(before[TASK])), 4096):
            shown: dict[str, Any] = {key: value[rows] for key, value in before.items() if key != TASK}
            shown[TASK] = [names[index] for index in integers(before[TASK][rows])]
            parts.append(self.tools.policy.act(shown, context.generator).actions)
        return torch.cat(parts)

    def tree(self) -> dict[str, Any]:
        """Return weights, moments, the slow copy, whether the inputs are standardised, and the decisions kept."""
        return {
            **super().tree(),
            "slow": self.slow.state_dict(),
            "fitted": self.network.v.fitted,
            "replayed": self.kept,
        }

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Go on from `tree`."""
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
