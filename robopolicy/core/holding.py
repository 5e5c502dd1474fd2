"""What each element of an action does while a robot stands still: it stays at its place, or goes to zero.

A position stands still where it is. A velocity, torque, force, current, difference or toggle stands still at zero: kept
at its value, it goes on moving the robot. An element's name and unit say which it is (`kind_of`); where they do not, a
setting does. No numpy here, so that help stays quick. Axes: A action element.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from robopolicy.core.errors import ConfigError, did_you_mean

POSITIONS = ("gripper",)
"""Elements of an action that keep their value while a robot holds still unless others are named: every gripper."""


class Kind(Enum):
    """What an element of an action is, as far as its name and its unit say."""

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
"""What a word of an element's name says of it."""

_BEFORE_A_PLACE = {"current", "twist", "power", "remote", "v"}
"""Words of a rate that say nothing before one of a place: `current_position`, `wrist_twist.pos`."""

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
    """Return name -> unit of the elements of a field, of those alone of which its unit can be said to speak.

    unit: one for all ("rad"), one for each ("rad, m/s"), or for names ("x, y: m; gripper: 0 to 1").
    """
    if ":" in unit:
        groups = (part.partition(":") for part in unit.split(";"))
        each = {name.strip(): text.strip() for head, _, text in groups for name in head.split(",")}
        return {name: each[name] for name in names if name in each}
    parts = [part.strip() for part in unit.split(",")]
    if len(parts) == len(names):
        return dict(zip(names, parts, strict=True))
    return dict.fromkeys(names, parts[0]) if len(parts) == 1 else {}


def kind_of(names: str | Sequence[str], unit: str = "", *, shown: bool = False) -> Kind:
    """Return what an element is by its name and its unit; UNKNOWN where neither says it, or they disagree.

    names: what it is called, or what the robot and the policy call it; shown: whether the robot shows an element of
    that name too, so that rad or m is the unit of a place, not of a difference.
    """
    said = {_by_name(name) for name in ([names] if isinstance(names, str) else names)}
    by_unit = _by_unit(unit)
    if "unclear" in said:
        return Kind.RATE if by_unit in ("rate", "difference") else Kind.UNKNOWN
    rate = bool({"rate", "difference"} & {*said, by_unit})
    place = "place" in said or (by_unit == "place" and "difference" not in said and (shown or said != {""}))
    if rate and place:
        return Kind.UNKNOWN
    if rate:
        return Kind.RATE
    if place or "gripper" in said:
        return Kind.POSITION
    return Kind.TOGGLE if "toggle" in {*said, by_unit} else Kind.UNKNOWN


def is_gripper(name: str) -> bool:
    """Whether a name says that its element is a gripper, and nothing more of what it is."""
    return _by_name(name) == "gripper"


def _by_name(name: str) -> str:
    """Return what the last word of a name says that says anything: `left_arm.wristRoll2.vel` is a rate.

    Of a place after a rate or a difference it is "unclear": `delta_pos_x` is a step, `torque_q1` a torque.
    """
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", re.sub("[Δ∆δ]", " delta ", name))]
    if any(word in ("linear", "angular") and after in "xyz" for word, after in pairwise(words)):  # of ROS's Twist
        return "rate"
    kinds = [
        next(((kind, word) for kind, pattern in _WORDS.items() if pattern.fullmatch(word)), ("", "")) for word in words
    ]
    said = [(kind, word) for kind, word in kinds if kind]
    if not said:
        return "gripper" if {"gripper", "grippers"} & set(words) else ""
    last, moving = said[-1][0], [word for kind, word in said[:-1] if kind in ("rate", "difference")]
    if last == "place" and (words[0] == "d" or not _BEFORE_A_PLACE.issuperset(moving)):
        return "unclear"
    return last


def _by_unit(unit: str) -> str:
    """Return what a unit says of its element."""
    patterns = {"rate": _RATE_UNIT, "difference": _DIFFERENCE_UNIT, "toggle": _TOGGLE_UNIT}
    for kind, pattern in patterns.items():
        if pattern.search(unit):
            return kind
    return "place" if _PLACE_UNIT.fullmatch(unit.strip()) else ""


