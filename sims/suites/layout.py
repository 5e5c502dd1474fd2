"""Layout of an external environment's observation: numbers, images, and omitted entries with the reason.

The type of an entry follows from its space, never from its name. This module runs inside worker processes, so neither
it nor its imports load torch.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gymnasium import spaces

from robopolicy.core.errors import ConfigError, SpecError, did_you_mean
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE, Size
from sims.suites.success import to_array

ROBOT_KEYS = ("observation", "agent_pos", "state", "robot_state", "proprio")
"""Entries of a dictionary observation that are the robot's own: they become `observation.state`."""
OBSERVATION = "observation"
GOAL_KEYS = ("achieved_goal", "desired_goal")
LONE, LONE_ENTRY = "image", "pixels"
"""LeRobot names an environment's only image, its entry "pixels", `observation.image`."""
OWN_VIEW = "default"
"""Camera name of the environment's own view; no entry has this name."""
MOST = 1000
"""Maximum size of an entry with several axes that is read as numbers; larger ones are images, maps, point clouds."""
SMALLEST = 8
"""Minimum height and width of a non-uint8 entry that is read as an image."""
CHOICES = (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)

Path = tuple[str | int, ...]
"""Path of an entry: keys of dictionaries, indices of tuples."""


@dataclass(frozen=True)
class VectorEntry:
    """An entry that becomes numbers [n] at `place`; choices: its space if gymnasium flattens its values."""

    path: Path
    place: slice
    shape: tuple[int, ...]
    choices: spaces.Space | None = None


@dataclass(frozen=True)
class ImageEntry:
    """An image entry of this shape, [h, w], [h, w, C] or [C, h, w]; axis: of the channels, None without; scale: factor
    that maps its values to 0 to 255.
    """

    path: Path
    shape: tuple[int, ...]
    axis: int | None
    scale: int

    @property
    def size(self) -> Size:
        """Height and width in pixels."""
        height, width = self.shape[1:] if self.axis == 0 else self.shape[:2]
        return height, width

    def pixels(self, value: np.ndarray) -> np.ndarray:
        """Return a value of the entry as uint8 [h, w, C]. Raises SpecError if it does not match its declared space."""
        if value.dtype != np.uint8 or self.scale != 1:
            lowest, highest = float(value.min()), float(value.max())
            limit = 255 / self.scale
            # Fractions that never exceed 1 are a picture from 0 to 1, whatever the space says.
            faint = value.dtype.kind == "f" and self.scale == 1 and highest <= 1 and bool((value % 1).any())
            if not (lowest >= 0 and highest <= limit * 1.001) or faint:
                raise SpecError(
                    f"The image '{self.name}' is declared {self.declared}, but its values range from {lowest:g} to "
                    f"{highest:g}: correct the environment's observation_space, or its returned images."
                )
            value = np.rint(np.asarray(value, np.float32) * self.scale).clip(0, 255).astype(np.uint8)
        return value[..., None] if self.axis is None else np.moveaxis(value, self.axis, -1)

    @property
    def name(self) -> str:
        """The entry's name."""
        return dotted(self.path)

    @property
    def declared(self) -> str:
        """Its range, for messages."""
        return f"0 to {255 // self.scale}"


