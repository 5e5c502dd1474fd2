"""A teacher for each task: every row is decided and scored by the specialist for its instruction.

Source: multi-teacher on-policy distillation of Keye-VL-2.0, arXiv:2606.10651: c = log teacher_of_the_task - log pi on
the student's own chunks (coefficient=opd); other losses that ask a teacher work alike.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import Decision, Policy, ScoredPolicy, Scores, TensorObservation
from robopolicy.core.randomness import EpisodeGenerator
from robopolicy.core.spec import TASK, PolicySpec
from robopolicy.core.world import Rows


class TaskTeachers:
    """Combine teachers by instruction patterns (as file names: push*), of which the first that matches counts.

    Raises ConfigError, naming the instruction, if none matches one of the world's.
    """

    def __init__(self, teachers: Mapping[str, Policy], instructions: tuple[str, ...]):
        self.policies = tuple(teachers.values())
        self.patterns = tuple(teachers)
        for text in instructions:
            self._teacher_of(text)

    def _teacher_of(self, text: str) -> int:
        for place, pattern in enumerate(self.patterns):
            if fnmatchcase(text, pattern):
                return place
        raise ConfigError(
            f"finetune.teachers: no pattern of {', '.join(map(repr, self.patterns))} matches the instruction {text!r}. "
            "Add one, or '*' as the last."
        )

    @property
    def spec(self) -> PolicySpec:
        """The first teacher's spec, with the observations of all, and the shortest chunk."""
        specs = [policy.spec for policy in self.policies]
        observation = {key: field for spec in reversed(specs) for key, field in spec.observation.items()}
        return replace(specs[0], observation=observation, chunk=min(spec.chunk for spec in specs))

    def reset(self, rows: Rows = None) -> None:
        """Reset all teachers. rows: indices [R] of the episodes to forget, None for all."""
        for policy in self.policies:
            policy.reset(rows)

    @torch.no_grad()
    def act(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Decision:
        """Return the actions [B, C, A] of each row's teacher, without log-probabilities."""

        by_episode = generator if isinstance(generator, EpisodeGenerator) else None

        def decide(policy: Policy, observation: TensorObservation, index: Tensor) -> dict[str, Tensor]:
            with nullcontext(generator) if by_episode is None else by_episode.part(index.numpy()) as draws:
                decision = policy.act(observation, draws, deterministic=deterministic)
            return {"actions": decision.actions[:, : self.spec.chunk]}

        return Decision(self._by_teacher(observation, decide)["actions"])

    def log_prob(self, observation: TensorObservation, latents: Mapping[str, Tensor]) -> Scores:
        """Compute log-probabilities [N, K] of each row under its teacher, with the extras that all teachers have."""

        def score(policy: Policy, observation: TensorObservation, index: Tensor) -> dict[str, Tensor]:
            assert isinstance(policy, ScoredPolicy)  # which Need.SAME_STEPS asks for
            scores = policy.log_prob(observation, {name: value[index] for name, value in latents.items()})
            rows = len(index)
            extras = {name: value.expand(rows, *value.shape[1:]) for name, value in scores.extras.items()}
            return {"logp": scores.logp, "entropy": scores.entropy, **extras}

        columns = self._by_teacher(observation, score)
        return Scores(columns.pop("logp"), columns.pop("entropy"), columns)

    def _by_teacher(
        self,
        observation: TensorObservation,
        ask: Callable[[Policy, TensorObservation, Tensor], dict[str, Tensor]],
    ) -> dict[str, Tensor]:
        """Ask every teacher about its rows (index [n]) and return the columns that all of them gave, in row order."""
        owner = torch.tensor([self._teacher_of(str(text)) for text in observation[TASK]])
        indices = [(owner == place).nonzero().squeeze(1) for place in range(len(self.policies))]
        answers = [
            ask(policy, {key: _rows(value, index) for key, value in observation.items()}, index)
            for policy, index in zip(self.policies, indices, strict=True)
            if len(index)
        ]
        order = torch.cat(indices).argsort()
        names = set(answers[0]).intersection(*answers)
        return {name: torch.cat([answer[name] for answer in answers])[order] for name in names}


def _rows(value: Tensor | list[str], index: Tensor) -> Tensor | list[str]:
    return value[index.to(value.device)] if isinstance(value, Tensor) else [value[row] for row in index.tolist()]
