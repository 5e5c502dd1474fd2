"""Conversion of client messages to the policy's observation: names, layouts, history and clear errors.

Accepted names ("/" also stands for "." or nesting, so {"observation": {"state": ...}} is valid); several names for one
field must have equal values:

    policy field                  names in the message
    observation.state             observation/state, state, or observation/joint_position + observation/gripper_position
    observation.environment_state observation/environment_state, environment_state
    observation.images.CAMERA     observation/images/CAMERA, images/CAMERA, observation/CAMERA, CAMERA,
                                  observation/CAMERA_image; for a wrist camera observation/wrist_image[_left];
                                  for the policy's first camera observation/image, observation/exterior_image_1_left;
                                  of these three kinds those that no other camera goes by
    task                          task, prompt

Custom names are mapped to those in the left column (`rename`). An array is one frame, or [n <= H, ...], the newest
frames (oldest first), which replace the frames stored on the server. Images are RGB, uint8 (or floats from 0 to 1,
which are multiplied by 255), height x width x 3; 3 x height x width (openpi's ALOHA) is transposed, and other sizes are
resized with black borders, as openpi's server does. BGR images, as OpenCV reads them, cannot be detected: convert them
with picture[..., ::-1]. Without a task, a policy's only instruction is used; a policy with several raises an error.
Needs only numpy and msgpack.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from robopolicy.client.images import pixels, resize_with_padding
from robopolicy.client.keys import accepted_names
from robopolicy.client.protocol import IMAGE_BYTES, OURS, Limits
from robopolicy.core.errors import SpecError, did_you_mean
from robopolicy.core.history import initial_window, shift_window
from robopolicy.core.spec import (
    IMAGE_PREFIX,
    STATE,
    TASK,
    Field,
    Observation,
    PolicySpec,
    validate_observation,
)

_PROPRIOCEPTION = ("observation/joint_position", "observation/gripper_position")


class Session:
    """Server-side history of one robot: the last H frames of every field.

    rename: name in the client's messages -> the policy's field; limits: of the message contents.
    """

    def __init__(self, spec: PolicySpec, rename: Mapping[str, str] | None = None, limits: Limits | None = None):
        self.spec, self.limits = spec, limits or Limits.of(spec)
        self._accepted = accepted_names(spec.observation, rename or {})
        self._frames: dict[str, np.ndarray] = {}

    def reset(self) -> None:
        """Clear the history: the next frame starts an episode."""
        self._frames = {}

    def observe(self, message: Mapping[Any, Any]) -> Observation:
        """Add the message to the history and return the policy's observation [1, H, ...] with its task.

        Raises SpecError (missing field, wrong shape or dtype, exceeded limit) and NonFiniteError; the history is then
        unchanged.
        """
        names = flat(message, self.limits)
        if unknown_keys := [name for name in names if name.startswith("robopolicy/")]:
            raise SpecError(
                f"'{unknown_keys[0].replace('/', '.')}' is not a key of a "
                f"request.{did_you_mean(unknown_keys[0], OURS)} Write such keys at the top level of a message, "
                "without nesting."
            )
        arrays = {key: self._read(key, field, names) for key, field in self.spec.observation.items()}
        observation: Observation = {}
        for key, frames in arrays.items():
            history = self._frames.get(key) if len(frames) == 1 else None
            observation[key] = (
                initial_window(frames[None], self.spec.history)
                if history is None
                else shift_window(history, frames[None])
            )
        validate_observation(observation, self.spec.observation, 1, self.spec.history)
        task = _task(names, self.spec)
        # Arrays may be views of the message: a copy keeps H frames alive, not the whole message.
        self._frames = {key: frames.copy() for key, frames in observation.items()}
        observation[TASK] = np.array([task])
        return observation

    def _read(self, key: str, field: Field, names: Mapping[str, Any]) -> np.ndarray:
        """Return the frames [n <= H, *shape] that the message contains for `key`."""
        matches = [name for name in dict.fromkeys(self._accepted[key]) if name in names]
        if matches:
            _require_same(key, matches, names)
            return self._shaped(key, matches[0], _array(matches[0], names[matches[0]]), field)
        if key == STATE and all(name in names for name in _PROPRIOCEPTION):
            parts = [_array(name, names[name]) for name in _PROPRIOCEPTION]
            if parts[0].ndim != parts[1].ndim or parts[0].shape[:-1] != parts[1].shape[:-1] or not parts[0].ndim:
                raise SpecError(f"{' and '.join(_PROPRIOCEPTION)} have shapes {[list(each.shape) for each in parts]}.")
            return self._shaped(key, " + ".join(_PROPRIOCEPTION), np.concatenate(parts, axis=-1), field)
        raise SpecError(self._missing(key, names))

    def _missing(self, key: str, names: Mapping[str, Any]) -> str:
        """Return the error message for a message without a field named like `key`."""
        image, names_of_key = key.startswith(IMAGE_PREFIX), self._accepted[key]
        kind = f"camera '{key.removeprefix(IMAGE_PREFIX)}'" if image else f"field '{key}'"
        used_names = {next((name for name in each if name in names), "") for each in self._accepted.values()}
        unused_values = {
            name: value for name, value in names.items() if name not in used_names and not isinstance(value, str)
        }
        unused = [name for name, value in unused_values.items() if (getattr(value, "ndim", 1) >= 3) == image]
        text = f"The observation has no {kind}. Send it as one of: {', '.join(names_of_key)}. The message contains: "
        text += f"{', '.join(sorted(names)) or 'nothing'}."
        if image and len(unused) == 1:
            return f"{text} If it is '{unused[0]}': start the server with serve.rename={{{unused[0]}: {key}}}."
        return text + (did_you_mean(names_of_key[0], unused) if unused else "")

    def _shaped(self, key: str, name: str, array: np.ndarray, field: Field) -> np.ndarray:
        """Return `array`, one frame or several, as frames [n <= H, *shape] of `field`."""
        is_image = key.startswith(IMAGE_PREFIX)
        if array.dtype.kind not in "biuf":
            raise SpecError(f"'{name}' has dtype {array.dtype}; '{key}' needs {field.dtype}.")
        frames = array[None] if array.ndim == len(field.shape) else array
        if frames.ndim == len(field.shape) + 1 and len(frames) > self.spec.history:
            raise SpecError(f"'{name}' has {len(frames)} frames; the policy reads at most {self.spec.history}.")
        if is_image:
            frames = self._images(key, name, frames, field)
        if frames.ndim != len(field.shape) + 1 or frames.shape[1:] != field.shape or not len(frames):
            raise SpecError(f"'{name}' has shape {list(array.shape)}; '{key}' needs {list(field.shape)}.")
        return frames if is_image else _float32(frames)

    def _images(self, key: str, name: str, frames: np.ndarray, field: Field) -> np.ndarray:
        """Return images [n, h, w, 3] or [n, 3, h, w] as [n, height, width, 3] of `field`, if possible."""
        if frames.dtype == np.uint8 and frames.shape[1:] == field.shape:
            return frames
        images = pixels(frames)
        if images is None and frames.dtype != np.uint8:
            range_text = f" up to {np.max(frames):g}" if frames.dtype.kind == "f" and frames.size else ""
            raise SpecError(
                f"'{name}' has dtype {frames.dtype}{range_text}; '{key}' needs uint8 (or floats from 0 to 1), RGB."
            )
        if images is None or images.ndim != 4 or not images.size:
            return frames
        height, width = images.shape[1:3]
        if images[0].size > self.limits.image:
            range_text = "1280 x 720" if self.limits.image == IMAGE_BYTES else str(self.limits.image // 3)
            raise SpecError(f"'{name}' is {width} x {height}, more than {range_text} pixels: reduce it before sending.")
        return np.stack([resize_with_padding(frame, field.shape[:2]) for frame in images])


def _require_same(key: str, found: Sequence[str], names: Mapping[str, Any]) -> None:
    """Raise SpecError when the names `found`, which all stand for `key`, have different values in a message."""
    first, *other_values = (names[name] for name in found)
    for name, other in zip(found[1:], other_values, strict=True):
        if not np.array_equal(_array(found[0], first), _array(name, other)):
            raise SpecError(f"'{found[0]}' and '{name}' both mean '{key}' but differ: send one of them.")


def _array(name: str, value: Any) -> np.ndarray:
    """Return the entry `name` of a message as an array. Raises SpecError if it is not one."""
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, bytes | str):
        coded = " Encoded images (JPEG, PNG) are not supported: send the pixels." if isinstance(value, bytes) else ""
        raise SpecError(
            f"'{name}' is {len(value)} {'bytes' if isinstance(value, bytes) else 'characters'} without a shape and a "
            f"dtype: send an array, as packed by openpi_client.msgpack_numpy.{coded}"
        )
    try:
        array = np.asarray(value)
        are_pixels = (
            array.ndim >= 3 and array.dtype == np.int64 and array.size and 0 <= array.min() <= array.max() <= 255
        )
        return array.astype(np.uint8) if are_pixels else array  # lists say no dtype, and pixels in them are certain
    except (ValueError, OverflowError, TypeError) as error:
        raise SpecError(f"'{name}' is not an array ({str(error)[:100]}).") from error


def _float32(array: np.ndarray) -> np.ndarray:
    """Return numbers as float32; values beyond its range become infinite and are refused later."""
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(np.float32)


def flat(message: Mapping[Any, Any], limits: Limits) -> dict[str, Any]:
    """Return {"a/b": value} of nested mappings. Raises SpecError beyond a limit."""
    names: dict[str, Any] = {}
    waiting: list[tuple[str, Mapping[Any, Any], int]] = [("", message, 1)]
    while waiting:
        prefix, part, depth = waiting.pop()
        for key, value in part.items():
            text = key.decode("utf-8", "replace") if isinstance(key, bytes) else str(key)[: limits.name + 1]
            name = prefix + text.replace(".", "/")
            if len(name) > limits.name or depth > limits.depth or len(names) >= limits.names:
                raise SpecError(
                    f"A message may have at most {limits.names} fields, nested {limits.depth} deep, with names of at "
                    f"most {limits.name} characters; this one exceeds that at '{name[:40]}...'."
                )
            if isinstance(value, Mapping):
                waiting.append((name + "/", value, depth + 1))
            elif name in names:
                raise SpecError(f"The message contains '{name}' twice: '/' is equivalent to '.' and to nesting.")
            else:
                names[name] = value
    return names


def _task(names: Mapping[str, Any], spec: PolicySpec) -> str:
    texts = {name: names[name] for name in (TASK, "prompt") if name in names}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise SpecError(f"'{name}' must be text, not {type(text).__name__}.")
    if len(set(texts.values())) > 1:
        raise SpecError("'task' and 'prompt' differ: send one of them.")
    if texts:
        return next(iter(texts.values()))
    return spec.instructions[0] if len(spec.instructions) == 1 else ""
