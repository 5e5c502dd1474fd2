"""Hold action of a robot at rest: which action elements keep their value and which go to zero.

A position element keeps its value at rest. A velocity, torque, force, current, difference or toggle must be zero at
rest: repeating its value would keep moving the robot. The kind follows from an element's name and unit (`kind_of`),
otherwise from a setting. This module does not import numpy, so that help stays fast. Axes: A action element.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from .errors import ConfigError, did_you_mean

POSITIONS = ("gripper",)
"""Action elements that keep their value at rest by default: every gripper."""


class Kind(Enum):
    """Kind of an action element, inferred from its name and unit."""

    POSITION = "a position"
    RATE = "a velocity, force or difference"
    TOGGLE = "a toggle"
    UNKNOWN = "unknown"


_WORDS = {
    "rate": re.compile(
        r"(?!(swi|le|tra|be|sho|gra)vels?$).*(velocity|vel|speed|torque|effort|dot|rpm)|(velocitie|rate|torque|effort|force|moment|current|volt|voltage|amp"
        r"|ampere|acceleration|accel)s?|v|v(x|y|z|theta|yaw)|omega|twist|dq|qd|tau|wrench|pwm|duty|power|thrust|throttle"
        r"|jerk|momentum|remote|joystick"
    ),
    "difference": re.compile(
        r"(delta|diff|difference|change|increment|residual|correction)s?|rel|relative"
        r"|d(x|y|z|rx|ry|rz|rot|pos|ori|theta|roll|pitch|yaw|gripper)"
    ),
    "toggle": re.compile(r"toggles?|switch(es)?|buttons?|enabled?|trigger"),
    "place": re.compile(r".*(pos|position|angle)s?|q|pose|orientation|quat|quaternion|heading|height|width|opening"),
}
"""Word pattern -> kind of element."""

_BEFORE_A_PLACE = {"current", "twist", "power", "remote", "v"}
"""Rate words without meaning in front of a position word: `current_position`, `wrist_twist.pos`."""

_RATE_UNIT = re.compile(
    r"/\s*(s|sec|second|min|minute|h|hour|step|frame|tick|cycle|sample)(?![A-Za-z])|s\s?(\^?-|⁻)[12¹²]"
    r"|(?<![A-Za-z])([kmMuµ]?(N([\s·*.-]?m)?|A|V|W|Pa|Hz)|lbf|kgf|psi|bar|rpm)(?![A-Za-z])"
    r"|(?i:(?<![a-z])(per[ _](s|sec|second|minute|hour|step|frame|tick|cycle)|newtons?|amp(ere)?s?|volts?|watts?|hertz"
    r"|rpm|[mk]ps|[mk]ph|kmh|knots?|speed|torque|force|velocity)(?![a-z]))"
)
_DIFFERENCE_UNIT = re.compile(r"(?i:\b(moves?|delta|difference|change|relative)\b)")
_TOGGLE_UNIT = re.compile(r"(?i:\b(on/off|on or off|bool(ean)?|binary|0 or 1)\b)")
_PLACE_UNIT = re.compile(r"(?i:[mcµk]?m|met(er|re)s?|m?rad|radians?|deg|degrees?|°|rev|turns?|ticks?)")


def unit_of(unit: str, names: Sequence[str]) -> dict[str, str]:
    """Return name -> unit for the elements of a field to which its unit text can be assigned.

    unit: one for all elements ("rad"), one for each ("rad, m/s"), or by name ("x, y: m; gripper: 0 to 1").
    """
    if ":" in unit:
        groups = (part.partition(":") for part in unit.split(";"))
        each = {name.strip(): text.strip() for head, _, text in groups for name in head.split(",")}
        return {name: each[name] for name in names if name in each}
    parts = [part.strip() for part in unit.split(",")]
    if len(parts) == len(names):
        return dict(zip(names, parts))
    return dict.fromkeys(names, parts[0]) if len(parts) == 1 else {}


def kind_of(names: str | Sequence[str], unit: str = "", *, shown: bool = False) -> Kind:
    """Infer the kind of an action element from its name and unit; UNKNOWN if neither determines it or they contradict
    each other.

    names: its name, or its names on the robot and in the policy; shown: whether the robot's state has an element of the
    same name, so that rad or m means a position and not a difference.
    """
    name_kinds = {_by_name(name) for name in ([names] if isinstance(names, str) else names)}
    by_unit = _by_unit(unit)
    if "unclear" in name_kinds:
        return Kind.RATE if by_unit in ("rate", "difference") else Kind.UNKNOWN
    rate = bool({"rate", "difference"} & {*name_kinds, by_unit})
    place = "place" in name_kinds or (
        by_unit == "place" and "difference" not in name_kinds and (shown or name_kinds != {""})
    )
    if rate and place:
        return Kind.UNKNOWN
    if rate:
        return Kind.RATE
    if place or "gripper" in name_kinds:
        return Kind.POSITION
    return Kind.TOGGLE if "toggle" in {*name_kinds, by_unit} else Kind.UNKNOWN


def is_gripper(name: str) -> bool:
    """Whether a name identifies a gripper without saying which quantity of it."""
    return _by_name(name) == "gripper"


def _by_name(name: str) -> str:
    """Return the kind given by the last meaningful word of a name: `left_arm.wristRoll2.vel` is a rate.

    A position word after a rate or difference word is "unclear": `delta_pos_x` is a step, `torque_q1` a torque.
    """
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", re.sub("[Δ∆δ]", " delta ", name))]
    if any(word in ("linear", "angular") and after in "xyz" for word, after in zip(words, words[1:])):  # of ROS's Twist
        return "rate"
    kinds = [
        next(((kind, word) for kind, pattern in _WORDS.items() if pattern.fullmatch(word)), ("", "")) for word in words
    ]
    named_kinds = [(kind, word) for kind, word in kinds if kind]
    if not named_kinds:
        return "gripper" if {"gripper", "grippers"} & set(words) else ""
    last, moving = named_kinds[-1][0], [word for kind, word in named_kinds[:-1] if kind in ("rate", "difference")]
    if last == "place" and (words[0] == "d" or not _BEFORE_A_PLACE.issuperset(moving)):
        return "unclear"
    return last


def _by_unit(unit: str) -> str:
    """Return the kind given by a unit."""
    patterns = {"rate": _RATE_UNIT, "difference": _DIFFERENCE_UNIT, "toggle": _TOGGLE_UNIT}
    for kind, pattern in patterns.items():
        if pattern.search(unit):
            return kind
    return "place" if _PLACE_UNIT.fullmatch(unit.strip()) else ""


def is_position_unit(unit: str) -> bool:
    """Whether a unit measures a position, such as rad or m."""
    return _by_unit(unit) == "place"


@dataclass(frozen=True)
class HoldBehaviour:
    """Behaviour of the action elements of a robot at rest, [A] each.

    names: of the elements; keeps: whether an element keeps its value; neutral: its value at rest otherwise; unknown:
    names of the elements whose kind follows from neither name, unit nor setting.
    """

    names: tuple[str, ...]
    keeps: tuple[bool, ...]
    neutral: tuple[float, ...]
    unknown: tuple[str, ...] = ()

    def text(self, shown: Collection[str]) -> str:
        """Return one line per element; shown: names of elements whose position is part of the robot's state."""
        return "\n".join(
            f"{name}: {('holds its position' if name in shown else 'keeps its last value')}"
            if keeps
            else f"{name}: is set to {neutral:g}"
            for name, keeps, neutral in zip(self.names, self.keeps, self.neutral)
        )


