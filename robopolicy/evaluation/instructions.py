"""Language-conditioning controls: evaluate a policy under other instructions than the world's.

Two controls: given another instruction than the one evaluated, a policy that conditions on language fails; given a
paraphrase, a policy that understands it succeeds as before. Both use the initial states of the policy's main
evaluation.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from robopolicy.core.errors import ConfigError, SpecError, did_you_mean
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.policy import Decision, Policy, TensorObservation
from robopolicy.core.spec import TASK, PolicySpec, WorldSpec
from robopolicy.core.world import Rows
from robopolicy.evaluation.success import EvaluationResult, compare
from robopolicy.evaluation.tables import difference_text

WRONG, PARAPHRASE = "wrong", "paraphrase"
CONTROLS = {"wrong_instruction": WRONG, "paraphrase": PARAPHRASE}
"""Controls by name, and the instruction that the policy reads in them."""


class OtherInstruction:
    """A policy that reads `text` in every batch row instead of the world's instruction.

    text: an instruction; "wrong" for another of the world's instructions, rotating over rows; or "paraphrase" for other
    words with the same meaning, also rotating. world: spec that provides the instructions and paraphrases. Raises
    ConfigError when the world has only one instruction, or lacks a paraphrase of one.
    """

    def __init__(self, policy: Policy, text: str, world: WorldSpec):
        self.policy = policy
        self.text = text
        self.world = world
        if text == WRONG and len(world.goals) < 2:
            raise ConfigError("instruction=wrong needs a world with several instructions; this world has one.")
        unparaphrased = [goal for goal in world.goals if not world.paraphrases.get(goal)]
        if text == PARAPHRASE and unparaphrased:
            raise ConfigError(f"instruction=paraphrase: '{world.name}' has no paraphrase of '{unparaphrased[0]}'.")

    @property
    def spec(self) -> PolicySpec:
        """Spec of the policy."""
        return self.policy.spec

    def act(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Decision:
        """Act under the other instruction; see `Policy.act`."""
        texts = cast(list[str], observation[TASK])
        instructions = [self._told(str(text), row) for row, text in enumerate(texts)]
        return self.policy.act({**observation, TASK: instructions}, generator, deterministic=deterministic)

    def reset(self, rows: Rows = None) -> None:
        """Reset the policy."""
        self.policy.reset(rows)

    def _told(self, text: str, row: int) -> str:
        """Return the replacement instruction for a row in which the world gives `text`."""
        goals, plain_text = self.world.goals, self.world.meaning(text)
        if self.text == WRONG:
            other = goals[(goals.index(plain_text) + 1 + row % (len(goals) - 1)) % len(goals)]
            wordings = [each for each in self.world.instructions if self.world.meaning(each) == other]
            return wordings[row % len(wordings)]
        if self.text == PARAPHRASE:
            alternatives = [other for other in self.world.paraphrases[plain_text] if other != text] or [text]
            return alternatives[row % len(alternatives)]
        return self.text


def with_instruction(policy: Policy, text: str, world: WorldSpec) -> Policy:
    """Return `policy` unchanged for the text "", else one that reads `text` instead; see `OtherInstruction`."""
    return OtherInstruction(policy, text, world) if text else policy


@dataclass(frozen=True)
class Control:
    """Evaluation of a policy under other instructions, compared with the world's; refused: reason if the policy rejects
    them.

    found: None if it was refused.
    """

    found: EvaluationResult | None
    beside: EvaluationResult
    refused: str = ""

    @property
    def text(self) -> str:
        """Success under the other instructions, and its difference from success under the world's."""
        if self.found is None:
            return f"not possible: {self.refused}"
        return f"{self.found.text}, {difference_text(self._difference)} compared with the world's instructions"

    def to_json(self) -> dict[str, Any]:
        """Return the summary and the paired difference, or the reason for the refusal."""
        if self.found is None:
            return {"refused": self.refused}
        return {**self.found.summary(), "difference": self._difference}

    @property
    def _difference(self) -> Mapping[str, Any]:
        assert self.found is not None
        return compare(self.beside, self.found).to_json()


def controls_of(world: WorldSpec, asked: Sequence[str] | None) -> tuple[str, ...]:
    """Return the requested controls; for None, those that the world supports.

    Raises ConfigError for an unknown name, and for a control that the world does not support.
    """
    possible = {
        "wrong_instruction": len(world.goals) > 1,
        "paraphrase": all(world.paraphrases.get(goal) for goal in world.goals),
    }
    for name in asked or ():
        if name not in possible:
            raise ConfigError(f"There is no language control '{name}'.{did_you_mean(name, CONTROLS)}")
        if not possible[name]:
            lacks = "has one instruction" if name == "wrong_instruction" else "has no paraphrase of every instruction"
            raise ConfigError(f"evaluate.controls has {name}, but the world '{world.name}' {lacks}.")
    return tuple(name for name in possible if possible[name]) if asked is None else tuple(asked)


def evaluate_controls(
    policy: Policy,
    world: WorldSpec,
    names: Sequence[str],
    beside: EvaluationResult,
    judge: Callable[[Policy, str], EvaluationResult],
) -> dict[str, Control]:
    """Evaluate the language controls and return them by name.

    judge: function (policy, label) that evaluates a policy on the seeds of `beside`.

    A policy that does not know an instruction refuses it; the control then contains the reason.
    """
    results: dict[str, Control] = {}
    for name in names:
        controlled_policy = with_instruction(policy, CONTROLS[name], world)
        try:
            results[name] = Control(judge(controlled_policy, name.replace("_", " ")), beside)
        except SpecError as error:
            results[name] = Control(None, beside, str(error))
    return results


keep_former_names(__name__, {"judge_controls": "evaluate_controls"})
