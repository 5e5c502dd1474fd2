"""Rollout policies: the learner acts alone, or mixed with its teacher.

Source: DAgger, Ross et al. 2011, arXiv:1011.0686 (the mixture b_i teacher + (1 - b_i) learner), and its per-decision
form for agents, Revisiting DAgger, arXiv:2605.12913, in which b_i falls to 0 during the run.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from robopolicy.core.errors import ConfigError
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.policy import (
    Decision,
    EncodesObservation,
    Policy,
    RecoversLatents,
    ScoredPolicy,
    TensorObservation,
    recovers_latents,
)
from robopolicy.core.randomness import uniform
from robopolicy.core.spec import PolicySpec
from robopolicy.core.steps import difference_of_steps
from robopolicy.core.world import Rows
from robopolicy.rl.collect import TAUGHT
from robopolicy.rl.context import latents_for_other_policy

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


class _WithTeacher[Learner: Policy]:
    """Learner and teacher of a policy in which either may act.

    otherwise: what to do, for the error, where the teacher cannot act. Raises ConfigError if its chunks are shorter
    than the learner's.
    """

    def __init__(self, learner: Learner, teacher: Policy, otherwise: str = ""):
        if teacher.spec.chunk < learner.spec.chunk:
            raise ConfigError(
                f"The teacher's chunks have {teacher.spec.chunk} control steps, the policy's {learner.spec.chunk}, so "
                f"the teacher cannot act in its place{otherwise}."
            )
        self.learner, self.teacher = learner, teacher

    @property
    def spec(self) -> PolicySpec:
        """The learner's spec, plus the observations that the teacher reads."""
        learner_spec = self.learner.spec
        return replace(learner_spec, observation={**self.teacher.spec.observation, **learner_spec.observation})

    def reset(self, rows: Rows = None) -> None:
        """Reset both policies. rows: indices [R] of the episodes to forget, None for all."""
        self.learner.reset(rows)
        self.teacher.reset(rows)


class MixedPolicy(_WithTeacher[Policy]):
    """Mixture policy: at every policy call and for every row, the teacher acts with probability `turns.share`, else the
    learner.

    A teacher's chunk is stored with the learner's latents and mask False. The learner did not choose it, so it gets no
    policy gradient, but state-based losses (auxiliaries=[dagger]) use it. The latents record who acted.
    """

    def __init__(self, learner: Policy, turns: TeacherSchedule):
        super().__init__(learner, turns.teacher, ": set teacher_fraction=0, so that it only labels")
        self.turns = turns

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
        teacher_actions = self.teacher.act(observation, generator, deterministic=True).actions[
            :, : decision.actions.shape[1]
        ]
        actions = torch.where(teacher_mask[:, None, None], teacher_actions.to(decision.actions.dtype), decision.actions)
        # The learner has proposed something else than what is executed, so a policy gradient on it would reward an
        # action that nobody took.
        mask = decision.mask & ~teacher_mask[:, None]
        return Decision(actions, latents, torch.where(mask, decision.logp, 0.0), mask)


class DemonstratingPolicy(_WithTeacher[ScoredPolicy]):
    """A policy in whose place the teacher plays a fraction of the rows from start to end, scored as the policy's own.

    In groups of n episodes a fraction of 1 / n is about one demonstration per group, from the group's own initial state
    (TempSamp-R1, arXiv:2509.18056). The latents of a teacher's chunk are those that the learner would have needed for
    it, and its log-probabilities the learner's, so the demonstration joins the group's baseline and the policy gradient
    with ratios that start at 1; tokens stand for the actions up to their resolution. Raises ConfigError if the learner
    cannot score given actions, or the teacher's chunks are shorter than its own.
    """

    def __init__(self, learner: Policy, teacher: Policy, fraction: float):
        if not (recovers_latents(learner) and isinstance(learner, ScoredPolicy)):
            raise ConfigError(
                f"teacher_episode_fraction={fraction:g}: {type(learner).__name__} cannot compute log-probabilities of "
                "the teacher's actions; token policies can, and denoising policies with likelihood=matching."
            )
        super().__init__(learner, teacher, ": set teacher_episode_fraction=0")
        self.fraction = fraction

    @torch.no_grad()
    def act(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Decision:
        """Return the learner's decisions, and in the teacher's rows the teacher's actions with the learner's scores."""
        decision = self.learner.act(observation, generator, deterministic=deterministic)
        row = torch.arange(len(decision.actions) + 1, device=decision.actions.device)
        teacher_mask = (row * self.fraction + 1e-9).floor().diff() > 0
        if not bool(teacher_mask.any()):
            return decision
        actions = self.teacher.act(observation, generator, deterministic=True).actions[:, : decision.actions.shape[1]]

        def merged(taught: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
            return torch.where(teacher_mask.reshape(-1, *[1] * (own.dim() - 1)), taught.to(own.dtype), own)

        assert isinstance(self.learner, RecoversLatents)  # as the constructor requires
        steps = self.learner.steps_of(actions, generator)
        latents = decision.latents | {name: merged(value, decision.latents[name]) for name, value in steps.items()}
        logp = self.learner.log_prob(observation, latents).logp
        mask = decision.mask | teacher_mask[:, None]
        return Decision(merged(actions, decision.actions), latents, merged(logp, decision.logp), mask)


class TakesOver(_WithTeacher[ScoredPolicy]):
    """The learner, or the teacher in its place in all rows while `teaching` is set, scored as the learner's own.

    The teacher has the learner's steps (`difference_of_steps`), so its latents are stored as they are, with the
    learner's log-probabilities: ratios start at 1. Raises ConfigError if the teacher's steps or the lengths of chunks
    differ.
    """

    def __init__(self, learner: Policy, teacher: Policy):
        difference = difference_of_steps(learner, teacher)
        if difference or not isinstance(learner, ScoredPolicy):
            raise ConfigError(
                "This allocator lets the teacher act in the policy's place, and their steps differ: "
                f"{difference or 'the policy has no log-probabilities'}. Use a teacher of the same policy kind, "
                "schedule or vocabulary, and normalisation."
            )
        super().__init__(learner, teacher)
        self.teaching = False

    @torch.no_grad()
    def act(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Decision:
        """Return the learner's decisions, or the teacher's with the learner's scores."""
        if not self.teaching:
            return self.learner.act(observation, generator, deterministic=deterministic)
        decision = self.teacher.act(observation, generator, deterministic=deterministic)
        latents: dict[str, torch.Tensor] = latents_for_other_policy(decision.latents)
        if isinstance(self.learner, EncodesObservation) and self.learner.caches_condition:
            latents |= self.learner.encode(observation)
        logp = self.learner.log_prob(observation, latents).logp
        actions = decision.actions[:, : self.learner.spec.chunk]
        return Decision(actions, latents, torch.where(decision.mask, logp, 0.0), decision.mask)


keep_former_names(__name__, {"TeacherTurns": "TeacherSchedule"})
