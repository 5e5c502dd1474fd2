"""Progress learned from returns: how much each decision contributed (SPA-RL)."""

from dataclasses import replace

import torch
from torch import Tensor

from robopolicy.core.rollouts import Rollouts, visible
from robopolicy.rl.context import Context, Tools
from robopolicy.rl.critic import StateFeatures
from robopolicy.rl.registry import Need, Slot, mechanism
from robopolicy.rl.side_models.base import SidePerceptron, StatePerceptron, device_of, minibatches


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