@dataclass(frozen=True)
class Layout:
    """Mapping of an observation to one float32 vector, fields by LeRobot key, and camera images.

    parts: entries that become numbers; fields: key -> slice; names: key -> one per element; pictures: camera -> entry;
    notes: of every entry that is flattened, omitted, converted or renamed, with its shape and the reason; texts: paths
    of entries that are texts.
    """

    size: int
    parts: tuple[VectorEntry, ...]
    fields: dict[str, slice]
    names: dict[str, tuple[str, ...]]
    pictures: dict[str, ImageEntry] = field(default_factory=dict[str, ImageEntry])
    notes: tuple[str, ...] = ()
    texts: tuple[Path, ...] = ()

    def write(self, observation: Any, out: np.ndarray) -> None:
        """Write the numbers of `observation`, an array or arrays in dictionaries and tuples, into `out` [size].

        Raises SpecError on an entry that is missing or does not match its declared space.
        """
        for part in self.parts:
            value = entry_at(observation, part.path)
            try:
                values = value if part.choices is None else spaces.flatten(part.choices, value)
                values = values if type(values) is np.ndarray else to_array(values)
                if values.dtype.kind not in "biufO" or values.size != part.place.stop - part.place.start:
                    raise ValueError
                out[part.place] = values if values.ndim == 1 else values.ravel()
            except (TypeError, ValueError, IndexError) as error:
                raise misfit(part.path, part.shape, value) from error

    @property
    def sizes(self) -> dict[str, Size]:
        """Camera -> (height, width) of its entry, including LeRobot's "image"."""
        sizes = {camera: picture.size for camera, picture in self.pictures.items()}
        entry = entry_of(LONE, sizes)
        return sizes if entry == LONE else {**sizes, LONE: sizes[entry]}

    def picture(self, camera: str, observation: Any) -> np.ndarray:
        """Return a copy of a camera's entry, [h, w], [h, w, C] or [C, h, w], because environments reuse their arrays.

        Raises SpecError when it is missing or its shape differs from its declared space.
        """
        picture = self.pictures[camera]
        value = entry_at(observation, picture.path)
        image = np.array(to_array(value))
        while image.ndim > len(picture.shape) and len(image) == 1:
            image = image[0]
        if image.shape != picture.shape or image.dtype.kind not in "uifb":
            raise misfit(picture.path, picture.shape, value)
        return image


def entry_of(camera: str, known: Collection[str]) -> str:
    """Return the environment's name for a camera, among those it knows."""
    if camera == LONE and LONE not in known and LONE_ENTRY in known:
        return LONE_ENTRY
    # Checkpoints from before know the entry "observation/image" as the camera "observation_image".
    short = re.sub(rf"^{OBSERVATION}[._](images[._])?", "", camera)
    return short if camera not in known and short in known else camera


def entry_at(observation: Any, path: Path) -> Any:
    """Return the entry at `path` of an observation; raises SpecError when there is none."""
    value = observation
    for depth, key in enumerate(path):
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError) as error:
            has = f"it has: {', '.join(map(str, value))}" if isinstance(value, Mapping) else f"it is {kind_of(value)}"
            raise SpecError(
                f"The observation has no entry '{dotted(path[: depth + 1])}', which observation_space declares; {has}."
            ) from error
    return value


def misfit(path: Path, declared: Sequence[int], value: Any) -> SpecError:
    """Return the error for an entry whose shape or type differs from the declared [..]."""
    return SpecError(
        f"Observation entry '{dotted(path)}' is declared {list(declared)}, but is {kind_of(value)}: correct the "
        "environment's observation_space, or the observations returned by reset and step."
    )


def kind_of(value: Any) -> str:
    """Describe shape and type of a returned value in words."""
    shape = getattr(value, "shape", None)
    if shape is None:
        return f"a {type(value).__name__}"
    return f"{list(shape)} {str(getattr(value, 'dtype', '')).removeprefix('torch.')}".rstrip()


def dotted(path: Path) -> str:
    """Return an entry's name: its path with dots; "observation" when the observation is not a dictionary."""
    return ".".join(map(str, path)) or "observation"


