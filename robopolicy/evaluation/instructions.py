"""Does a policy listen? Judge it under other instructions than the world's: one that ignores them does not notice."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import Decision, Policy, Scores, TensorObservation
from robopolicy.core.spec import TASK, PolicySpec
from robopolicy.core.world import Rows

WRONG = "wrong"


class Misinformed:
    """A policy that is told `text` in every row, or with "wrong" another of `instructions`, the next ones in turn."""

    def __init__(self, policy: Policy, text: str, instructions: Sequence[str]):
        self.policy, self.text, self.instructions = policy, text, tuple(instructions)
        if text == WRONG and len(self.instructions) < 2:
            raise ConfigError("evaluate.instruction=wrong needs a world with several instructions; this one has one.")

    @property
    def spec(self) -> PolicySpec:
        """The policy's."""
        return self.policy.spec

    def act(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Decision:
        """Decide under the other instruction."""
        return self.policy.act(self._told(observation), generator, deterministic=deterministic)

    def log_prob(self, observation: TensorObservation, latents: Mapping[str, Tensor]) -> Scores:
        """Score under the other instruction."""
        return self.policy.log_prob(self._told(observation), latents)

    def reset(self, rows: Rows = None) -> None:
        """Reset the policy."""
        self.policy.reset(rows)

    def save(self, folder: Path) -> None:
        """Save the policy, which knows nothing of this."""
        self.policy.save(folder)

    def _told(self, observation: TensorObservation) -> TensorObservation:
        texts: Any = observation[TASK]
        if self.text != WRONG:
            return {**observation, TASK: [self.text] * len(texts)}
        others = len(self.instructions) - 1
        place = [self.instructions.index(text) + 1 + row % others for row, text in enumerate(texts)]
        return {**observation, TASK: [self.instructions[index % (others + 1)] for index in place]}


def misinform(policy: Policy, text: str, instructions: Sequence[str]) -> Policy:
    """Return `policy` as it is for the text "", else one that is told `text`, or "wrong" ones of `instructions`."""
    return Misinformed(policy, text, instructions) if text else policy