def is_place_unit(unit: str) -> bool:
    """Whether a unit is that of a place, such as rad or m."""
    return _by_unit(unit) == "place"


@dataclass(frozen=True)
class Standstill:
    """What the elements of an action do while a robot stands still, [A] each.

    names: of the elements; keeps: whether an element stays at its place; neutral: where it goes if it does not;
    unknown: names of those of which neither name, unit nor setting says it.
    """

    names: tuple[str, ...]
    keeps: tuple[bool, ...]
    neutral: tuple[float, ...]
    unknown: tuple[str, ...] = ()

    def text(self, shown: Collection[str]) -> str:
        """Return a line an element; shown: names of those whose place the robot shows."""
        return "\n".join(
            f"{name}: {('stays at its place' if name in shown else 'keeps its last value')}"
            if keeps
            else f"{name}: stops at {neutral:g}"
            for name, keeps, neutral in zip(self.names, self.keeps, self.neutral, strict=True)
        )


def standstill(
    kinds: Sequence[Kind],
    names: Sequence[str],
    *,
    hold: str = "auto",
    positions: Sequence[str] = POSITIONS,
    neutral: Mapping[str, float] | None = None,
) -> Standstill:
    """Return what the elements of these kinds do while a robot stands still.

    names: of the elements, () where they have none; hold: what those do whose kind is unknown: last, keep their value;
    zero or auto, go to zero; positions: those that keep it whatever they are, where it is not `POSITIONS`; neutral:
    name -> where an element goes that keeps nothing. Raises ConfigError where positions or neutral name no element.
    """
    others, size = dict(neutral or {}), len(kinds)
    chosen = tuple(positions) != POSITIONS
    _require_elements("positions", positions if chosen else (), names)
    _require_elements("neutral", tuple(others), names)
    if both := [name for name in others if chosen and name in positions]:
        raise ConfigError(f"'{both[0]}' is in positions, and neutral says where it goes: leave it out of one of them.")
    called = tuple(names) or ("",) * size
    keeps: list[bool] = []
    for name, kind in zip(called, kinds, strict=True):
        if chosen and kind is Kind.POSITION and is_gripper(name):  # by default alone
            kind = Kind.TOGGLE
        unsaid = kind is Kind.UNKNOWN and hold == "last"
        keeps.append(name not in others and ((chosen and name in positions) or kind is Kind.POSITION or unsaid))
    said = {*others, *(positions if chosen else ())}
    unknown = [name for name, kind in zip(called, kinds, strict=True) if kind is Kind.UNKNOWN and name not in said]
    return Standstill(
        called, tuple(keeps), tuple(float(others.get(name, 0.0)) for name in called), tuple(unknown if names else ())
    )


def keeps_value(hold: str, positions: Sequence[str], names: Sequence[str], size: int, unit: str = "") -> list[bool]:
    """Return which of the `size` elements of an action keep their last value while a robot holds still, [A].

    Positions do, velocities, forces and toggles do not (`kind_of`); hold: last or zero, of those of which neither name
    nor unit says what they are; positions, names, unit: see `standstill` and `unit_of`. Raises ConfigError as
    `standstill` does.
    """
    kinds = kinds_of(names, unit) if names else [kind_of("", unit)] * size
    return list(standstill(kinds, names, hold=hold, positions=positions).keeps)


def kinds_of(names: Sequence[str], unit: str = "") -> list[Kind]:
    """Return what the elements of a field are by their names and its unit, [A]."""
    units = unit_of(unit, names)
    return [kind_of(name, units.get(name, "")) for name in names]


def _require_elements(setting: str, said: Sequence[str], names: Sequence[str]) -> None:
    """Raise ConfigError where a setting names what is no element."""
    unknown = [name for name in said if name not in names]
    if unknown:
        known = did_you_mean(unknown[0], names) or " Its elements have no names, so none can be named here."
        raise ConfigError(f"{setting} names '{unknown[0]}', which is no element of the action.{known}")