def observation_layout(
    space: spaces.Space | None, state_keys: Sequence[str] | None = None, element_names: Sequence[str] = ()
) -> Layout:
    """Build the layout of an observation space; state_keys: entries that are the robot's own (default ROBOT_KEYS);
    element_names: of a flat observation's numbers, () for none.

    A Box -> observation.state. Of a Dict or Tuple: the robot's entries -> observation.state; every other one with
    numbers (goals, objects, one-hot choices) -> observation.environment_state in the space's order; images -> cameras
    named after their key, or after as much of their path as makes it unique. See `read_box` for the rules. Raises
    ConfigError when nothing readable remains, two entries have one name, or state_keys contains a name that the space
    lacks.
    """
    if space is None:
        raise ConfigError("The environment declares no observation_space: set it, for example to a Box of numbers.")
    as_vector = [bool(path) and str(path[0]) in (state_keys or ()) for path, _ in leaves(space, ())]
    readings = {
        path: read_box(leaf, is_whole) for (path, leaf), is_whole in zip(leaves(space, ()), as_vector, strict=True)
    }
    entry_names = [dotted(path) for path in readings]
    if len(set(entry_names)) < len(entry_names):
        duplicate = next(name for name in entry_names if entry_names.count(name) > 1)
        raise ConfigError(f"Two entries of the observation have the name '{duplicate}': rename one of them.")
    notes = [_noted(path, entry) for path, entry in readings.items() if entry.note]
    vectors = {path: entry for path, entry in readings.items() if entry.kind == "numbers"}
    pictures, rename_notes = named_images({path: entry for path, entry in readings.items() if entry.kind == "picture"})
    if not vectors and not pictures:
        raise ConfigError(
            f"The observation has no usable entry. {'; '.join(notes) or f'It is {space}'}. A world needs a Box of "
            "numbers or images (uint8 [height, width, 3]): wrap the environment in "
            "gymnasium.wrappers.TransformObservation and register the result."
        )
    top_keys = {str(path[0]) for path in vectors if path}
    for key in state_keys or ():
        if key not in top_keys:
            raise ConfigError(f"state_keys contains '{key}', which the observation lacks.{did_you_mean(key, top_keys)}")
    robot = set(state_keys or ROBOT_KEYS)
    first = {path: str(path[0]) if path and state_keys else lerobot_name(path).split(".")[0] for path in vectors}
    if robot.isdisjoint(first.values()):
        robot = {*first.values()} - {"environment_state", *GOAL_KEYS}
    robot_paths = [path for path in vectors if first[path] in robot or not path]
    parts = []
    fields = {}
    names = {}
    start = 0
    names_used = not element_names
    for key, paths in (
        (STATE, robot_paths),
        (ENVIRONMENT_STATE, [path for path in vectors if path not in robot_paths]),
    ):
        begin, elements = start, []
        for path in paths:
            part_reading = vectors[path]
            parts.append(
                VectorEntry(path, slice(start, start + part_reading.size), part_reading.shape, part_reading.choices)
            )
            numbered = [f"{dotted(path)}[{index}]" for index in range(part_reading.size)]
            use = not path and len(element_names) == part_reading.size
            names_used, elements = names_used or use, [*elements, *(element_names if use else numbered)]
            start += part_reading.size
        if elements:
            fields[key], names[key] = slice(begin, start), tuple(elements)
    if not names_used:
        notes.append(
            f"element_names ({len(element_names)}) are ignored: the observation is not a Box with the same "
            "number of elements"
        )
    texts = tuple(path for path, entry in readings.items() if entry.kind == "text")
    return Layout(start, tuple(parts), fields, names, pictures, (*notes, *rename_notes), texts)


def lerobot_name(path: Path) -> str:
    """Return an entry's name without LeRobot's prefix "observation." (or "observation/")."""
    name = dotted(path)
    for prefix in (f"{OBSERVATION}.", f"{OBSERVATION}/"):
        if name.startswith(prefix) and name.removeprefix(prefix) and (len(path) == 1 or ENVIRONMENT_STATE in name):
            return name.removeprefix(prefix).replace("images/", "images.")
    return name


def distinct_names(names: Any, attribute: str) -> tuple[str, ...]:
    """Return the element names that an environment has under `attribute`, () for none.

    Raises ConfigError when they are a single text, or two of them are the same.
    """
    if names is None:
        return ()
    if isinstance(names, str):
        raise ConfigError(
            f"The environment's {attribute} is the text '{names}', but must be a list with one name per element."
        )
    element_names = tuple(map(str, names))
    if len(set(element_names)) < len(element_names):
        duplicate = next(name for name in element_names if element_names.count(name) > 1)
        raise ConfigError(f"The environment's {attribute} has '{duplicate}' twice: every element needs a unique name.")
    return element_names


def _noted(path: Path, read: "BoxReading") -> str:
    forced = f" (world.options.state_keys=[{path[0]}] reads its {read.size} numbers)" if path and read.size else ""
    return f"'{dotted(path)}' {read.note}{forced if read.kind == 'out' else ''}"


def leaves(space: spaces.Space, path: Path) -> list[tuple[Path, spaces.Space]]:
    """Return every leaf space in dictionaries and tuples, with its path."""
    if isinstance(space, spaces.Dict):
        return [leaf for key, item in space.spaces.items() for leaf in leaves(item, (*path, key))]
    if isinstance(space, spaces.Tuple):
        return [leaf for place, item in enumerate(space.spaces) for leaf in leaves(item, (*path, place))]
    return [(path, space)]


