"""Does a policy listen? Judge it under other words than the world's: one that ignores them does not notice.

Two controls: told to do something else than the world judges, a policy that listens fails; told the same in other
words, one that understands succeeds as before. Both are judged on the starts of the policy's own judgement.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from robopolicy.core.errors import ConfigError, SpecError, did_you_mean
from robopolicy.core.policy import Decision, Policy, TensorObservation
from robopolicy.core.spec import TASK, PolicySpec, WorldSpec
from robopolicy.core.world import Rows
from robopolicy.evaluation.success import EvaluationResult, compare
from robopolicy.evaluation.tables import difference_text

WRONG, PARAPHRASE = "wrong", "paraphrase"
CONTROLS = {"wrong_instruction": WRONG, "paraphrase": PARAPHRASE}
"""Controls by name, and what the policy is told in them."""


class OtherInstruction:
    """A policy that reads `text` in every row instead of the world's instruction.

    text: an instruction; "wrong" for another one of the world's than it is judged by, the next ones in turn from row to
    row; or "paraphrase" for other words for the same, in turn as well. world: whose instructions and paraphrases these
    are. Raises ConfigError where the world has only one instruction, or no paraphrase of one.
    """

    def __init__(self, policy: Policy, text: str, world: WorldSpec):
        self.policy = policy
        self.text = text
        self.world = world
        if text == WRONG and len(world.goals) < 2:
            raise ConfigError("instruction=wrong needs a world with several instructions; this one has one.")
        lacking = [goal for goal in world.goals if not world.paraphrases.get(goal)]
        if text == PARAPHRASE and lacking:
            raise ConfigError(f"instruction=paraphrase: '{world.name}' has no other words for '{lacking[0]}'.")

    @property
    def spec(self) -> PolicySpec:
        """The policy's."""
        return self.policy.spec

    def act(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Decision:
        """Decide under the other instruction; see `Policy.act`."""
        texts = cast(list[str], observation[TASK])
        told = [self._told(str(text), row) for row, text in enumerate(texts)]
        return self.policy.act({**observation, TASK: told}, generator, deterministic=deterministic)

    def reset(self, rows: Rows = None) -> None:
        """Reset the policy."""
        self.policy.reset(rows)

    def _told(self, text: str, row: int) -> str:
        """Return what the policy is told in a row, where the world says `text`."""
        goals, plain = self.world.goals, self.world.meaning(text)
        if self.text == WRONG:
            other = goals[(goals.index(plain) + 1 + row % (len(goals) - 1)) % len(goals)]
            said = [each for each in self.world.instructions if self.world.meaning(each) == other]
            return said[row % len(said)]
        if self.text == PARAPHRASE:
            others = [other for other in self.world.paraphrases[plain] if other != text] or [text]
            return others[row % len(others)]
        return self.text


def with_instruction(policy: Policy, text: str, world: WorldSpec) -> Policy:
    """Return `policy` as it is for the text "", else one that is told `text`; see `OtherInstruction`."""
    return OtherInstruction(policy, text, world) if text else policy


@dataclass(frozen=True)
class Control:
    """A policy judged under other words, beside its judgement under the world's; refused: why it would not read them.

    found: None where it refused.
    """

    found: EvaluationResult | None
    beside: EvaluationResult
    refused: str = ""

    @property
    def text(self) -> str:
        """The success under other words, and how far that is from the success under the world's."""
        if self.found is None:
            return f"refused: {self.refused}"
        return f"{self.found.text}, {difference_text(self._difference)} beside the world's words"

    def to_json(self) -> dict[str, Any]:
        """Return the summary and the paired difference, or why there is none."""
        if self.found is None:
            return {"refused": self.refused}
        return {**self.found.summary(), "difference": self._difference}

    @property
    def _difference(self) -> Mapping[str, Any]:
        assert self.found is not None
        return compare(self.beside, self.found).to_json()


def controls_of(world: WorldSpec, asked: Sequence[str] | None) -> tuple[str, ...]:
    """Return the controls asked for; for None, those that the world has.

    Raises ConfigError for an unknown name, and for one that the world cannot have.
    """
    possible = {
        "wrong_instruction": len(world.goals) > 1,
        "paraphrase": all(world.paraphrases.get(goal) for goal in world.goals),
    }
    for name in asked or ():
        if name not in possible:
            raise ConfigError(f"There is no control '{name}'.{did_you_mean(name, CONTROLS)}")
        if not possible[name]:
            lacks = "has one instruction" if name == "wrong_instruction" else "has no paraphrase of every instruction"
            raise ConfigError(f"evaluate.controls has {name}, but the world '{world.name}' {lacks}.")
    return tuple(name for name in possible if possible[name]) if asked is None else tuple(asked)


def judge_controls(
    policy: Policy,
    world: WorldSpec,
    names: Sequence[str],
    beside: EvaluationResult,
    judge: Callable[[Policy, str], EvaluationResult],
) -> dict[str, Control]:
    """Return the controls by name; judge: plays the given policy on the seeds of `beside`, under a label.

    A policy that does not know the words refuses them: that is what the control then says.
    """
    found: dict[str, Control] = {}
    for name in names:
        told = with_instruction(policy, CONTROLS[name], world)
        try:
            found[name] = Control(judge(told, name.replace("_", " ")), beside)
        except SpecError as error:
            found[name] = Control(None, beside, str(error))
    return found
