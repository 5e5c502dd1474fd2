"""Hold actions of a robot that has no action to execute. Axes: A action element."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Callable, Mapping, Optional, TypeVar

import numpy as np

from .element_kinds import Kind, hold_behaviour, is_gripper, kind_of, kinds_of
from .errors import ConfigError, RobopolicyWarning
from .keys import HOLD
from .policy_description import DescribedPolicy
from .settings import RobotSettings

STANDARD = RobotSettings()
Settings = TypeVar("Settings", bound=RobotSettings)

Hold = Callable[[Mapping[str, np.ndarray], Optional[np.ndarray]], np.ndarray]
"""(newest frames by field, last action [A] or None) -> the action [A] that keeps the robot still."""


def with_served_hold(settings: Settings, metadata: Mapping[str, Any]) -> Settings:
    """Return the settings with `hold` taken from the served policy's world, if they leave it open and the world defines
    it.
    """
    world_entry = metadata.get("world")
    options = world_entry.get("options") if isinstance(world_entry, Mapping) else None
    hold = options.get(HOLD) if isinstance(options, Mapping) else None
    return replace(settings, hold=hold) if settings.hold == "auto" and hold in ("zero", "last") else settings


def unspecified_hold_message(names: Sequence[str]) -> str:
    """Return the error message for elements whose behaviour while the robot holds still follows from neither name nor
    unit.
    """
    listing, first = ", ".join(names), names[0]
    return (
        f"The hold action of {listing} is undefined: neither name nor unit determines it. Set "
        f"drive.positions=[{first}] to keep its position, or drive.hold_values={{{first}: 0}} to stop at 0 (a "
        f"velocity, "
        "a force, a difference); for all elements: drive.hold=last (positions) or drive.hold=zero (others)."
    )


def holding(
    settings: RobotSettings,
    names: Sequence[str],
    size: int,
    unit: str = "",
    shown: Mapping[str, Sequence[str]] | None = None,
) -> Hold:
    """Return the hold function of a robot whose actions have `size` elements with these names, () if they have none.

    Velocities, forces and toggles go to zero, or to their neutral value; positions keep their last value (see
    `hold_behaviour`). Before the first action, positions are read from the robot's element of the same name, and are
    zero without one. unit: of the action; shown: field -> names of the elements in the robot's observation. Raises
    ConfigError when settings name elements that the actions do not have.
    """
    kinds = kinds_of(names, unit) if names else [kind_of("", unit)] * size
    standing = hold_behaviour(
        kinds, names, hold=settings.hold, positions=settings.positions, neutral=settings.hold_values
    )
    keeps_mask, neutral = np.array(standing.keeps, dtype=bool), np.array(standing.neutral)
    source_of_name = {name: (field, place) for field, each in (shown or {}).items() for place, name in enumerate(each)}
    places = [
        (index, *source_of_name[name])
        for index, name in enumerate(names)
        if name in source_of_name and keeps_mask[index]
    ]

    def hold(frames: Mapping[str, np.ndarray], last: np.ndarray | None) -> np.ndarray:
        if last is not None:
            return np.where(keeps_mask, last, neutral)
        action = neutral.copy()
        for index, field, place in places:
            action[index] = frames[field].reshape(-1)[place] if field in frames else neutral[index]
        return action

    return hold


class HoldAction:
    """Hold action of a robot: given by the user, or derived from the names and units of its actions.

    hold: the action [A], a function that returns it, or None for `holding`. Warns when the user's hold keeps a velocity
    or force non-zero, or sends a position to a fixed place. Raises ConfigError when None leaves an element undefined,
    or an array does not fit the policy's actions.
    """

    def __init__(self, hold: np.ndarray | Hold | None, policy: DescribedPolicy):
        self._policy, self._warned = policy, hold is None
        self._kinds = np.array(policy.kinds, dtype=object).reshape(policy.shape)
        if hold is None:
            unknown_mask = self._kinds == Kind.UNKNOWN
            if unknown_mask.any():
                raise ConfigError(
                    f"The hold action of {policy.called(unknown_mask)} is undefined: neither name nor unit "
                    "determines it. Pass hold, the action that keeps the robot still: zeros if actions are "
                    'velocities or differences, lambda frames, last: frames["observation.state"] if they are '
                    "positions."
                )
            element_names = {name for each in policy.elements.values() for name in each}
            kinds = zip(policy.names, policy.kinds) if policy.names else ()
            hidden = [
                name
                for name, kind in kinds
                if kind is Kind.POSITION and not is_gripper(name) and name not in element_names
            ]
            if hidden:
                raise ConfigError(
                    f"No field contains the position of {', '.join(hidden)}, so the hold action is unknown before "
                    "the first action: pass hold, a function (frames, last) that returns the action which keeps the "
                    "robot still."
                )
            flat = holding(STANDARD, policy.names, len(policy.kinds), policy.unit, policy.elements)
            hold = lambda frames, last: flat(frames, None if last is None else last.reshape(-1)).reshape(policy.shape)  # noqa: E731
        self._hold = hold
        if callable(hold):
            return
        if not np.isfinite(self({}, None)).all():
            raise ConfigError(
                f"hold={hold} must be finite in every element: it is the action that keeps the robot still."
            )
        grippers = np.array([is_gripper(name) for name in policy.names or ("",) * self._kinds.size], dtype=bool)
        places = (self._kinds == Kind.POSITION) & ~grippers.reshape(policy.shape)
        if places.any() and not self._warned:
            self._warn(
                f"hold moves {policy.called(places)} to a fixed position whenever the robot is held still, because "
                "by name or unit these are positions. Remove hold, or return their present position: "
                'frames["observation.state"].'
            )

    def __call__(self, frames: Mapping[str, np.ndarray], last: np.ndarray | None) -> np.ndarray:
        """Return the action that keeps the robot still [A], after its `last` one; see `Hold`.

        Raises ConfigError when its shape differs from the policy's.
        """
        hold = self._hold
        action = np.asarray(hold(frames, last) if callable(hold) else hold, dtype=np.float64)
        if action.shape != self._policy.shape:
            raise ConfigError(
                f"hold has shape {list(action.shape)}, but the policy's actions have {list(self._policy.shape)}: it "
                "must be the action that keeps the robot still."
            )
        moving = (self._kinds == Kind.RATE) & (action != 0)
        if moving.any() and not self._warned:
            self._warn(
                f"hold keeps {self._policy.called(moving)} at {action[moving].tolist()} while the robot is held "
                "still: by name or unit these are velocities, forces or differences, so the robot would keep "
                "moving. Return 0 for them, or remove hold."
            )
        return action

    def _warn(self, text: str) -> None:
        self._warned = True
        warnings.warn(text, RobopolicyWarning, stacklevel=4)
