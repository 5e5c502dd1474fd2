"""Specs of worlds and policies: observation and action fields with shape, dtype, unit and range.

Observation keys follow LeRobot: `observation.state` (robot state), `observation.environment_state` (objects, goals),
`observation.images.<camera>` (uint8 RGB, height x width x 3) and `task` (instruction). External data may name images
differently (`observation.image`): on import, `Field.is_image` identifies them and `camera_key` returns the name.
"""

import dataclasses
import math
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from robopolicy.client.element_kinds import unit_of
from robopolicy.client.keys import ENVIRONMENT_STATE as ENVIRONMENT_STATE
from robopolicy.client.keys import HOLD as HOLD
from robopolicy.client.keys import IMAGE_PREFIX as IMAGE_PREFIX
from robopolicy.client.keys import QUEUE as QUEUE
from robopolicy.client.keys import STATE as STATE
from robopolicy.client.keys import TASK as TASK
from robopolicy.client.keys import cameras_of as cameras_of
from robopolicy.core.arrays import Array, is_mapping, is_sequence
from robopolicy.core.errors import (
    ConfigError,
    NonFiniteError,
    RobopolicyError,
    RobopolicyWarning,
    SpecError,
    as_setting,
    did_you_mean,
)
from robopolicy.core.former_names import keep_former_names

if TYPE_CHECKING:
    from torch import Tensor

LONGEST_LATENCY, LONGEST_HISTORY = 1000, 1000
"""Maximum latency in control steps and maximum history in frames; larger numbers are mistakes and exhaust memory."""
LATENCY = "latency_steps"
"""Option of every world: latency of a policy call in control steps."""
NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?"
"""Decimal number as written in settings."""

Observation = dict[str, Array]
"""Key -> array [B, H, *field.shape] (H frames of history, oldest first); `task` -> str array [B]."""


