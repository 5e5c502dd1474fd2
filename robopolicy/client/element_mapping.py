"""Mapping between a robot's named values and the elements of a policy's vectors, with units.

A LeRobot robot reads and writes {name: value}, one float per motor and one image per camera; a policy reads and writes
vectors whose elements its checkpoint names. Elements are matched by name only, since equal sizes prove nothing. Axes: A
action dimension.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from functools import cached_property
from typing import Any

import numpy as np

from .element_kinds import POSITIONS, HoldBehaviour, hold_behaviour, kind_of, unit_of
from .errors import ConfigError, NonFiniteError, SpecError, did_you_mean, in_one_line
from .holding import unspecified_hold_message
from .keys import IMAGE_PREFIX, QUEUE, camera_of
from .settings import RobotSettings

STANDARD = RobotSettings()


@dataclass(frozen=True)
class ElementMapping:
    """A robot's names in the order of a policy's elements.

    vectors: field -> names of its elements; cameras: field -> name; action: names of its elements; factors: name ->
    policy units per robot unit, default 1; units: field, or "action" -> the policy's unit; shows: names in the robot's
    observation, without cameras; renamed: the robot's names -> the policy's, if different; settings: whose `hold`,
    `positions` and `neutral` apply to action elements, by either name.
    """

    vectors: Mapping[str, tuple[str, ...]]
    cameras: Mapping[str, str]
    action: tuple[str, ...]
    factors: Mapping[str, float]
    units: Mapping[str, str]
    shows: frozenset[str] = frozenset()
    renamed: Mapping[str, str] = dataclass_field(default_factory=dict)
    settings: RobotSettings = STANDARD

    @cached_property
    def standing(self) -> HoldBehaviour:
        """Behaviour of the action elements while the robot holds still.

        Raises ConfigError when names, units and settings leave an element undefined, and on settings that name an
        unknown one.
        """
        policy_names = self._own(self.action)
        units: dict[str, str] = {}
        for key, names in [*self.vectors.items(), ("action", self.action)]:
            own_units = unit_of(self.units.get(key, ""), self._own(names))
            units.update({name: unit for name, unit in own_units.items() if unit})
        known_names = {*self.shows, *sum(self.vectors.values(), ())}
        kinds = [
            kind_of((name, policy_name), units.get(policy_name, ""), shown=name in known_names)
            for name, policy_name in zip(self.action, policy_names)
        ]
        settings, back = self.settings, {policy_name: name for name, policy_name in self.renamed.items()}
        positions = settings.positions
        if positions != POSITIONS:
            positions = tuple(back.get(name, name) for name in positions)
        neutral = {back.get(name, name): value for name, value in settings.hold_values.items()}
        standing = hold_behaviour(kinds, self.action, hold=settings.hold, positions=positions, neutral=neutral)
        if settings.hold == "auto" and standing.unknown:
            raise ConfigError(unspecified_hold_message(standing.unknown))
        return standing

    def _own(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return the policy's names of the robot's elements."""
        return tuple(self.renamed.get(name, name) for name in names)

    def frames(self, shown: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Return the robot's observation as the policy's fields: vectors float32 in its units, images uint8 [h, w, 3].

        Raises SpecError when a name is missing or an image is invalid, NonFiniteError on NaN or infinity.
        """
        missing_names = [
            name for name in (*sum(self.vectors.values(), ()), *self.cameras.values()) if shown.get(name) is None
        ]
        if missing_names:
            raise SpecError(f"The robot no longer provides {', '.join(missing_names)}; it provides {', '.join(shown)}.")
        frames = {field: self._vector(names, shown) for field, names in self.vectors.items()}
        for field, name in self.cameras.items():
            image = np.asarray(shown[name])
            if image.dtype != np.uint8 or image.ndim != 3 or image.shape[-1] != 3 or not image.size:
                raise SpecError(
                    f"Camera '{name}' returned {image.dtype} {list(image.shape)} instead of uint8 [height, width, 3]."
                )
            frames[field] = image
        return frames

    def still(self, shown: Mapping[str, Any], last: np.ndarray) -> np.ndarray:
        """Return the action [A] that keeps the robot still: positions unchanged, velocities and forces at zero.

        last: the last action [A], for positions that the robot does not report, or reports as NaN. Raises as
        `standing`.
        """
        action, standing = last.astype(np.float64).copy(), self.standing
        for place, name in enumerate(self.action):
            if not standing.keeps[place]:
                action[place] = standing.neutral[place]
            elif np.isfinite(value := _number(shown.get(name))):
                action[place] = value * self.factors.get(name, 1.0)
        return action

    def placed(self, shown: Mapping[str, Any]) -> np.ndarray:
        """Return a mask [A] bool of the elements of `still` that need no last action; missing positions do."""
        names = zip(self.action, self.standing.keeps)
        return np.array([not keeps or np.isfinite(_number(shown.get(name))) for name, keeps in names])

    def command(self, action: np.ndarray) -> dict[str, float]:
        """Return an action [A] in the robot's names and units. Raises NonFiniteError, naming the motor."""
        values = {name: float(value) / self.factors.get(name, 1.0) for name, value in zip(self.action, action)}
        invalid = [name for name, value in values.items() if not np.isfinite(value)]
        if invalid:
            raise NonFiniteError(f"The action for {', '.join(invalid)} is not finite: it was not sent.")
        return values

    def text(self) -> str:
        """Describe the mapping: one line per field with the robot's names and the policy's unit, and one line per
        action element with its hold behaviour.
        """
        lines = [self._line(f"{field} <-", names, self.units[field]) for field, names in self.vectors.items()]
        lines += [f"{field} <- camera {name}" for field, name in self.cameras.items()]
        lines.append(self._line("action ->", self.action, self.units["action"]))
        return "\n".join([*lines, "Hold action, when the robot is held or stopped:", self.standing.text(self.shows)])

    def _line(self, what: str, names: tuple[str, ...], unit: str) -> str:
        parts = [f"{name} x {self.factors[name]:g}" if name in self.factors else name for name in names]
        return f"{what} {', '.join(parts)} [{unit or 'unit unknown'}]"

    def _vector(self, names: tuple[str, ...], shown: Mapping[str, Any]) -> np.ndarray:
        numbers = [_number(shown[name]) * self.factors.get(name, 1.0) for name in names]
        with np.errstate(over="ignore"):  # infinite then, and refused
            values = np.array(numbers, dtype=np.float32)
        if not np.isfinite(values).all():
            invalid = [name for name, value in zip(names, values) if not np.isfinite(value)]
            shows = ", ".join(f"{name} ({in_one_line(shown[name], 40)})" for name in invalid)
            raise NonFiniteError(f"The robot returned NaN, infinity or a non-number for {shows}.")
        return values


def map_elements(
    metadata: Mapping[str, Any],
    shows: Mapping[str, Any],
    takes: Mapping[str, Any],
    rename: Mapping[str, str],
    scale: Mapping[str, float],
) -> ElementMapping:
    """Return the wiring between a served policy and a robot.

    metadata: the server's policy metadata; shows, takes: the robot's observation_features and action_features, name ->
    float, or the shape of an image; rename: the robot's names -> the policy's; scale: see `ElementMapping.factors`.
    Raises SpecError when one side lacks an element of the other, or the policy does not name its elements.
    """
    for name in (*rename, *scale):
        if name not in shows and name not in takes:
            raise SpecError(f"The robot has no '{name}' to rename or scale.{did_you_mean(name, {**shows, **takes})}")
    if not all(np.isfinite(value) and value for value in scale.values()):
        raise SpecError(f"scale={dict(scale)}: factors must be finite and not 0.")
    robot_names = {policy: robot for robot, policy in rename.items()}
    motors = {name: kind for name, kind in shows.items() if not isinstance(kind, tuple)}
    pictures = {name: kind for name, kind in shows.items() if isinstance(kind, tuple)}
    cameras: dict[str, str] = {}
    vectors: dict[str, tuple[str, ...]] = {}
    units = {"action": str(metadata["action"].get("unit", ""))}
    for field, described in metadata["observation"].items():
        if field == QUEUE:  # which the driver knows
            continue
        units[field] = str(described.get("unit", ""))
        if field.startswith(IMAGE_PREFIX):
            cameras[field] = _camera(field, robot_names, pictures)
        else:
            vectors[field] = _elements(f"reads in '{field}'", described, robot_names, motors)
    action = _elements("gives", metadata["action"], robot_names, takes)
    if missing_motors := [name for name in takes if name not in action]:
        raise SpecError(
            f"The robot needs {', '.join(missing_motors)}, which the policy does not output: it outputs "
            f"{', '.join(action)}."
        )
    return ElementMapping(vectors, cameras, action, dict(scale), units, frozenset(motors), dict(rename))


def _number(value: Any) -> float:
    """Return a robot's value as a number, NaN if it is not one; some robots return one-element arrays or tensors."""
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # arrays and tensors of several among them
        return np.nan


def _camera(field: str, own: Mapping[str, str], pictures: Mapping[str, Any]) -> str:
    name = own.get(field, camera_of(field))
    if name not in pictures:
        raise SpecError(
            f"The policy reads the camera '{name}', which the robot does not have; it has "
            f"{', '.join(pictures) or 'none'}.{did_you_mean(name, pictures) if pictures else ''} Add it to the "
            f"robot's options, or rename one of its cameras: rename={{NAME: {field}}}."
        )
    return name


def _elements(
    what: str, described: Mapping[str, Any], own: Mapping[str, str], known: Mapping[str, Any]
) -> tuple[str, ...]:
    """Return the robot's names of a vector's elements, in the vector's order."""
    names, shape = tuple(map(str, described.get("names") or ())), list(described["shape"])
    if len(names) != int(np.prod(shape)):
        raise SpecError(
            f"The policy has no names for the {int(np.prod(shape))} elements that it {what}, so they cannot be "
            "matched with the robot's: add \"names\" to the checkpoint's config.json, in the order that it was "
            'trained with (for LeRobot checkpoints to robopolicy.json next to it: "names": {"action": '
            '["shoulder_pan.pos", ...]}).'
        )
    elements = tuple(own.get(name, name) for name in names)
    missing_pairs = [(name, element) for name, element in zip(names, elements) if element not in known]
    if missing_pairs:
        raise SpecError(
            f"The robot has no {', '.join(repr(element) for _, element in missing_pairs)}, which the policy {what}; "
            f"it has {', '.join(known) or 'nothing of that kind'}. If only the names differ, set rename={{ROBOT'S "
            f"NAME: {missing_pairs[0][0]}}}."
        )
    if len(set(elements)) != len(elements):
        raise SpecError(f"Two elements that the policy {what} have the same name on the robot: {', '.join(elements)}.")
    return elements
