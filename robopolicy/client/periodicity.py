"""Periodic angles and on/off elements of an action, which must not be interpolated linearly.

Halfway between a yaw of -3.1 and 3.1 rad is 3.14, not 0; halfway between an open and a closed gripper is no valid
command. Names, units and bounds identify such elements; angle differences are taken along the shorter arc. Works on
numpy arrays and torch tensors. Axes: A action element.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from .element_kinds import Kind, is_gripper, is_position_unit, kind_of, unit_of
from .errors import ConfigError, did_you_mean

_GOES_ROUND = re.compile(
    r"yaw|heading|azimuth|bearing|compass|theta(?![._]?\d)|euler|(^|[._])rpy"
    r"|(^|[._])(eef?|tcp|tool|end_?effector|flange)([._]\w+)*[._](roll|rx|rz)$",
    re.IGNORECASE,
)
"""Names of unbounded angles. A joint angle such as wrist_roll is bounded unless its bounds span a full turn."""

_SWITCHES = re.compile(r"suction|vacuum|pump|valve|magnet|solenoid", re.IGNORECASE)
"""Names of tools that are either on or off."""

_ANGLE = re.compile(r"yaw|heading|azimuth|bearing|compass|theta|angle|roll|pitch|rotation|orientation", re.IGNORECASE)

_QUATERNION = re.compile(r"quat|(^|[._])q[wxyz]$", re.IGNORECASE)
"""q and -q are the same rotation, and values between them are not rotations."""

_DEGREES, _RADIANS = re.compile(r"(?i:deg|degrees?|°)"), re.compile(r"(?i:rad|radians?)")


class NamedElements(Protocol):
    """An action, such as a `Field`: bounds are numbers, or one for each element."""

    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def low(self) -> Any: ...  # noqa: D102
    @property
    def high(self) -> Any: ...  # noqa: D102
    @property
    def unit(self) -> str: ...  # noqa: D102
    @property
    def names(self) -> tuple[str, ...]: ...  # noqa: D102


@dataclass(frozen=True)
class Periodicity:
    """Periodicity of the elements of an action, all [A]; `like` converts to tensors.

    period: length of one turn, 0 for non-periodic elements; bounded, low: period and lower bound of elements whose
    bounds define where a turn starts, else 0; at_once: bool, whether an element switches between discrete values.
    """

    period: Any
    bounded: Any
    low: Any
    at_once: Any

    def like(self, tensor: Any) -> Periodicity:
        """Return the same values as tensors, with the device and dtype of `tensor`."""
        return Periodicity(
            *(tensor.new_tensor(each.tolist()) for each in (self.period, self.bounded, self.low, self.at_once))
        )

    def shortest(self, difference: Any) -> Any:
        """Wrap differences [..., A] of two actions to the shorter arc."""
        return difference - self.period * ((difference / (self.period + (self.period == 0)) + 0.5) // 1)

    def within(self, values: Any) -> Any:
        """Wrap values [..., A] of periodic elements with bounds into [low, low + period]."""
        fraction = (values - self.low) / (self.bounded + (self.bounded == 0))
        return values - self.bounded * ((fraction < 0) | (fraction > 1)) * (fraction // 1)


def periodicity_of(
    action: NamedElements, turns: Mapping[str, float] | None = None, switches: Sequence[str] = ()
) -> Periodicity:
    """Infer the periodicity of the elements of an action from their names, units and bounds.

    turns: name -> its period, 0 for an element that is neither periodic nor switches; switches: names of elements that
    switch. Raises ConfigError on an unknown element.
    """
    periods = dict(turns or {})
    for setting, names in (("periods", periods), ("unblended", switches)):
        if unknown_names := [name for name in names if name not in action.names]:
            hint = (
                did_you_mean(unknown_names[0], action.names)
                or " The action's elements have no names, so none can be selected here."
            )
            raise ConfigError(f"{setting} contains '{unknown_names[0]}', which is not an element of the action.{hint}")
    units = unit_of(action.unit, action.names)
    size = int(np.prod(action.shape))
    low, high = (np.broadcast_to(np.ravel(bound).astype(np.float64), size) for bound in (action.low, action.high))
    period, at_once = np.zeros(size), np.zeros(size, dtype=bool)
    for place, name in enumerate(action.names):
        if name in periods or name in switches:
            period[place], at_once[place] = periods.get(name, 0.0), name in switches
        else:
            period[place], at_once[place] = _turn(name, units.get(name, ""), low[place], high[place])
    bounded = np.where(np.isfinite(low) & np.isfinite(high), period, 0.0)
    low = np.where(bounded > 0, low, 0.0)
    return Periodicity(*(each.reshape(action.shape) for each in (period, bounded, low, at_once)))


def _turn(name: str, unit: str, low: float, high: float) -> tuple[float, bool]:
    """Return an element's period (0 for none) and whether it switches."""
    kind = kind_of(name, unit)
    if kind is Kind.RATE:
        return 0.0, False
    switches = is_gripper(name) or _SWITCHES.search(name)
    if kind is Kind.TOGGLE or _QUATERNION.search(name) or (switches and not is_position_unit(unit)):
        return 0.0, True
    turn = 360.0 if _DEGREES.fullmatch(unit) else 2 * math.pi if _RADIANS.fullmatch(unit) else 0.0
    endless = (turn, not turn) if _GOES_ROUND.search(name) else (0.0, False)
    if not (math.isfinite(low) and math.isfinite(high)):
        return endless
    for full_turn in (turn,) if turn else () if unit else (2 * math.pi, 360.0):
        if abs(high - low - full_turn) < 0.02 * full_turn and (turn or _ANGLE.search(name)):
            return full_turn, False
    return endless if high - low > (turn or 2 * math.pi) else (0.0, False)