@dataclass(frozen=True)
class Field:
    """One array of an observation or action, without its leading axes.

    shape: shape of one frame, e.g. (7,) or (64, 64, 3); dtype: numpy dtype name; low, high: range, a number or one per
    element; unit: SI unit of all elements ("rad"), of each ("m, rad") or by name ("x, y: m; gripper: 0 to 1"); names:
    one per element of a vector.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    low: float | tuple[float, ...] = -np.inf
    high: float | tuple[float, ...] = np.inf
    unit: str = ""
    names: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Number of elements in one frame."""
        return int(np.prod(self.shape))

    @property
    def is_image(self) -> bool:
        """Whether the field is an image, whatever its key: uint8, height x width x 3."""
        return self.dtype == "uint8" and len(self.shape) == 3 and self.shape[2] == 3

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary; infinite bounds become the strings "inf" and "-inf"."""

        def plain(value: float) -> float | str:
            return float(value) if np.isfinite(value) else str(float(value))

        def bound(value: float | tuple[float, ...]) -> Any:
            return [plain(item) for item in value] if isinstance(value, tuple) else plain(value)

        return {**asdict(self), "low": bound(self.low), "high": bound(self.high)}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Field":
        """Rebuild from `to_json`."""

        def bound(value: Any) -> float | tuple[float, ...]:
            return tuple(float(item) for item in value) if is_sequence(value) else float(value)

        return Field(
            tuple(data["shape"]),
            data["dtype"],
            bound(data["low"]),
            bound(data["high"]),
            data["unit"],
            tuple(data["names"]),
        )


@dataclass(frozen=True)
class WorldSpec:
    """Everything that a policy, trainer or evaluator may know about a world.

    observation: fields by LeRobot key (one frame each); action: one control step [A]; fps: control steps per second;
    horizon: control steps until the time limit; history: H frames in every observation; rewards: names of the reward
    terms, already scaled, whose sum is the reward; instructions: the natural-language tasks it may set; paraphrases:
    instruction -> alternative wordings, whether or not the world uses them; success: success criterion in words, of
    which exactly "return >= NUMBER" is also parsed (`least_return`); terminate_on_success: whether success ends the
    episode; reports_success: False if success is unknown, so that only returns can be compared; clips_actions: whether
    actions beyond the bounds are clipped to them or executed unchanged.
    """

    name: str
    observation: Mapping[str, Field]
    action: Field
    fps: float
    horizon: int
    history: int = 1
    rewards: tuple[str, ...] = ("reward",)
    instructions: tuple[str, ...] = ("",)
    paraphrases: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict[str, tuple[str, ...]])
    success: str = ""
    terminate_on_success: bool = True
    reports_success: bool = True
    clips_actions: bool = True

    @property
    def cameras(self) -> tuple[str, ...]:
        """Names of the cameras whose images are part of the observation."""
        return cameras_of(self.observation)

    @property
    def shows_vectors(self) -> bool:
        """Whether the observation has fields other than images and the instruction."""
        return any(key != TASK and not key.startswith(IMAGE_PREFIX) for key in self.observation)

    def with_cameras(self, sizes: "Mapping[str, Size]") -> "WorldSpec":
        """Return the spec of the same world with these additional cameras, each with its size (height, width)."""
        return dataclasses.replace(self, observation={**self.observation, **image_fields(sizes)})

    @property
    def least_return(self) -> float | None:
        """Minimum return of a successful episode; None if success is defined otherwise."""
        return least_return(self.success) if self.reports_success else None

    @property
    def goals(self) -> tuple[str, ...]:
        """The distinct tasks of the world's instructions in plain wording, in the order of the instructions."""
        return tuple(dict.fromkeys(map(self.meaning, self.instructions)))

    def meaning(self, text: str) -> str:
        """Return the plain wording of an instruction that may be a paraphrase."""
        return next((plain_text for plain_text, paraphrases in self.paraphrases.items() if text in paraphrases), text)

    def wordings(self, index: int) -> tuple[int, ...]:
        """Return the indices of the instructions with the same meaning as instruction `index`, itself included."""
        meaning = self.meaning(self.instructions[index])
        return tuple(place for place, text in enumerate(self.instructions) if self.meaning(text) == meaning)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        attributes = {key: list(value) if is_sequence(value) else value for key, value in self.__dict__.items()}
        fields = {key: each.to_json() for key, each in self.observation.items()}
        paraphrases = {text: list(each) for text, each in self.paraphrases.items()}
        return {**attributes, "observation": fields, "action": self.action.to_json(), "paraphrases": paraphrases}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "WorldSpec":
        """Rebuild from `to_json`; raises KeyError or TypeError on invalid data."""
        values: dict[str, Any] = {key: tuple(value) if is_sequence(value) else value for key, value in data.items()}
        values["observation"] = {key: Field.from_json(value) for key, value in data["observation"].items()}
        values["action"] = Field.from_json(data["action"])
        values["paraphrases"] = {text: tuple(each) for text, each in data.get("paraphrases", {}).items()}
        return WorldSpec(**values)


@dataclass(frozen=True)
class PolicySpec:
    """Inputs and outputs of a policy. Checkpoints, servers and clients write its fields by name.

    observation: the fields it reads, by key; action: one control step; history: H frames; chunk: C control steps
    executed per policy call; prediction: P >= C predicted control steps; scored_steps: K steps with log-probabilities
    per policy call (denoising steps or tokens); fps: control rate during training; categorical: whether steps are
    drawn from categorical distributions (tokens) instead of Gaussians; steps_per_action: number of scored steps
    per control step, 0 if they belong to the whole chunk; instructions: tasks it was trained for, ("",) if unknown.
    """

    observation: Mapping[str, Field]
    action: Field
    history: int
    chunk: int
    prediction: int
    scored_steps: int
    fps: float
    instructions: tuple[str, ...] = ("",)
    categorical: bool = False
    steps_per_action: int = 0

    @property
    def cameras(self) -> tuple[str, ...]:
        """Names of the cameras that the policy reads."""
        return cameras_of(self.observation)

    @property
    def columns(self) -> tuple[str, ...]:
        """Keys of the recorded columns that the policy reads: its observation, and the task if it has several
        instructions.
        """
        return (*self.observation, TASK) if len(self.instructions) > 1 else tuple(self.observation)


