"""Which instructions a world gives, and in which words: what is held out of training, and paraphrases.

A task judges in its own, plain words (`Task.instructions`). A world may say the same in others (`Task.paraphrases`):
`Wording` knows what each of its texts means, draws one from an episode's seed, and `InPlainWords` lets an expert that
knows the plain words alone act under any of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from robopolicy.core.errors import ConfigError, did_you_mean
from robopolicy.core.spec import TASK, Observation
from robopolicy.core.world import Controller, Rows, begin_episodes
from sims.task import Task

TRAINING = "training"
HELD_OUT = "held_out"
ALL = "all"
PLAIN, PARAPHRASED = "plain", "paraphrased"
INSTRUCTIONS, PHRASINGS = (TRAINING, HELD_OUT, ALL), (PLAIN, PARAPHRASED, ALL)


@dataclass(frozen=True)
class Wording:
    """What a world says: texts [T]; goals: [T] which of the task's instructions each means; plain: the latter [G]."""

    texts: tuple[str, ...]
    goals: np.ndarray
    plain: tuple[str, ...]

    def meant(self, text: np.ndarray) -> np.ndarray:
        """Return the plain words, [...] str, of texts given by index [...] int."""
        return np.asarray(self.plain)[self.goals[text]]

    def drawn(self, goal: np.ndarray | None, numbers: np.ndarray) -> np.ndarray:
        """Return texts [R] by index, from numbers [R, 2] in [0, 1): first what is to be done, then how it is said.

        goal: [R] what the task itself drew, index into its instructions; kept wherever this world gives it.
        """
        given = np.unique(self.goals)
        chosen = given[(numbers[:, 0] * len(given)).astype(np.int64)]
        if goal is not None:
            chosen = np.where(np.isin(goal, given), goal, chosen)
        spoken = self.goals[None] == chosen[:, None]
        place = (numbers[:, 1] * spoken.sum(axis=1)).astype(np.int64)
        return np.argmax(spoken.cumsum(axis=1) > place[:, None], axis=1)


def wording(task: Task, instructions: str = TRAINING, phrasing: str = PLAIN) -> Wording:
    """Return what a world of `task` says.

    instructions: those for training, the held-out ones, or all; phrasing: in plain words, in paraphrases, or in both.
    Raises ConfigError on other names, where there is nothing of that kind, and on a task whose texts are at odds.
    """
    _require_known("instructions", instructions, INSTRUCTIONS)
    _require_known("phrasing", phrasing, PHRASINGS)
    require_consistent(task)
    wanted = [
        index
        for index, text in enumerate(task.instructions)
        if instructions == ALL or (text in task.held_out) == (instructions == HELD_OUT)
    ]
    if not wanted:
        raise ConfigError(f"instructions={instructions}: '{task.name}' has none of these (`Task.held_out`).")
    texts: list[str] = []
    goals: list[int] = []
    for index in wanted:
        plain = task.instructions[index]
        others = task.paraphrases.get(plain, ())
        if phrasing != PLAIN and not others:
            raise ConfigError(
                f"phrasing={phrasing}: '{task.name}' has no paraphrase of '{plain}' (`Task.paraphrases`)."
            )
        said = {PLAIN: (plain,), PARAPHRASED: tuple(others), ALL: (plain, *others)}[phrasing]
        texts += said
        goals += [index] * len(said)
    return Wording(tuple(texts), np.array(goals), task.instructions)


def require_consistent(task: Task) -> None:
    """Raise ConfigError unless what is held out or paraphrased is an instruction, and every text means one thing."""
    for what, named in (("held_out", task.held_out), ("paraphrases", task.paraphrases)):
        for text in named:
            if text not in task.instructions:
                raise ConfigError(f"Task '{task.name}': {what} names '{text}', which is no instruction of it.")
    texts = [*task.instructions, *(text for others in task.paraphrases.values() for text in others)]
    twice = sorted({text for text in texts if texts.count(text) > 1})
    if twice:
        raise ConfigError(f"Task '{task.name}' says '{twice[0]}' for two things: give every paraphrase one meaning.")


class InPlainWords:
    """A controller that is told the plain words of what an observation's `task` means."""

    def __init__(self, controller: Controller, paraphrases: Mapping[str, Sequence[str]]):
        self.controller = controller
        self._plain = {text: plain for plain, others in paraphrases.items() for text in others}

    def reset(self, rows: Rows = None) -> None:
        """Let the controller forget `rows` [R], all of them for None."""
        self.controller.reset(rows)

    def begin(self, seeds: np.ndarray, rows: Rows = None) -> None:
        """Give the controller the seeds [R] of the episodes in `rows` [R], if it wants them."""
        begin_episodes(self.controller, seeds, rows)

    def act(self, observation: Observation) -> np.ndarray:
        """Return actions [B, A] for an observation [B, H, ...] with texts `task` [B] in any words."""
        texts = [str(text) for text in observation[TASK]]
        return self.controller.act({**observation, TASK: np.array([self._plain.get(text, text) for text in texts])})


def _require_known(option: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigError(f"{option}={value!r} is none of {', '.join(known)}.{did_you_mean(value, known)}")
