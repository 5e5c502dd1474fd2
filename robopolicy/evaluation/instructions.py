"""Does a policy listen? Judge it under other instructions than the world's: one that ignores them does not notice."""

from collections.abc import Sequence
from typing import cast

import torch

from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import Decision, Policy, TensorObservation
from robopolicy.core.spec import TASK, PolicySpec
from robopolicy.core.world import Rows

WRONG = "wrong"


class OtherInstruction:
    """A policy that reads `text` in every row instead of the world's instruction.

    text: an instruction, or "wrong" for another one of `instructions` than the world's, the next ones in turn from row
    to row. Raises ConfigError for "wrong" where there is no other instruction.
    """

    def __init__(self, policy: Policy, text: str, instructions: Sequence[str]):
        self.policy, self.text, self.instructions = policy, text, tuple(instructions)
        if text == WRONG and len(self.instructions) < 2:
            raise ConfigError("instruction=wrong needs a world with several instructions; this one has one.")

    @property
    def spec(self) -> PolicySpec:
        """The policy's."""
        return self.policy.spec

    def act(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Decision:
        """Decide under the other instruction; see `Policy.act`."""
        return self.policy.act(self._replaced(observation), generator, deterministic=deterministic)

    def reset(self, rows: Rows = None) -> None:
        """Reset the policy."""
        self.policy.reset(rows)

    def _replaced(self, observation: TensorObservation) -> TensorObservation:
        texts = cast(list[str], observation[TASK])
        if self.text != WRONG:
            return {**observation, TASK: [self.text] * len(texts)}
        others = len(self.instructions) - 1
        place = [self.instructions.index(text) + 1 + row % others for row, text in enumerate(texts)]
        return {**observation, TASK: [self.instructions[index % (others + 1)] for index in place]}


def with_instruction(policy: Policy, text: str, instructions: Sequence[str]) -> Policy:
    """Return `policy` as it is for the text "", else one that reads `text`, or "wrong" ones of `instructions`."""
    return OtherInstruction(policy, text, instructions) if text else policy