def require_fit(policy: PolicySpec, world: WorldSpec) -> None:
    """Raise `SpecError` unless `policy` can act in `world`: the world provides all its inputs, and action shapes match.

    Vectors of equal shape may contain different quantities, so names and units declared on both sides are compared too;
    see `require_consistent_fields`.
    """
    require_fields(policy.observation, policy.action, world, policy.fps)


def require_fields(observation: Mapping[str, Field], action: Field, world: WorldSpec, fps: float = 0.0) -> None:
    """Raise `SpecError` as `require_fit` does, given `observation` (key -> field), `action` and `fps` (control rate, 0:
    unknown).
    """
    for key, field in observation.items():
        if key not in world.observation:
            camera = key.startswith(IMAGE_PREFIX)
            reader = f"camera '{key.removeprefix(IMAGE_PREFIX)}'" if camera else f"field '{key}'"
            candidates = [name for name in world.observation if name.startswith(IMAGE_PREFIX) == camera]
            raise SpecError(
                f"The policy reads the {reader}, which the world '{world.name}' does not output (it outputs "
                f"{', '.join(sorted(world.observation))}).{did_you_mean(key, candidates)} Is this the world it was "
                "trained for?"
            )
        world_field = world.observation[key]
        if world_field.shape != field.shape:
            size = f"{key.removeprefix(IMAGE_PREFIX)}: {list(field.shape[:2])}".replace(" ", "").replace(":", ": ")
            way_out = (
                f" In a simulator, world.image_size={{{size}}} gives that size."
                if field.is_image and world_field.is_image
                else ""
            )
            raise SpecError(
                f"The policy reads '{key}' as {_describe(field)}, but the world '{world.name}' outputs "
                f"{_describe(world_field)}.{way_out} Is this the world it was trained for?"
            )
    if action.shape != world.action.shape:
        raise SpecError(
            f"The policy's actions are {_describe(action)}, but those of the world '{world.name}' are "
            f"{_describe(world.action)}. Is this the world it was trained for?"
        )
    pairs = {f"'{key}'": (field, world.observation[key]) for key, field in observation.items()}
    sides = ("for the policy", f"in the world '{world.name}'")
    require_consistent_fields({**pairs, "the action": (action, world.action)}, sides, rates=(fps, world.fps))


RENAMED = (
    'Is this the world it was trained for? If both names mean the same quantity, make them equal: "names" in the '
    "checkpoint's config.json (for LeRobot checkpoints in robopolicy.json next to it) or, before training, "
    "{train.rename}."
)
REORDERED = "Both sides have the same names in different order: reorder the values and names on one side."
CONVERTED = (
    'Convert one of them; if only the declaration is wrong, correct "unit" in the checkpoint\'s config.json or in '
    "the world."
)


