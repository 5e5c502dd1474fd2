"""A discriminator between the policy's actions and a teacher's (AFD)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

from robopolicy.core.rollouts import Rollouts, visible
from robopolicy.rl.context import Context
from robopolicy.rl.registry import Need, Slot, mechanism
from robopolicy.rl.side_models.base import Tools, _batches, _device, _Learned, _Perceptron, _take


@mechanism(Slot.MODEL, "discriminator", source="AFD", needs=(Need.TEACHER,), gives=(Need.PREFERENCE,))
class Discriminator(_Learned):
    """Tell the teacher's action chunks from the student's in the states the student visits: who is preferred where.

    Bradley-Terry: -log sigmoid(D(s, teacher's) - D(s, student's)). Adds extras["preference"] [B, T] = D(s, student's),
    which advantage=discriminator turns into how teacher-like a decision was; the teacher may be any policy, and none of
    its probabilities are needed.
    """

    def __init__(self, tools: Tools, *, rate: float = 1e-3, epochs: int = 4, minibatch: int = 1024, width: int = 256):
        spec = tools.policy.spec
        super().__init__(_Perceptron(tools, spec.chunk * spec.action.size, 1, width).to(_device(tools)), rate)
        self.tools, self.epochs, self.minibatch = tools, epochs, minibatch

    def annotate(self, rollouts: Rollouts, context: Context) -> Rollouts:
        """Ask the teacher what it would do in every state, learn, then add the preferences."""
        assert isinstance(self.network, _Perceptron)
        self.network.fit(rollouts)
        alive = rollouts.alive
        seen, told = visible(rollouts, alive), self.tools.observe(rollouts, alive)
        chunk = rollouts.actions.shape[2]
        theirs = self.tools.teacher.act(told, context.generator, deterministic=True).actions[:, :chunk].flatten(1)
        mine = rollouts.actions[alive].flatten(1)
        for index in _batches(len(mine), self.minibatch, self.epochs, context):
            here = _take(seen, index)
            margin = self.network(here, theirs[index]) - self.network(here, mine[index])
            self.step(functional.softplus(-margin).mean())
        with torch.no_grad():
            found = self.network(seen, mine).squeeze(-1)
        return rollouts.with_extras(preference=torch.zeros(alive.shape, device=alive.device).index_put((alive,), found))

    def tree(self) -> dict[str, Any]:
        """Return weights, moments and whether the inputs are standardised."""
        assert isinstance(self.network, _Perceptron)
        return {**super().tree(), "fitted": self.network.fitted}

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Go on from `tree`."""
        super().restore(tree)
        assert isinstance(self.network, _Perceptron)
        self.network.fitted = tree["fitted"]
