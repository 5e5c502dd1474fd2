"""A discriminator between the policy's actions and a teacher's (AFD)."""

import torch
from torch.nn import functional

from robopolicy.core.rollouts import Rollouts, visible
from robopolicy.rl.context import Context, Tools, given
from robopolicy.rl.registry import Need, Slot, mechanism
from robopolicy.rl.side_models.base import SidePerceptron, StatePerceptron, device_of, minibatches, rows_of


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
            self.step(functional.softplus(-margin).mean())
        with torch.no_grad():
            found = self.network(seen, mine).squeeze(-1)
        return rollouts.with_extras(preference=torch.zeros(alive.shape, device=alive.device).index_put((alive,), found))