def require_consistent_fields(
    pairs: Mapping[str, tuple[Field, Field]],
    sides: tuple[str, str],
    *,
    rates: tuple[float, float] = (0.0, 0.0),
    error: type[RobopolicyError] = SpecError,
    renamed: str = RENAMED,
    converted: str = CONVERTED,
) -> None:
    """Check that two sides declare the same fields consistently; pairs: name -> (one side's, the other's), of equal
    shapes.

    Raises `error` when element names or units differ. Warns when names are mere numbers (motor_0), bounds differ, or
    control rates differ (steps per second, 0: unknown). What one side leaves undeclared matches anything. sides: "to
    the policy", "in the world 'push_t'"; renamed: remedy for differing names, in which {train.rename} is replaced by
    that setting; converted: remedy for differing units.
    """
    for label, (own_field, other) in pairs.items():
        place = name_conflict(own_field.names, other.names)
        if place is not None:
            own_name, other_name = own_field.names[place], other.names[place]
            renaming = {
                one: another for one, another in zip(own_field.names, other.names, strict=False) if one != another
            }
            way_out = renamed.replace("{train.rename}", as_setting("train.rename", renaming))
            if not set(renaming.values()).isdisjoint(
                own_field.names
            ):  # same names in another order: renaming would be wrong
                way_out = REORDERED
            raise error(
                f"Element {place} of {label} is '{own_name}' {sides[0]}, but '{other_name}' {sides[1]}. {way_out}"
            )
        if not same_units(own_field, other):
            raise error(f"{label} is in '{own_field.unit}' {sides[0]}, in '{other.unit}' {sides[1]}. {converted}")
    doubts = [text for name, (one_field, other) in pairs.items() for text in _doubts(name, one_field, other, sides)]
    if not same_rate(*rates):
        doubts.append(f"The control rate is {rates[0]:g} steps per second {sides[0]}, but {rates[1]:g} {sides[1]}")
    if doubts:
        warnings.warn(f"{'. '.join(doubts)}.", RobopolicyWarning, stacklevel=1)  # one place: each text is said once


def name_conflict(own: Sequence[str], other: Sequence[str]) -> int | None:
    """Return the first index where two lists of names contradict each other; None if they do not.

    A generic name, a word and a number (motor_0), matches any name at its index, unless the same names appear in
    another order.
    """
    if not own or not other:
        return None
    reordered = sorted(own) == sorted(other)
    for place, (own_name, other_name) in enumerate(zip(own, other, strict=False)):
        elsewhere = (not is_number(own_name) and own_name in other) or (not is_number(other_name) and other_name in own)
        both_named = not is_number(own_name) and not is_number(other_name)
        if own_name != other_name and (both_named or elsewhere or reordered):
            return place
    return None


def is_number(name: str) -> bool:
    """Whether an element's name is only a number after a word: motor_0, agent_pos[1], joint3, 7."""
    return not name.strip() or re.fullmatch(r"(.*\D)?\d+[\])]?", name.strip()) is not None


def _doubts(what: str, own: Field, other: Field, sides: tuple[str, str]) -> list[str]:
    """Return warning sentences (without full stop) on possible differences between two fields of one shape."""
    doubts: list[str] = []
    for own_name, other_name in zip(own.names, other.names, strict=False):
        if own_name != other_name:
            doubts.append(
                f"The elements of {what} have only numbered names and are matched by index (first difference: "
                f"'{own_name}' {sides[0]}, '{other_name}' {sides[1]}); check that all {own.size} are in the same "
                "order"
            )
            break
    if own.is_image or own.shape != other.shape:  # pixels
        return doubts
    for name in ("low", "high"):
        own_name, other_name = (
            np.broadcast_to(np.asarray(getattr(each, name), float), each.shape) for each in (own, other)
        )
        both_finite = np.isfinite(own_name) & np.isfinite(other_name)
        differs = both_finite & ~np.isclose(
            np.where(both_finite, own_name, 0), np.where(both_finite, other_name, 0), rtol=1e-3, atol=1e-6
        )
        if differs.any():
            place = int(differs.argmax())
            element = f" in '{own.names[place]}'" if own.names else f" in element {place}" if own.size > 1 else ""
            doubts.append(
                f"The {'lower' if name == 'low' else 'upper'} bound of {what} is {own_name.flat[place]:g}{element} "
                f"{sides[0]}, but {other_name.flat[place]:g} {sides[1]}"
            )
    return doubts


def same_rate(own: float, other: float) -> bool:
    """Whether two control rates agree or one is unknown (0): within 5 % if one is the other rounded to a whole number,
    as in LeRobot datasets, else within 1 %.
    """
    if not own or not other:
        return True
    rounded = own in (round(other), other) or other == round(own)
    return abs(own - other) <= (0.05 if rounded else 0.01) * max(own, other)


