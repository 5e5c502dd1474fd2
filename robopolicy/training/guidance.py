"""What fine-tuning may lean on beside its own episodes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import BecomesTrainable, Policy, ScoredPolicy, Trainable
from robopolicy.core.randomness import Generators
from robopolicy.core.steps import difference_of_steps
from robopolicy.rl.algorithm import Algorithm
from robopolicy.rl.preferences import Pairs
from robopolicy.rl.registry import Need
from robopolicy.training.acting import Acting, TeacherTurns
from robopolicy.training.collection.build import WHOLE
from robopolicy.training.demonstrations import Demonstrations
from robopolicy.training.expert_rows import ExpertRows
from robopolicy.training.pretrain import regression_batches

OF_THE_SAME_STEPS = frozenset({Need.SAME_STEPS, Need.TEACHER_SCORES})
"""Needs of what lets the teacher score the policy's steps."""
EXPERT_BATCH = 256
"""Decisions of experts that an actor step looks at."""


@dataclass(frozen=True)
class Guidance:
    """teacher: another policy; demonstrations: states to begin from; experts: recorded episodes to imitate; acting: who
    acts for the policy when rollouts are collected (planning in a world model), None for itself; pairs: episodes, some
    preferred to others, that are learned from without collecting any.
    """

    teacher: Policy | None = None
    demonstrations: Demonstrations | None = None
    experts: Episodes | None = None
    acting: Acting | None = None
    pairs: Pairs | None = None

    def expert_rows(
        self, policy: Trainable, instructions: tuple[str, ...], share: float, algorithm: Algorithm, draws: Generators
    ) -> ExpertRows | None:
        """Return what adds `share` times as many episodes of the experts to an iteration's own, None for 0.

        Raises ConfigError where there are no experts, where rollouts are no whole episodes, and what `ExpertRows` does.
        """
        if not share:
            return None
        if self.experts is None:
            raise ConfigError(f"expert_rows={share:g} needs episodes of experts (experts=[DATASET]).")
        if not algorithm.needs & WHOLE:
            raise ConfigError(
                f"expert_rows={share:g} needs an algorithm that learns from whole episodes, such as grpo."
            )
        return ExpertRows(policy, self.experts, instructions, share, draws["expert rows"], algorithm.rewards)

    def turns(self, first: float, until: float) -> TeacherTurns | None:
        """Return the turns that the teacher takes, None for `first` 0; ConfigError where there is no teacher."""
        if not first:
            return None
        if self.teacher is None:
            raise ConfigError(f"teacher_acts={first:g} needs a teacher (teacher=CHECKPOINT).")
        return TeacherTurns(self.teacher, first, until)

    def who_acts(self, turns: TeacherTurns | None) -> Acting | None:
        """Return who acts for the policy: what `acting` makes of it, in turns with the teacher; None for itself."""
        if turns is None or self.acting is None:
            return turns or self.acting
        acting = self.acting
        # Planning inside, turns outside: where the teacher does not act, the planned decision is executed.
        return lambda policy: turns(acting(policy))

    def check_teacher(self, policy: Policy, needs: frozenset[Need]) -> None:
        """Raise ConfigError, naming the difference, where `needs` ask for the steps of `policy` and the teacher's are
        others: the same latents are then other actions to it, or were drawn in another way.
        """
        if self.teacher is None or not needs & OF_THE_SAME_STEPS:
            return
        if other := self._other_steps(policy):
            raise ConfigError(
                f"The teacher speaks of other steps than the policy, so that it cannot score them: {other}. A teacher "
                "of the policy's kind can, with the same schedule or vocabulary, and normalised alike. Any teacher is "
                "learned from by what it does: advantage=grpo, coefficient=none, auxiliaries=[dagger]."
            )

    def _other_steps(self, policy: Policy) -> str:
        teacher = self.teacher
        if not isinstance(teacher, ScoredPolicy) or not teacher.spec.scored_steps:
            more = " as it is; what its to_trainable() makes has" if isinstance(teacher, BecomesTrainable) else ""
            return f"{type(teacher).__name__} has no log-probabilities{more}"
        return difference_of_steps(policy, teacher)

    def gives(self, policy: Policy) -> frozenset[Need]:
        """Return what mechanisms may count on when `policy` is tuned."""
        have = set()
        if self.teacher is not None:
            have.add(Need.TEACHER)
            if not self._other_steps(policy):
                have.add(Need.SAME_STEPS)
        if self.demonstrations is not None:
            have.add(Need.DEMONSTRATIONS)
        if self.experts is not None:
            have.add(Need.EXPERTS)
        return frozenset(have)

    def expert_batches(self, policy: Trainable, generator: torch.Generator) -> Iterator[dict[str, Any]] | None:
        """Return batches for `policy.loss`, drawn from the experts for ever, or None if there are none."""
        if self.experts is None:
            return None
        return regression_batches(policy, self.experts, EXPERT_BATCH, generator)
