"""Who acts while rollouts are collected: the policy that learns, alone, or in turns with its teacher.

Source: DAgger, Ross et al. 2011, arXiv:1011.0686 (the mixture b_i teacher + (1 - b_i) learner), and its decision-wise
form for agents, Revisiting DAgger, arXiv:2605.12913, in which b_i falls to 0 along the run.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import Decision, Policy, TensorObservation
from robopolicy.core.randomness import uniform
from robopolicy.core.spec import PolicySpec
from robopolicy.core.world import Rows
from robopolicy.rl.collect import TAUGHT

Acting = Callable[[Policy], Policy]
"""Who acts for a policy that learns (or a copy of it): its latents and log-probabilities, whatever is executed."""


class TeacherTurns:
    """How often the teacher decides: `first` of all decisions, falling linearly to none at `until` of the run.

    share: by now.
    """

    def __init__(self, teacher: Policy, first: float, until: float):
        self.teacher = teacher
        self.first = first
        self.until = until
        self.share = first

    def begin(self, done: float) -> None:
        """Go to where `done` of the run is, in [0, 1]."""
        self.share = max(0.0, self.first * (1 - done / self.until))

    def __call__(self, learner: Policy) -> Policy:
        """Return who acts for `learner`. Raises ConfigError where the teacher's chunks are shorter than its own."""
        return MixedPolicy(learner, self)


class MixedPolicy:
    """At every decision of every row the teacher acts with probability `turns.share`, the learner otherwise.

    A decision of the teacher's keeps latents of the learner's with mask False: it is no choice of the learner's, so it
    has no policy gradient, but losses that look at states (auxiliaries=[dagger]) see it. Latents say whose it is.
    """

    def __init__(self, learner: Policy, turns: TeacherTurns):
        own, other = learner.spec, turns.teacher.spec
        if other.chunk < own.chunk:
            raise ConfigError(
                f"The teacher decides on {other.chunk} control steps at a time and the policy on {own.chunk}, so it "
                "cannot act in its place: set teacher_acts to 0, where it labels alone."
            )
        self.learner, self.turns = learner, turns

    @property
    def spec(self) -> PolicySpec:
        """The learner's, which also needs to see what the teacher sees."""
        own = self.learner.spec
        return replace(own, observation={**self.turns.teacher.spec.observation, **own.observation})

    def reset(self, rows: Rows = None) -> None:
        """Reset both. rows: indices [R] of the episodes to forget, None for all."""
        self.learner.reset(rows)
        self.turns.teacher.reset(rows)

    @torch.no_grad()
    def act(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Decision:
        """Let both decide and draw whose decision each row executes.

        Returns actions [B, C, A], the learner's latents [B, ...] and TAUGHT among them [B] bool, and its logp and mask
        [B, K], 0 and False where the teacher acts. Raises what the two raise.
        """
        own = self.learner.act(observation, generator, deterministic=deterministic)
        # Drawn for every row at every decision, also where the share is 0: what is drawn later does not depend on it.
        taught = uniform((len(own.actions),), generator, own.actions.device) < self.turns.share
        latents = {**own.latents, TAUGHT: taught}
        if not bool(taught.any()):
            return Decision(own.actions, latents, own.logp, own.mask)
        told = self.turns.teacher.act(observation, generator, deterministic=True).actions[:, : own.actions.shape[1]]
        actions = torch.where(taught[:, None, None], told.to(own.actions.dtype), own.actions)
        # The learner has proposed something else than what is executed, so a policy gradient on it would reward an
        # action that nobody took.
        mask = own.mask & ~taught[:, None]
        return Decision(actions, latents, torch.where(mask, own.logp, 0.0), mask)