def same_units(own: Field, other: Field) -> bool:
    """Whether two fields declare the same unit in any spelling, or one of them declares none.

    See `Field.unit` for the forms of a unit.
    """
    own_units, other_units = element_units(own), element_units(other)
    if len(own_units) == len(other_units):
        return all(not a or not b or a == b for a, b in zip(own_units, other_units, strict=True))
    return not any(own_units) or not any(other_units) or _once(own_units) == _once(other_units)


def element_units(field: Field) -> tuple[str, ...]:
    """Return a field's units in normalised spelling: one per element if it lists or names them, else one for all."""
    if ":" in field.unit and len(field.names) == field.size:
        by_name = unit_of(field.unit, field.names)
        return tuple(_spelled(by_name.get(name, "")) for name in field.names)
    parts = tuple(_spelled(part) for part in re.split(r"[,;]", field.unit))
    return parts[:1] * field.size if len(set(parts)) == 1 else parts


def _once(units: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(unit for unit in units if unit))


_SPELLINGS = {
    "": ("none", "unknown", "-"),
    "1": ("dimensionless", "unitless"),
    "%": ("percent", "pct"),
    "cm": ("centimeter", "centimeters", "centimetre", "centimetres"),
    "deg": ("degree", "degrees", "°"),
    "kg": ("kilogram", "kilograms"),
    "m": ("meter", "meters", "metre", "metres"),
    "mm": ("millimeter", "millimeters", "millimetre", "millimetres"),
    "N": ("newton", "newtons"),
    "rad": ("radian", "radians"),
    "s": ("sec", "second", "seconds"),
    "/": ("per",),
}
_SHORT = {word: unit for unit, words in _SPELLINGS.items() for word in words}


def _spelled(unit: str) -> str:
    """Normalise the spelling of a unit: "radians per second", "rad s^-1" and "rad / s" become rad/s."""
    words = re.sub(r"[a-zA-Z]+|°|^\s*-\s*$", lambda word: _SHORT.get(word[0].strip().lower(), word[0]), unit)
    quotient = re.sub(r"[\s*·]+([a-zA-Z]+)\s*(\^\s*)?(-|⁻)\s*(1|¹)", r"/\1", words)
    return re.sub(r"[\s*·()\[\]]+", "", quotient).replace("²", "^2")


def _describe(field: Field) -> str:
    names = f" ({', '.join(field.names[:8])}{', ...' if len(field.names) > 8 else ''})" if field.names else ""
    return f"{list(field.shape)}{names}"


def least_return(success: str) -> float | None:
    """Return NUMBER of a success criterion "return >= NUMBER", None for any other."""
    match = re.fullmatch(rf"\s*return\s*>=\s*({NUMBER})\s*", success)
    return None if match is None else float(match[1])


def elements_of(fields: Mapping[str, Field]) -> dict[str, tuple[str, int]]:
    """Return name -> key and index of every named element of vector fields; of equal names the last one."""
    return {
        name: (key, index)
        for key, field in fields.items()
        if not field.is_image
        for index, name in enumerate(field.names)
    }


def camera_key(key: str) -> str:
    """Return the standard key for a camera that external data calls `key`: observation.image ->
    observation.images.image.
    """
    return key if key.startswith(IMAGE_PREFIX) else IMAGE_PREFIX + key.removeprefix("observation.")


def require_cameras_named(fields: Mapping[str, Field], whose: str) -> None:
    """Raise `SpecError` unless exactly the image fields among `fields` have camera keys; whose: "The world 'slide'"."""
    for key, field in fields.items():
        if field.is_image and not key.startswith(IMAGE_PREFIX):
            raise SpecError(
                f"{whose} outputs an image, uint8 {list(field.shape)}, as '{key}': name it '{camera_key(key)}', like "
                "all cameras."
            )
        if key.startswith(IMAGE_PREFIX) and not field.is_image:
            raise SpecError(
                f"{whose} outputs the camera '{key}' as {field.dtype} {list(field.shape)}: an image must be uint8 "
                "[height, width, 3], RGB; give other arrays a key outside 'observation.images.'."
            )