def named_images(found: Mapping[Path, "BoxReading"]) -> tuple[dict[str, ImageEntry], list[str]]:
    """Return the images under unique names, and notes on those that differ from the entry's key.

    Raises ConfigError when no part of the path makes one unique.
    """
    pictures, notes = dict[str, ImageEntry](), list[str]()
    for path, entry in found.items():
        length = next(
            (n for n in range(1, len(path)) if sum(other[-n:] == path[-n:] for other in found) == 1), len(path)
        )
        length = max(length, min(2, len(path))) if path[-1:] == (OWN_VIEW,) else length
        camera = dotted(path[-length:]) if path else "pixels"
        short = lerobot_name((camera,)).removeprefix("images.")
        camera = (short if all(short not in map(str, other) for other in found) else camera).replace("/", "_")
        camera = f"observation.{camera}" if camera == OWN_VIEW else camera
        if camera in pictures:
            raise ConfigError(f"Two images of the observation have the name '{camera}': rename one of them.")
        pictures[camera] = ImageEntry(path, entry.shape, entry.axis, entry.scale)
        if path and camera != str(path[-1]):
            notes.append(f"'{dotted(path)}' {list(entry.shape)} is used as the camera '{camera}'")
    return pictures, notes


@dataclass(frozen=True)
class BoxReading:
    """Type of an entry: "numbers" (size of them), "picture", "text", or "out" (omitted); note: message for the user."""

    kind: str
    shape: tuple[int, ...] = ()
    size: int = 0
    choices: spaces.Space | None = None
    axis: int | None = None
    scale: int = 1
    note: str = ""


def read_box(space: spaces.Space, as_numbers: bool = False) -> BoxReading:
    """Return the type of an entry of a leaf space.

    An image is a uint8 Box [h, w, C], [C, h, w] or [h, w], or one of another dtype with bounds 0 to 1 or 0 to 255 that
    is large enough; C: 1, 3 or 4 channels. Other Boxes are numbers when they have one axis, or at most MOST elements
    and no image shape. as_numbers: the user states that an otherwise omitted entry is numbers.
    """
    if isinstance(space, spaces.Box):
        return box_reading(space, as_numbers)
    if isinstance(space, spaces.Text):
        return BoxReading("text")
    if isinstance(space, CHOICES):
        size = int(spaces.flatdim(space))
        if size <= MOST or as_numbers:
            one_hot = "" if isinstance(space, spaces.MultiBinary) else ", one-hot"
            return BoxReading("numbers", (size,), size, space, note=f"{space} is read as {size} numbers{one_hot}")
        return BoxReading("out", note=f"{space} is ignored: {size} choices cannot be read as numbers")
    kind = type(space).__name__
    return BoxReading("out", note=f"is ignored: a {kind} has no fixed size (a Box, Discrete or Dict has)")


def box_reading(box: spaces.Box, as_numbers: bool) -> BoxReading:
    """Return the type of a Box, see `read_box`."""
    shape = tuple(box.shape)
    while len(shape) > 3 and shape[0] == 1:
        shape = shape[1:]
    size, described = int(np.prod(shape)), f"{list(box.shape)} {box.dtype}"
    if not size:
        return BoxReading("out", note=f"{described} is ignored: it is empty")
    lowest, highest = float(box.low.min()), float(box.high.max())
    scale = {1.0: 255}.get(highest, 1 if 128 <= highest <= 255 else 0) if lowest == 0 else 0
    axis, byte = channel_axis(shape), box.dtype == np.uint8
    pixels = {0: shape[1:], -1: shape[:2]}.get(axis, shape[-2:]) if axis is not None else shape[-2:]
    large = len(shape) > 1 and min(pixels) >= SMALLEST
    if scale and ((axis is not None and (byte or large)) or (len(shape) == 2 and large and (byte or size > MOST))):
        return BoxReading(
            "picture", shape, axis=axis, scale=scale, note=_converted(described, shape, axis, byte, scale)
        )
    flat = BoxReading("numbers", tuple(box.shape), size)
    if len(shape) < 2:
        long = f"{described} is read as {size} numbers: is it a flattened image?" if size > 2 * MOST else ""
        return flat if not long else BoxReading("numbers", tuple(box.shape), size, note=long)
    shaped = (len(shape) > 2 and (large or byte)) or (axis is not None and large)
    if as_numbers or (size <= MOST and not shaped):
        return BoxReading("numbers", tuple(box.shape), size, note=f"{described} is read as {size} numbers, row by row")
    reason = _no_picture(shape, axis, (lowest, highest))
    return BoxReading("out", size=size, note=f"{described} is ignored: {reason}")


