"""Instructions of a world and their wording: held-out instructions and paraphrases.

A task's functions use its plain instructions (`Task.instructions`). A world may give paraphrases (`Task.paraphrases`).
`InstructionSet` maps each of its texts to an instruction and samples one from an episode's seed.
`WithPlainInstructions` lets an expert that knows only the plain instructions act under any of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from robopolicy.core.errors import ConfigError, did_you_mean
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.spec import TASK, Observation
from robopolicy.core.world import Controller, Rows, begin_episodes
from sims.composed import text_of
from sims.task import Task

TRAINING = "training"
HELD_OUT = "held_out"
ALL = "all"
COMPOSED = "composed"
PLAIN, PARAPHRASED = "plain", "paraphrased"
INSTRUCTIONS, PHRASINGS = (TRAINING, HELD_OUT, ALL, COMPOSED), (PLAIN, PARAPHRASED, ALL)


@dataclass(frozen=True)
class InstructionSet:
    """Texts of a world's instructions.

    texts: [T]; goals: for each text, the index of the task's instruction with the same meaning, [T]; plain: the task's
    own instructions [G]; then: for composed texts, the index of the instruction that comes second, [T]; plain_share:
    fraction of episodes in the first wording of their instruction, None for equal fractions of all.
    """

    texts: tuple[str, ...]
    goals: np.ndarray
    plain: tuple[str, ...]
    then: np.ndarray | None = None
    plain_share: float | None = None

    def meant(self, text: np.ndarray) -> np.ndarray:
        """Return the plain instructions, [...] str, of texts given by index [...] int."""
        return np.asarray(self.plain)[self.goals[text]]

    def meant_second(self, text: np.ndarray) -> np.ndarray:
        """Return the plain instructions, [...] str, that come second in composed texts given by index [...] int."""
        assert self.then is not None
        return np.asarray(self.plain)[self.then[text]]

    def drawn(self, goal: np.ndarray | None, numbers: np.ndarray) -> np.ndarray:
        """Sample text indices [R] from numbers [R, 2] in [0, 1): first the instruction, then its wording.

        goal: [R] instructions sampled by the task itself, as indices; used where this world offers them.
        """
        if self.then is not None:
            return (numbers[:, 0] * len(self.texts)).astype(np.int64)
        goals = np.unique(self.goals)
        goal_of_row = goals[(numbers[:, 0] * len(goals)).astype(np.int64)]
        if goal is not None:
            goal_of_row = np.where(np.isin(goal, goals), goal, goal_of_row)
        has_goal = self.goals[None] == goal_of_row[:, None]
        counts = has_goal.sum(axis=1)
        place = (numbers[:, 1] * counts).astype(np.int64)
        if self.plain_share is not None:
            other = (numbers[:, 1] - self.plain_share) / max(1 - self.plain_share, 1e-12)
            is_plain = (other < 0) | (counts == 1)
            place = np.where(is_plain, 0, np.minimum(1 + (other * (counts - 1)).astype(np.int64), counts - 1))
        return np.argmax(has_goal.cumsum(axis=1) > place[:, None], axis=1)


def instruction_set(
    task: Task, instructions: str = TRAINING, phrasing: str = PLAIN, plain_share: float | None = None
) -> InstructionSet:
    """Return the texts of a world of `task`.

    instructions: the training ones, the held-out ones, all, two in a row (`Task.compositions`), or those that a pattern
    matches (as file names: "push the red*"); phrasing: plain, paraphrases, or both, of which the plain one in
    `plain_share` of the episodes (None: each equally often). Raises ConfigError on other names, when there is nothing
    of that kind, and on a task with inconsistent texts.
    """
    patterned = any(fnmatchcase(text, instructions) for text in task.instructions)
    if not patterned:
        _require_known("instructions", instructions, INSTRUCTIONS, " or a pattern that matches an instruction")
    _require_known("phrasing", phrasing, PHRASINGS)
    if plain_share is not None and (phrasing != ALL or not 0 <= plain_share <= 1):
        raise ConfigError(f"plain_share={plain_share} is a fraction of episodes, in [0, 1], with phrasing={ALL}.")
    require_consistent(task)
    if instructions == COMPOSED:
        return _composed(task, phrasing)

    def is_wanted(text: str) -> bool:
        if patterned:
            return fnmatchcase(text, instructions)
        return instructions == ALL or (text in task.held_out) == (instructions == HELD_OUT)

    indices = [index for index, text in enumerate(task.instructions) if is_wanted(text)]
    if not indices:
        raise ConfigError(f"instructions={instructions}: '{task.name}' has none of these (`Task.held_out`).")
    texts: list[str] = []
    goals: list[int] = []
    for index in indices:
        wording_of_goal = task.instructions[index]
        paraphrases = task.paraphrases.get(wording_of_goal, ())
        if phrasing != PLAIN and not paraphrases:
            raise ConfigError(
                f"phrasing={phrasing}: '{task.name}' has no paraphrase of '{wording_of_goal}' (`Task.paraphrases`)."
            )
        wordings = {PLAIN: (wording_of_goal,), PARAPHRASED: tuple(paraphrases), ALL: (wording_of_goal, *paraphrases)}[
            phrasing
        ]
        texts += wordings
        goals += [index] * len(wordings)
    return InstructionSet(tuple(texts), np.array(goals), task.instructions, plain_share=plain_share)


def _composed(task: Task, phrasing: str) -> InstructionSet:
    """Return the texts of a world that asks for two instructions in a row."""
    if not task.compositions or phrasing != PLAIN:
        missing = f"paraphrases of compositions (phrasing={phrasing})" if task.compositions else "compositions"
        raise ConfigError(f"instructions={COMPOSED}: '{task.name}' has no {missing} (`Task.compositions`).")
    first, second = (
        np.array([task.instructions.index(text) for text in part]) for part in zip(*task.compositions, strict=True)
    )
    return InstructionSet(tuple(text_of(*pair) for pair in task.compositions), first, task.instructions, second)


def require_consistent(task: Task) -> None:
    """Raise ConfigError unless all held-out, paraphrased or composed texts are instructions and every text has one
    meaning.
    """
    composed = [text for pair in task.compositions for text in pair]
    for attribute, listed_texts in (
        ("held_out", task.held_out),
        ("paraphrases", task.paraphrases),
        ("compositions", composed),
    ):
        for text in listed_texts:
            if text not in task.instructions:
                raise ConfigError(
                    f"Task '{task.name}': {attribute} contains '{text}', which is not one of its instructions."
                )
    texts = [*task.instructions, *(text for paraphrases in task.paraphrases.values() for text in paraphrases)]
    duplicates = sorted({text for text in texts if texts.count(text) > 1})
    if duplicates:
        raise ConfigError(
            f"Task '{task.name}' uses the paraphrase '{duplicates[0]}' for two instructions: every paraphrase needs "
            "one meaning."
        )


class WithPlainInstructions:
    """A controller that receives the plain instruction behind an observation's `task`."""

    def __init__(self, controller: Controller, paraphrases: Mapping[str, Sequence[str]]):
        self.controller = controller
        self._plain = {text: plain_text for plain_text, wordings in paraphrases.items() for text in wordings}

    def reset(self, rows: Rows = None) -> None:
        """Reset the controller for `rows` [R], or for all when None."""
        self.controller.reset(rows)

    def begin(self, seeds: np.ndarray, rows: Rows = None) -> None:
        """Pass the seeds [R] of the episodes in `rows` [R] to the controller, if it accepts them."""
        begin_episodes(self.controller, seeds, rows)

    def act(self, observation: Observation) -> np.ndarray:
        """Return actions [B, A] for an observation [B, H, ...] with texts `task` [B] in any wording."""
        texts = [str(text) for text in observation[TASK]]
        return self.controller.act({**observation, TASK: np.array([self._plain.get(text, text) for text in texts])})


def _require_known(option: str, value: str, known: Sequence[str], otherwise: str = "") -> None:
    if value not in known:
        raise ConfigError(
            f"{option}={value!r} must be one of {', '.join(known)}{otherwise}.{did_you_mean(value, known)}"
        )


keep_former_names(
    __name__, {"Wording": "InstructionSet", "wording": "instruction_set", "InPlainWords": "WithPlainInstructions"}
)
