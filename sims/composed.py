"""Composed instructions, "A, then B": both in this order.

B counts from the step at which it becomes fulfilled after A has been: a drawer that was shut before the cube lay in its
tray must be opened and shut again. That A was fulfilled is remembered (a cube that lies in its tray need not be let go
of again while B is done). Rewards are A's until A is fulfilled, then B's. The hard tier of ImagineBench,
arXiv:2505.10010. Axes: B row, R selected rows, C chunk step.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from robopolicy.core.spec import TASK, Observation
from robopolicy.core.world import Controller, Rows, begin_episodes
from sims.task import Arrays, Task, newest

JOIN = ", then "


class Outcome(NamedTuple):
    """What the steps of a chunk led to.

    gain: [R, C] rises of the potential of the part that is pursued; success: [R, C] bool; reached: [R, C] bool, A has
    been fulfilled by the end of the step.
    """

    gain: np.ndarray
    success: np.ndarray
    reached: np.ndarray


def text_of(first: str, second: str) -> str:
    """Return the instruction to do one after the other."""
    return f"{first}{JOIN}{second}"


def in_order(first: np.ndarray, second: np.ndarray, reached: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return success [R, C] bool, and whether A has been fulfilled by the end of each step, [R, C] bool.

    first, second: [R, C + 1] bool, whether A and B are fulfilled in the frame before the chunk and after each of its
    steps; reached: [R] bool, A has been fulfilled before the chunk.
    """
    by_end = reached[:, None] | np.logical_or.accumulate(first[:, 1:], axis=1)
    by_begin = np.concatenate([reached[:, None], by_end[:, :-1]], axis=1)
    return by_begin & second[:, 1:] & ~second[:, :-1], by_end


def outcome_of(task: Task, frames: Arrays, first: np.ndarray, second: np.ndarray, reached: np.ndarray) -> Outcome:
    """Judge a chunk.

    frames: key -> [R, C + 1, *shape], the frame before the chunk, then those of its steps; first, second: plain
    instructions A and B, [R] texts; reached: as in `in_order`.
    """
    parts = [{**frames, TASK: text[:, None]} for text in (first, second)]
    success, by_end = in_order(task.succeeded(parts[0]), task.succeeded(parts[1]), reached)
    gains = [np.diff(task.potential(part).astype(np.float64), axis=1) for part in parts]
    by_begin = np.concatenate([reached[:, None], by_end[:, :-1]], axis=1)
    return Outcome(np.where(by_begin, gains[1], gains[0]), success, by_end)


class FollowsInOrder:
    """A controller for plain instructions that also follows composed ones: it is given A until A is fulfilled, then B.

    Other texts reach the controller unchanged.
    """

    def __init__(self, controller: Controller, task: Task):
        self.controller, self.task = controller, task
        self._parts = {text_of(*pair): pair for pair in task.compositions}
        self._reached = np.zeros(0, dtype=bool)

    def reset(self, rows: Rows = None) -> None:
        """Begin new episodes in `rows` [R], or in all when None."""
        self.controller.reset(rows)
        if rows is None:
            self._reached = np.zeros(0, dtype=bool)
        elif len(self._reached):
            self._reached[rows] = False

    def begin(self, seeds: np.ndarray, rows: Rows = None) -> None:
        """Pass the seeds [R] of the episodes in `rows` [R] to the controller, if it accepts them."""
        begin_episodes(self.controller, seeds, rows)

    def act(self, observation: Observation) -> np.ndarray:
        """Return actions [B, A] for an observation [B, H, ...] with texts `task` [B]."""
        texts = [str(text) for text in observation[TASK]]
        if len(self._reached) != len(texts):
            self._reached = np.zeros(len(texts), dtype=bool)
        composed = np.array([text in self._parts for text in texts])
        if composed.any():
            first = np.array([self._parts[text][0] if text in self._parts else text for text in texts])
            frame: Mapping[str, np.ndarray] = {key: newest(observation, key) for key in self.task.observation}
            rows = np.flatnonzero(composed)
            fulfilled = self.task.succeeded({**{key: value[rows] for key, value in frame.items()}, TASK: first[rows]})
            self._reached[rows] |= fulfilled
            second = np.array([self._parts[text][1] if text in self._parts else text for text in texts])
            texts = np.where(self._reached, second, first)
        return self.controller.act({**observation, TASK: np.asarray(texts)})
