"""Smoothness of the actions passed to the world: differences of consecutive actions, and jumps at chunk boundaries.

Values are in the world's action units: jumps per control step, second differences per step^2, jerk per step^3. They are
averaged over steps and action dimensions, whatever the units of each. Axes: B row, C
chunk step, T control step, A action dimension.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from robopolicy.client.periodicity import periodicity_of
from robopolicy.core.arrays import Array
from robopolicy.core.player import PlayedStep
from robopolicy.core.spec import Field


@dataclass(frozen=True)
class Smoothness:
    """Mean roughness over all episodes (lower is smoother); NaN for values that could not be measured.

    second_difference, jerk: mean |second| and |third difference| of consecutive actions; border_jump, inner_jump: mean
    |a_t - a_(t-1)| at chunk boundaries, and elsewhere; borders: number of boundaries counted, over all rows and
    episodes.
    """

    second_difference: float
    jerk: float
    border_jump: float
    inner_jump: float
    borders: int

    @property
    def text(self) -> str:
        """One-line summary."""
        return ", ".join(f"{name} {value}" for name, value in self.told(self.to_json()).items())

    @staticmethod
    def told(figures: Mapping[str, Any]) -> dict[str, str]:
        """Return a `to_json` dictionary, perhaps of a saved result, with labels as keys and without missing values."""
        figure_of = {
            f"jump at {figures['borders']:,} chunk borders": figures["border_jump"],
            "elsewhere": figures["inner_jump"],
            "second difference": figures["second_difference"],
            "jerk": figures["jerk"],
        }
        return {name: f"{value:.4f}" for name, value in figure_of.items() if value is not None}

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary, null for NaN."""
        return {name: None if value != value else value for name, value in self.__dict__.items()}


class SmoothnessMeter:
    """Measures smoothness while episodes are played (`evaluation.waves.play_episode_batch`).

    seams: positions in each chunk where another chunk takes over; start: control steps at the beginning of an episode
    whose jumps are not counted, since the robot starts to move (second differences and jerk count from the first);
    action: field of the executed actions, whose periodic elements (see `core.turns`) use the shorter difference; None:
    no element is treated as periodic.
    """

    def __init__(self, seams: tuple[int, ...] = (0,), start: int = 0, action: Field | None = None):
        self.seams, self.start = seams, start
        self._turns = None if action is None else periodicity_of(action)
        self._parts: list[tuple[Array, Array, Array]] = []
        self._sums = {name: [0.0, 0] for name in ("second_difference", "jerk", "border_jump", "inner_jump")}

    def __call__(self, played: PlayedStep[object] | None) -> None:
        """Add the executed actions of a chunk; None when new episodes start in all rows."""
        if played is None:
            self._close()
            return
        steps = played.actions.shape[1]
        border = np.isin(np.arange(steps), self.seams)
        self._parts.append((played.actions, played.step.valid & played.running[:, None], border))

    def measured(self) -> Smoothness:
        """Return the smoothness of all actions added so far."""
        self._close()
        means = {name: total / count if count else float("nan") for name, (total, count) in self._sums.items()}
        return Smoothness(**means, borders=int(self._sums["border_jump"][1]))

    def _close(self) -> None:
        """Add the differences within the episodes since the last start."""
        if not self._parts:
            return
        # `border` is [T] for all rows, the others [B, T, ...].
        actions, valid, border = (
            np.concatenate(part, -1 if part[0].ndim == 1 else 1) for part in zip(*self._parts, strict=True)
        )
        self._parts = []
        actions = actions.reshape(*actions.shape[:2], -1)
        jumps = np.diff(actions, axis=1)
        if self._turns is not None:
            jumps = self._turns.shortest(jumps.reshape(*jumps.shape[:2], *self._turns.period.shape)).reshape(
                jumps.shape
            )
        for order, name in ((2, "second_difference"), (3, "jerk")):
            # Valid steps come first in each row: if the last step of a difference is valid, so are its earlier ones.
            self._add(name, np.diff(jumps, order - 1, axis=1), valid[:, order:])
        is_counted = np.arange(1, len(border)) > self.start
        self._add("border_jump", jumps, valid[:, 1:] & border[1:] & is_counted)
        self._add("inner_jump", jumps, valid[:, 1:] & ~border[1:] & is_counted)

    def _add(self, name: str, differences: Array, counted: Array) -> None:
        """Add differences to the sums. differences: [B, T, A]; counted: [B, T] bool."""
        values = np.abs(differences[counted])
        self._sums[name][0] += float(values.mean(-1).sum()) if len(values) else 0.0
        self._sums[name][1] += len(values)
