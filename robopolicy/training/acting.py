"""Rollout policies: the learner acts alone, or mixed with its teacher.

Source: DAgger, Ross et al. 2011, arXiv:1011.0686 (the mixture b_i teacher + (1 - b_i) learner), and its per-decision
form for agents, Revisiting DAgger, arXiv:2605.12913, in which b_i falls to 0 during the run.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from robopolicy.core.errors import ConfigError
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.policy import Decision, Policy, TensorObservation
from robopolicy.core.randomness import uniform
from robopolicy.core.spec import PolicySpec
from robopolicy.core.world import Rows
from robopolicy.rl.collect import TAUGHT

Acting = Callable[[Policy], Policy]
"""Map from the learner (or a copy of it) to the policy that acts in rollouts; latents and log-probabilities are the
learner's, whatever is executed.
"""


class TeacherSchedule:
    """Schedule of the teacher's probability of acting: starts at `first` and falls linearly to 0 at fraction `until` of
    the run.

    share: the current probability.
    """

    def __init__(self, teacher: Policy, first: float, until: float):
        self.teacher = teacher
        self.first = first
        self.until = until
        self.share = first

    def begin(self, done: float) -> None:
        """Set the schedule to progress `done` of the run, in [0, 1]."""
        self.share = max(0.0, self.first * (1 - done / self.until))

    def __call__(self, learner: Policy) -> Policy:
        """Return the policy that mixes `learner` with the teacher. Raises ConfigError when the teacher's chunks are
        shorter than the learner's.
        """
        return MixedPolicy(learner, self)


class MixedPolicy:
    """Mixture policy: at every policy call and for every row, the teacher acts with probability `turns.share`, else the
    learner.

    A teacher's chunk is stored with the learner's latents and mask False. The learner did not choose it, so it gets no
    policy gradient, but state-based losses (auxiliaries=[dagger]) use it. The latents record who acted.
    """

    def __init__(self, learner: Policy, turns: TeacherSchedule):
        learner_spec, other = learner.spec, turns.teacher.spec
        if other.chunk < learner_spec.chunk:
            raise ConfigError(
                f"The teacher's chunks have {other.chunk} control steps, the policy's {learner_spec.chunk}, so the "
                "teacher cannot act in its place: set teacher_fraction=0, so that it only labels."
            )
        self.learner, self.turns = learner, turns

    @property
    def spec(self) -> PolicySpec:
        """The learner's spec, plus the observations that the teacher reads."""
        learner_spec = self.learner.spec
        return replace(learner_spec, observation={**self.turns.teacher.spec.observation, **learner_spec.observation})

    def reset(self, rows: Rows = None) -> None:
        """Reset both policies. rows: indices [R] of the episodes to forget, None for all."""
        self.learner.reset(rows)
        self.turns.teacher.reset(rows)

    @torch.no_grad()
    def act(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Decision:
        """Query both policies and sample which one's chunk each row executes.

        Returns actions [B, C, A], the learner's latents [B, ...] including TAUGHT [B] bool, and its logp and mask [B,
        K], which are 0 and False where the teacher acts. Raises the errors of both policies.
        """
        decision = self.learner.act(observation, generator, deterministic=deterministic)
        # Drawn for every row at every decision, also where the share is 0: what is drawn later does not depend on it.
        teacher_mask = uniform((len(decision.actions),), generator, decision.actions.device) < self.turns.share
        latents = {**decision.latents, TAUGHT: teacher_mask}
        if not bool(teacher_mask.any()):
            return Decision(decision.actions, latents, decision.logp, decision.mask)
        teacher_actions = self.turns.teacher.act(observation, generator, deterministic=True).actions[
            :, : decision.actions.shape[1]
        ]
        actions = torch.where(teacher_mask[:, None, None], teacher_actions.to(decision.actions.dtype), decision.actions)
        # The learner has proposed something else than what is executed, so a policy gradient on it would reward an
        # action that nobody took.
        mask = decision.mask & ~teacher_mask[:, None]
        return Decision(actions, latents, torch.where(mask, decision.logp, 0.0), mask)


keep_former_names(__name__, {"TeacherTurns": "TeacherSchedule"})