LARGE_VECTOR = 2000
"""Number of elements above which a vector is more likely an image, a depth map or a point cloud."""


def note_large_vectors(fields: Mapping[str, Field]) -> None:
    """Warn if a network reads a field with very many elements as plain numbers."""
    large = [f"'{key}' ({list(field.shape)})" for key, field in fields.items() if field.size > LARGE_VECTOR]
    if large:
        warnings.warn(
            f"{', '.join(large)} is read as a plain vector, by fully connected layers: only uint8 [height, width, 3] "
            "is treated as an image. Remove it (policy.observation_keys) unless this is intended.",
            RobopolicyWarning,
            stacklevel=3,
        )


Size = tuple[int, int]
"""(height, width) of an image, in pixels."""
ImageSize = int | Sequence[int] | Mapping[str, int | Sequence[int]]
"""Allowed values of a world's `image_size`: one number for height and width, (height, width), or either by camera."""
LARGEST_SIDE = 4096
"""Maximum pixels per image side supported by graphics drivers."""
DEFAULT_IMAGE_SIZE: Size = (64, 64)
"""Default image size of a camera that can be rendered at any size."""


def image_sizes(
    cameras: Iterable[str], image_size: ImageSize | None = None, own: Mapping[str, Size] | None = None
) -> dict[str, Size]:
    """Return the image size of every camera: the requested one, else its `own` (camera -> size), else DRAWN.

    image_size: None requests none; a mapping by camera may omit some. Raises ConfigError, naming the setting, on an
    invalid size or an unknown camera.
    """
    cameras = tuple(cameras)
    if image_size is not None and not is_mapping(image_size):
        _size(image_size)  # wrong without any camera, too
    requested_sizes = image_size if is_mapping(image_size) else dict.fromkeys(cameras, image_size)
    for camera in requested_sizes:
        if camera not in cameras:
            raise ConfigError(
                f"world.image_size contains the camera '{camera}', which is not in "
                f"world.cameras.{did_you_mean(camera, cameras)}"
            )
    default_sizes = {**dict.fromkeys(cameras, DEFAULT_IMAGE_SIZE), **(own or {})}
    sizes = {camera: _size(size) for camera, size in requested_sizes.items() if size is not None}
    return {camera: sizes.get(camera, default_sizes[camera]) for camera in cameras}


def _size(given: Any) -> Size:
    sides: Any = tuple(given) if is_sequence(given) else (given, given)
    are_whole = all(isinstance(side, int) and not isinstance(side, bool) for side in sides)
    if len(sides) == 2 and are_whole and all(0 < side <= LARGEST_SIDE for side in sides):
        return sides
    raise ConfigError(
        f"world.image_size={given} is not a size from 1 to {LARGEST_SIDE} pixels: write world.image_size=64, "
        "world.image_size=[48,64] (height, width) or, per camera, world.image_size={top: [48,64], wrist: 32}."
    )


def image_fields(sizes: Mapping[str, Size]) -> dict[str, Field]:
    """Return the observation fields of cameras with these image sizes."""
    return {IMAGE_PREFIX + camera: Field((*size, 3), "uint8", 0, 255) for camera, size in sizes.items()}


def image_sizes_of(fields: Mapping[str, Field]) -> dict[str, Size]:
    """Return camera -> image size of the images among `fields`, key -> field."""
    shapes = {camera: fields[IMAGE_PREFIX + camera].shape for camera in cameras_of(fields)}
    return {camera: (shape[0], shape[1]) for camera, shape in shapes.items()}