def hold_behaviour(
    kinds: Sequence[Kind],
    names: Sequence[str],
    *,
    hold: str = "auto",
    positions: Sequence[str] = POSITIONS,
    neutral: Mapping[str, float] | None = None,
) -> HoldBehaviour:
    """Return the behaviour at rest of action elements of the given kinds.

    names: of the elements, () if they have none; hold: for elements of unknown kind: last keeps their value; zero or
    auto sets them to zero; positions: elements that keep their value whatever their kind, unless it equals `POSITIONS`;
    neutral: name -> value at rest of an element that does not keep its value. Raises ConfigError when positions or
    neutral name an unknown element.
    """
    neutral_values, size = dict(neutral or {}), len(kinds)
    custom_positions = tuple(positions) != POSITIONS
    _require_elements("positions", positions if custom_positions else (), names)
    _require_elements("hold_values", tuple(neutral_values), names)
    if conflicts := [name for name in neutral_values if custom_positions and name in positions]:
        raise ConfigError(
            f"'{conflicts[0]}' is in both positions (keeps its value) and hold_values (value at rest): remove it from "
            f"one "
            "of them."
        )
    element_names = tuple(names) or ("",) * size
    keeps: list[bool] = []
    for name, kind in zip(element_names, kinds):
        if custom_positions and kind is Kind.POSITION and is_gripper(name):  # by default alone
            kind = Kind.TOGGLE
        unsaid = kind is Kind.UNKNOWN and hold == "last"
        keeps.append(
            name not in neutral_values and ((custom_positions and name in positions) or kind is Kind.POSITION or unsaid)
        )
    settings_names = {*neutral_values, *(positions if custom_positions else ())}
    unknown_names = [
        name for name, kind in zip(element_names, kinds) if kind is Kind.UNKNOWN and name not in settings_names
    ]
    return HoldBehaviour(
        element_names,
        tuple(keeps),
        tuple(float(neutral_values.get(name, 0.0)) for name in element_names),
        tuple(unknown_names if names else ()),
    )


def keeps_value(hold: str, positions: Sequence[str], names: Sequence[str], size: int, unit: str = "") -> list[bool]:
    """Return the mask of the `size` action elements that keep their last value while a robot holds position, [A].

    Positions keep it; velocities, forces and toggles do not (`kind_of`). hold: last or zero, for elements whose kind
    follows from neither name nor unit; positions, names, unit: see `hold_behaviour` and `unit_of`. Raises ConfigError
    as `hold_behaviour` does.
    """
    kinds = kinds_of(names, unit) if names else [kind_of("", unit)] * size
    return list(hold_behaviour(kinds, names, hold=hold, positions=positions).keeps)


def kinds_of(names: Sequence[str], unit: str = "") -> list[Kind]:
    """Return the kinds of a field's elements, inferred from their names and its unit, [A]."""
    units = unit_of(unit, names)
    return [kind_of(name, units.get(name, "")) for name in names]


def _require_elements(setting: str, said: Sequence[str], names: Sequence[str]) -> None:
    """Raise ConfigError if a setting names an unknown element."""
    unknown_names = [name for name in said if name not in names]
    if unknown_names:
        hint = did_you_mean(unknown_names[0], names) or (
            " The action's elements have no names, so none can be selected here."
        )
        raise ConfigError(f"{setting} contains '{unknown_names[0]}', which is not an element of the action.{hint}")
