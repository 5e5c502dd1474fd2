"""Action values Q(s, a) of recorded decisions, as an ensemble (Digi-Q, PAV)."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from robopolicy.core.rollouts import Rollouts, visible
from robopolicy.nn.members import follow
from robopolicy.rl.context import Context, Tools
from robopolicy.rl.options import unknown_option
from robopolicy.rl.registry import Need, Slot, mechanism
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


@mechanism(Slot.MODEL, "q_ensemble", source="Digi-Q, arXiv:2502.15760; PAV, arXiv:2410.08146", gives=(Need.VALUES,))
class QEnsemble(SideNetwork[ValueModel]):
    """Action values of what was done: Q(s, a) by temporal differences to a V(s) (target=td), or by outcomes alone.

    td: Q -> R + discount^h V(s'), V -> Q(s, a), with a slow copy of V as target; monte_carlo: both -> 1 where the
    episode succeeded later. Adds extras["q"] and ["v"] [B, T]; advantage=q_values, rewards=[pav] and
    auxiliaries=[best_of_n, spo] use them. It sees the vectors of the state, which are the frozen features of Digi-Q
    here.
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
    ):
        super().__init__(ValueModel(tools, members, width).to(device_of(tools)), rate)
        if target not in ("td", "monte_carlo"):
            raise unknown_option("q_ensemble.target", target, ("td", "monte_carlo"))
        self.slow = copy.deepcopy(self.network).requires_grad_(False)
        self.by_outcome, self.epochs, self.minibatch, self.tau = target == "monte_carlo", epochs, minibatch, tau

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
            self.slow.load_state_dict(self.network.state_dict())
        alive = rollouts.alive
        before, after = visible(rollouts, alive), visible(rollouts, alive, following=True)
        actions, over = rollouts.actions[alive], rollouts.terminated[alive]
        reward, decay = rollouts.reward[alive], context.discount ** rollouts.duration[alive].float()
        outcome = succeeds_later(rollouts)[alive].float()
        for index in minibatches(len(actions), self.minibatch, self.epochs, context):
            here, then = rows_of(before, index), rows_of(after, index)
            q, v = self.network.members(here, actions[index]), self.network.values(here)
            with torch.no_grad():
                following = self.slow.values(then) * ~over[index]
                goal = outcome[index] if self.by_outcome else reward[index] + decay[index] * following
                settled = outcome[index] if self.by_outcome else q.min(0).values
            self.step((q - goal).square().mean() + (v - settled).square().mean())
            follow(self.slow, self.network, self.tau)
        with torch.no_grad():
            q, v = self.network.action_values(before, actions), self.network.values(before)
        empty = torch.zeros(alive.shape, device=alive.device)
        return rollouts.with_extras(q=empty.index_put((alive,), q), v=empty.index_put((alive,), v))

    def tree(self) -> dict[str, Any]:
        """Return weights, moments, the slow copy and whether the inputs are standardised."""
        return {**super().tree(), "slow": self.slow.state_dict(), "fitted": self.network.v.fitted}

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Go on from `tree`."""
        super().restore(tree)
        self.slow.load_state_dict(tree["slow"])
        for part in (*self.network.q, self.network.v):
            part.fitted = tree["fitted"]  # type: ignore[assignment]