def image_options(sizes: Mapping[str, Size]) -> dict[str, Any]:
    """Return the world options for cameras with these sizes: cameras and image_size, as a single number if possible
    because external worlds may require one; {} without cameras.
    """
    if not sizes:
        return {}
    height, width = next(iter(sizes.values()))
    size = height if height == width else (height, width)
    return {"cameras": tuple(sizes), "image_size": dict(sizes) if len(set(sizes.values())) > 1 else size}


def images_of(fields: Mapping[str, Field]) -> dict[str, Any]:
    """Return the world options that produce the images among `fields`, key -> field: cameras and image_size."""
    return image_options(image_sizes_of(fields))


def validate_observation(
    observation: Mapping[str, Any], fields: Mapping[str, Field], batch: int | None = None, history: int | None = None
) -> None:
    """Raise `SpecError` or `NonFiniteError` unless `observation` has every field, [B, H, *shape], finite.

    Works on numpy arrays and torch tensors; keys beyond `fields` are allowed (a policy reads what it needs).
    """
    for key, spec in fields.items():
        if key not in observation:
            kind = f"camera '{key.removeprefix(IMAGE_PREFIX)}'" if key.startswith(IMAGE_PREFIX) else f"field '{key}'"
            raise SpecError(
                f"The observation has no {kind} (key '{key}'); it has: {', '.join(sorted(observation))}."
                f"{did_you_mean(key, observation)} Rename the key or add the {kind.split()[0]} to the world."
            )
        value = observation[key]
        shape = tuple(value.shape)
        expected = (batch if batch is not None else "B", history if history is not None else "H", *spec.shape)
        is_expected = len(shape) == len(expected) and all(
            isinstance(want, str) or want == have for want, have in zip(expected, shape, strict=True)
        )
        if not is_expected:
            raise SpecError(
                f"'{key}' has shape {shape}, expected {list(expected)} (batch, history, {list(spec.shape)})."
            )
        if not spec.dtype.startswith(("uint", "int", "bool")):
            check_finite(key, value)


def all_finite(value: "Array | Tensor") -> bool:
    """Whether `value` (numpy or torch) contains no NaN or infinity."""
    if isinstance(value, np.ndarray):
        return bool(np.isfinite(value).all())
    # A finite sum has finite terms, and is several times as fast to see. Large terms may overflow: then each is asked.
    return math.isfinite(value.sum().item()) or bool(value.isfinite().all())


def check_finite(name: str, value: "Array | Tensor") -> None:
    """Raise `NonFiniteError` naming the rows (first axis) in which `value` (numpy or torch) is NaN or infinite."""
    if all_finite(value):
        return
    finite = np.isfinite(value) if isinstance(value, np.ndarray) else value.isfinite()
    bad_rows: Any = (~finite).reshape(finite.shape[0] if finite.ndim else 1, -1).any(1)
    first = [row for row, is_bad in enumerate(bad_rows.tolist()) if is_bad][:5]
    raise NonFiniteError(f"'{name}' is not finite in row(s) {first}: check the sensor or policy that produced it.")


def validate_actions(actions: Array, spec: Field, batch: int) -> None:
    """Raise unless `actions` is [batch, C >= 1, *spec.shape] and finite: an invalid action must never reach a world."""
    if actions.ndim != 2 + len(spec.shape) or actions.shape[0] != batch or actions.shape[2:] != tuple(spec.shape):
        raise SpecError(
            f"Actions have shape {tuple(actions.shape)}, expected [{batch}, C, {', '.join(map(str, spec.shape))}] "
            f"(rows, chunk steps, action dimensions{': ' + ', '.join(spec.names) if spec.names else ''})."
        )
    if actions.shape[1] < 1:
        raise SpecError("An action chunk needs at least one step, but got zero.")
    check_finite("actions", actions)


keep_former_names(
    __name__,
    {
        "require_alike": "require_consistent_fields",
        "shown_sizes": "image_sizes_of",
        "DRAWN": "DEFAULT_IMAGE_SIZE",
        "misnamed": "name_conflict",
    },
)
