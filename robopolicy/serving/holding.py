"""What a robot does that has nothing to do. Axes: A action element."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from robopolicy.core.errors import ConfigError
from robopolicy.core.holding import keeps_value
from robopolicy.core.narrowing import is_mapping
from robopolicy.core.spec import HOLD
from robopolicy.serving.configuration import RobotSettings

type Hold = Callable[[Mapping[str, np.ndarray], np.ndarray | None], np.ndarray]
"""(newest frames by field, last action [A] or None) -> the action [A] that keeps the robot still."""


def as_served(settings: RobotSettings, metadata: Mapping[str, Any]) -> RobotSettings:
    """Return settings whose hold is that of the world which a server's policy comes from, where they leave it open."""
    if settings.hold != "auto":
        return settings
    said = metadata.get("world")
    options = said.get("options") if is_mapping(said) else None
    positions = is_mapping(options) and options.get(HOLD) == "last"
    return replace(settings, hold="last" if positions else "zero")


def holding(settings: RobotSettings, names: Sequence[str], size: int) -> Hold:
    """Return what holds a robot still whose actions have `size` elements with these names, () where they have none.

    That is no motion, but for elements that are positions, or its last action (`keeps_value`); no motion where it has
    not done anything yet. Raises ConfigError where positions name other elements than the actions have.
    """
    kept = np.array(keeps_value(settings.hold, settings.positions, names, size))

    def hold(_: Mapping[str, np.ndarray], last: np.ndarray | None) -> np.ndarray:
        return np.zeros(size) if last is None else np.where(kept, last, 0.0)

    return hold


def stillness(
    hold: np.ndarray | Hold, frames: Mapping[str, np.ndarray], last: np.ndarray | None, shape: tuple[int, ...]
) -> np.ndarray:
    """Return the action that keeps a robot still [A], of `shape`, after its `last` one.

    hold: that action, or what returns it. Raises ConfigError where it has another shape.
    """
    action = np.asarray(hold(frames, last) if callable(hold) else hold, dtype=np.float64)
    if action.shape != shape:
        raise ConfigError(
            f"hold has shape {list(action.shape)}, and the policy's actions have {list(shape)}: it is the action that "
            "keeps the robot still."
        )
    return action