def _converted(described: str, shape: Sequence[int], axis: int | None, byte: bool, scale: int) -> str:
    """Return a note on the conversion of an image of this shape [..] to a camera's format; "" when nothing changes."""
    changes = ["converted to uint8 (0 to 1 becomes 0 to 255)"] if scale > 1 else [] if byte else ["rounded to uint8"]
    if axis is not None and shape[axis] == 4:
        changes.append("without its fourth channel")
    return f"{described} is {', '.join(changes)}" if changes else ""


def _no_picture(shape: Sequence[int], axis: int | None, bounds: tuple[float, float]) -> str:
    """Return the reason why an entry of this shape [..] is not an image."""
    stack = f"a stack of {shape[0]} images? Policies have their own history: register it without the stack"
    if len(shape) > 3:
        return stack
    if axis is None and len(shape) == 3 and shape[-1] < SMALLEST:
        return f"an image has 1, 3 or 4 channels, not {shape[-1]}"
    if axis is None and len(shape) == 3:
        return f"{stack}, or an image of {shape[0]} channels? Images need 1, 3 or 4 channels, on the last axis"
    return (
        f"the bounds of an image must be 0 to 255 or 0 to 1, but these are {bounds[0]:g} to {bounds[1]:g} (depth, "
        "classes?)"
    )


def channel_axis(shape: Sequence[int]) -> int | None:
    """Return the channel axis of an image shape, [h, w, C] or [C, h, w]; None when it is not an image."""
    if len(shape) != 3:
        return None
    if 3 in (shape[-1], shape[0]):
        return -1 if shape[-1] == 3 else 0
    if shape[-1] in (1, 4):
        return -1
    return 0 if shape[0] == 1 else None


def resized(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return `image` as uint8 [height, width, 3], by nearest neighbour.

    It is [h, w, C], or [C, h, w] with one or three channels C. One (grey) is repeated; the fourth (alpha) is dropped.
    Raises ConfigError on any other shape, and when its dtype is not uint8.
    """
    axis = channel_axis(image.shape)
    if axis is None or image.dtype != np.uint8:
        description = f"{list(image.shape)} {image.dtype}"
        raise ConfigError(f"The environment renders {description}: an image must be uint8 with 1, 3 or 4 channels.")
    image = np.moveaxis(image, axis, -1)[..., :3]
    # The middle of each new pixel falls into one old pixel, whose colour it takes.
    rows = (np.arange(height) + 0.5) * image.shape[0] / height
    columns = (np.arange(width) + 0.5) * image.shape[1] / width
    pixels = image[rows.astype(int)][:, columns.astype(int)]
    return np.ascontiguousarray(np.broadcast_to(pixels, (height, width, 3)), dtype=np.uint8)


def instruction_of(info: Mapping[str, Any], observation: Any, texts: Sequence[Path], ask: Callable[[str], Any]) -> str:
    """Return the task text that an environment reports for an episode, "" when it reports none.

    It is looked up, in this order, in `info`, among the observation's texts, and, as LeRobot does, among the
    environment's attributes; ask: returns an attribute, None when there is none.
    """
    candidates = [info.get(key) for key in TASK_KEYS]
    candidates += [entry_at(observation, path) for path in texts if path[-1:] and path[-1] in TASK_KEYS]
    candidates += [ask(name) for name in ("task_description", "task")]
    return next((each.strip() for each in candidates if isinstance(each, str) and each.strip()), "")


TASK_KEYS = ("task", "task_description", "language_instruction", "instruction")
"""Entries of `info`, or texts of the observation, that contain the task."""


keep_former_names(
    __name__,
    {
        "Picture": "ImageEntry",
        "named_pictures": "named_images",
        "Part": "VectorEntry",
        "reading": "read_box",
        "Reading": "BoxReading",
    },
)
