"""From a client's message to the policy's observation: names, layouts, history and clear errors.

Accepted names, first match wins ("/" stands for "." or nesting, so {"observation": {"state": ...}} is fine):

    policy field                  names in the message
    observation.state             observation/state, state, or observation/joint_position + observation/gripper_position
    observation.environment_state observation/environment_state, environment_state
    observation.images.CAMERA     observation/images/CAMERA, images/CAMERA, observation/CAMERA, CAMERA,
                                  observation/CAMERA_image; for a wrist camera observation/wrist_image[_left];
                                  for the policy's first camera observation/image, observation/exterior_image_1_left;
                                  of these three kinds those that no other camera goes by
    task                          task, prompt

Names of one's own are mapped to those in the left column (`rename`). An array is one frame, or [n <= H, ...], the
newest frames (oldest first), which replace what the server remembers. Images are uint8, height x width x 3; 3 x height
x width (openpi's ALOHA) is turned, and other sizes are resized with black borders, as openpi's server does. Without a
task the policy's only instruction is used; one that reads several refuses to guess.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from robopolicy.core.errors import SpecError, did_you_mean
from robopolicy.core.history import begin, move
from robopolicy.core.policy import PolicySpec
from robopolicy.core.spec import ENVIRONMENT_STATE, IMAGE_PREFIX, STATE, TASK, Field, Observation, validate_observation
from robopolicy.serving.limits import Limits
from robopolicy.serving.protocol import OURS

_PROPRIOCEPTION = ("observation/joint_position", "observation/gripper_position")


class Session:
    """What the server remembers of one robot: the last H frames of every field.

    rename: name in the client's messages -> the policy's field; limits: of what is read of a message.
    """

    def __init__(self, spec: PolicySpec, rename: Mapping[str, str] | None = None, limits: Limits | None = None):
        self.spec, self.limits = spec, limits or Limits.of(spec)
        self._accepted = {key: _names(key, spec) for key in spec.observation}
        for name, key in (rename or {}).items():
            if key not in self._accepted:
                raise SpecError(
                    f"'{name}' is renamed to '{key}', no field of the policy.{did_you_mean(key, spec.observation)}"
                )
            self._accepted[key].insert(0, name.replace(".", "/"))
        self._frames: dict[str, np.ndarray] = {}

    def reset(self) -> None:
        """Forget the history: the next frame begins an episode."""
        self._frames = {}

    def observe(self, message: Mapping[Any, Any]) -> Observation:
        """Add the message to the history and return the policy's observation [1, H, ...] with its task.

        Raises SpecError (field missing, wrong shape or dtype, more than a limit allows) and NonFiniteError; the history
        is then unchanged.
        """
        names = _flat(message, self.limits)
        if unknown := [name for name in names if name.startswith("robopolicy/")]:
            raise SpecError(
                f"'{unknown[0].replace('/', '.')}' is nothing that a request can say.{did_you_mean(unknown[0], OURS)} "
                "Such names stand at the top of a message, in one piece."
            )
        arrays = {key: self._read(key, field, names) for key, field in self.spec.observation.items()}
        observation: Observation = {}
        for key, frames in arrays.items():
            known = self._frames.get(key) if len(frames) == 1 else None
            observation[key] = begin(frames[None], self.spec.history) if known is None else move(known, frames[None])
        validate_observation(observation, self.spec.observation, 1, self.spec.history)
        task = _task(names, self.spec)
        # Arrays may be views of the message: a copy keeps H frames alive, not the whole message.
        self._frames = {key: frames.copy() for key, frames in observation.items()}
        observation[TASK] = np.array([task])
        return observation

    def _read(self, key: str, field: Field, names: Mapping[str, Any]) -> np.ndarray:
        """Return the frames [n <= H, *shape] that the message holds for `key`."""
        accepted = self._accepted[key]
        found = next((name for name in accepted if name in names), None)
        if found is not None:
            return self._shaped(key, found, _array(found, names[found]), field)
        if key == STATE and all(name in names for name in _PROPRIOCEPTION):
            parts = [_array(name, names[name]) for name in _PROPRIOCEPTION]
            if parts[0].ndim != parts[1].ndim or parts[0].shape[:-1] != parts[1].shape[:-1] or not parts[0].ndim:
                raise SpecError(f"{' and '.join(_PROPRIOCEPTION)} have shapes {[list(each.shape) for each in parts]}.")
            return self._shaped(key, " + ".join(_PROPRIOCEPTION), np.concatenate(parts, axis=-1), field)
        kind = f"camera '{key.removeprefix(IMAGE_PREFIX)}'" if key.startswith(IMAGE_PREFIX) else f"field '{key}'"
        sent = ", ".join(sorted(names)) or "nothing"
        raise SpecError(
            f"The observation has no {kind}. Send it as one of: {', '.join(accepted)}. The message holds: {sent}."
            f"{did_you_mean(accepted[0], names) if names else ''}"
        )

    def _shaped(self, key: str, name: str, array: np.ndarray, field: Field) -> np.ndarray:
        """Return `array`, one frame or several, as frames [n <= H, *shape] of `field`."""
        is_image = key.startswith(IMAGE_PREFIX)
        if array.dtype.kind not in "biuf" or (is_image and array.dtype != np.uint8):
            raise SpecError(f"'{name}' has dtype {array.dtype}; '{key}' needs {field.dtype}.")
        frames = array[None] if array.ndim == len(field.shape) else array
        if frames.ndim == len(field.shape) + 1 and len(frames) > self.spec.history:
            raise SpecError(f"'{name}' has {len(frames)} frames; the policy reads the newest {self.spec.history}.")
        if is_image and frames.ndim == 4 and len(frames):
            frames = self._images(frames, field)
        if frames.ndim != len(field.shape) + 1 or frames.shape[1:] != field.shape or not len(frames):
            raise SpecError(f"'{name}' has shape {list(array.shape)}; '{key}' needs {list(field.shape)}.")
        return frames if is_image else _float32(frames)

    def _images(self, frames: np.ndarray, field: Field) -> np.ndarray:
        """Return images [n, h, w, 3] or [n, 3, h, w] as [n, height, width, 3] of `field`, where that can be done."""
        if frames.shape[1:] == field.shape:
            return frames
        if frames.shape[-1] != 3 and frames.shape[1] == 3:
            frames = np.moveaxis(frames, 1, -1)
        possible = frames.shape[-1] == 3 and 0 < frames[0].size <= self.limits.image
        return np.stack([resized(frame, field.shape[:2]) for frame in frames]) if possible else frames


def resized(image: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    """Return an image [h, w, 3] uint8 as [*size, 3]: scaled to fit, its aspect kept, centred on black."""
    height, width = size
    if image.shape[:2] == (height, width):
        return image
    scale = min(height / image.shape[0], width / image.shape[1])
    inner = max(1, round(scale * image.shape[0])), max(1, round(scale * image.shape[1]))
    scaled = Image.fromarray(image).resize((inner[1], inner[0]), Image.Resampling.BILINEAR)
    result = np.zeros((height, width, 3), np.uint8)
    top, left = (height - inner[0]) // 2, (width - inner[1]) // 2
    result[top : top + inner[0], left : left + inner[1]] = np.asarray(scaled)
    return result


def _array(name: str, value: Any) -> np.ndarray:
    """Return what a message holds under `name` as an array. Raises SpecError where it is none."""
    if isinstance(value, np.ndarray):
        return value
    try:
        return np.asarray(value)
    except (ValueError, OverflowError, TypeError) as error:
        raise SpecError(f"'{name}' is no array ({str(error)[:100]}).") from error


def _float32(array: np.ndarray) -> np.ndarray:
    """Return numbers as float32; those beyond its range become infinite, which is refused where they are used."""
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(np.float32)


def _flat(message: Mapping[Any, Any], limits: Limits) -> dict[str, Any]:
    """Return {"a/b": value} of nested mappings. Raises SpecError past a limit."""
    names: dict[str, Any] = {}
    waiting: list[tuple[str, Mapping[Any, Any], int]] = [("", message, 1)]
    while waiting:
        prefix, part, depth = waiting.pop()
        for key, value in part.items():
            text = key.decode("utf-8", "replace") if isinstance(key, bytes) else str(key)[: limits.name + 1]
            name = prefix + text.replace(".", "/")
            if len(name) > limits.name or depth > limits.depth or len(names) >= limits.names:
                raise SpecError(
                    f"A message has at most {limits.names} fields, nested {limits.depth} deep, with names of at most "
                    f"{limits.name} characters; this one goes beyond that at '{name[:40]}...'."
                )
            if isinstance(value, Mapping):
                waiting.append((name + "/", value, depth + 1))
            else:
                names[name] = value
    return names


def _names(key: str, spec: PolicySpec) -> list[str]:
    """Return every name under which a client may send `key`."""
    if key == STATE:
        return ["observation/state", "state"]
    if key == ENVIRONMENT_STATE:
        return ["observation/environment_state", "environment_state"]
    if not key.startswith(IMAGE_PREFIX):
        return [key.replace(".", "/")]
    camera = key.removeprefix(IMAGE_PREFIX)
    taken = [name for other in spec.cameras if other != camera for name in (*_own_names(other), *_alike(other, spec))]
    return [*_own_names(camera), *(name for name in _alike(camera, spec) if name not in taken)]


def _own_names(camera: str) -> list[str]:
    name = camera.replace(".", "/")
    return [f"observation/images/{name}", f"images/{name}", f"observation/{name}", name]


def _alike(camera: str, spec: PolicySpec) -> list[str]:
    """Return names that say this camera where no other camera could be meant by them."""
    names = [f"observation/{camera.replace('.', '/')}_image"]
    if "wrist" in camera:
        names += ["observation/wrist_image", "observation/wrist_image_left"]
    if camera == spec.cameras[0]:
        names += ["observation/image", "observation/exterior_image_1_left"]
    return names


def _task(names: Mapping[str, Any], spec: PolicySpec) -> str:
    for name in ("task", "prompt"):
        if name in names:
            if not isinstance(names[name], str):
                raise SpecError(f"'{name}' is text, not {type(names[name]).__name__}.")
            return names[name]
    return spec.instructions[0] if len(spec.instructions) == 1 else ""
