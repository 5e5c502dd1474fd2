"""From a client's message to the policy's observation: names, layouts, history and clear errors.

Accepted names, first match wins ("/" stands for "." or nesting, so {"observation": {"state": ...}} is fine):

    policy field                  names in the message
    observation.state             observation/state, state, or observation/joint_position + observation/gripper_position
    observation.environment_state observation/environment_state, environment_state
    observation.images.CAMERA     observation/images/CAMERA, images/CAMERA, observation/CAMERA, CAMERA,
                                  observation/CAMERA_image; for a wrist camera observation/wrist_image[_left];
                                  for the policy's first camera observation/image, observation/exterior_image_1_left
    task                          task, prompt

An array is one frame, or [H, ...] with the whole history (oldest first), which replaces what the server remembers.
Images are uint8, height x width x 3; 3 x height x width (openpi's ALOHA) is turned. Without a task the policy's first
instruction is used.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from robopolicy.core.errors import SpecError, did_you_mean
from robopolicy.core.history import begin, move
from robopolicy.core.policy import PolicySpec
from robopolicy.core.spec import ENVIRONMENT_STATE, IMAGE_PREFIX, STATE, TASK, Field, Observation, validate_observation

_PROPRIOCEPTION = ("observation/joint_position", "observation/gripper_position")


class Session:
    """What the server remembers of one robot: the last H frames of every field."""

    def __init__(self, spec: PolicySpec):
        self.spec = spec
        self._frames: dict[str, np.ndarray] = {}

    def reset(self) -> None:
        """Forget the history: the next frame begins an episode."""
        self._frames = {}

    def observe(self, message: Mapping[Any, Any]) -> Observation:
        """Add the message to the history and return the policy's observation [1, H, ...] with its task.

        Raises SpecError (field missing, wrong shape or dtype) and NonFiniteError; the history is then unchanged.
        """
        names = dict(_flatten(message))
        arrays = {key: _frames(key, field, names, self.spec) for key, field in self.spec.observation.items()}
        observation: Observation = {}
        for key, frames in arrays.items():
            known = self._frames.get(key) if len(frames) == 1 else None
            observation[key] = begin(frames[None], self.spec.history) if known is None else move(known, frames[None])
        validate_observation(observation, self.spec.observation, 1, self.spec.history)
        self._frames = dict(observation)
        observation[TASK] = np.array([_task(names, self.spec)])
        return observation


def _flatten(message: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in message.items():
        text = key.decode("utf-8", "replace") if isinstance(key, bytes) else str(key)
        name = prefix + text.replace(".", "/")
        if isinstance(value, Mapping):
            yield from _flatten(value, name + "/")
        else:
            yield name, value


def _names(key: str, spec: PolicySpec) -> list[str]:
    """Return every name under which a client may send `key`."""
    if key == STATE:
        return ["observation/state", "state"]
    if key == ENVIRONMENT_STATE:
        return ["observation/environment_state", "environment_state"]
    if not key.startswith(IMAGE_PREFIX):
        return [key.replace(".", "/")]
    camera = key.removeprefix(IMAGE_PREFIX)
    slashed = camera.replace(".", "/")
    names = [f"observation/images/{slashed}", f"images/{slashed}", f"observation/{slashed}", slashed]
    names.append(f"observation/{slashed}_image")
    if "wrist" in camera:
        names += ["observation/wrist_image", "observation/wrist_image_left"]
    if key == next(field for field in spec.observation if field.startswith(IMAGE_PREFIX)):
        names += ["observation/image", "observation/exterior_image_1_left"]
    return names


def _frames(key: str, field: Field, names: Mapping[str, Any], spec: PolicySpec) -> np.ndarray:
    """Return the frames [n, *shape] that the message holds for `key`."""
    accepted = _names(key, spec)
    found = next((name for name in accepted if name in names), None)
    if found is not None:
        return _shaped(key, found, np.asarray(names[found]), field)
    if key == STATE and all(name in names for name in _PROPRIOCEPTION):
        joined = np.concatenate([np.asarray(names[name], dtype=np.float32) for name in _PROPRIOCEPTION], axis=-1)
        return _shaped(key, " + ".join(_PROPRIOCEPTION), joined, field)
    kind = f"camera '{key.removeprefix(IMAGE_PREFIX)}'" if key.startswith(IMAGE_PREFIX) else f"field '{key}'"
    sent = ", ".join(sorted(names)) or "nothing"
    raise SpecError(
        f"The observation has no {kind}. Send it as one of: {', '.join(accepted)}. The message holds: {sent}."
        f"{did_you_mean(accepted[0], names) if names else ''}"
    )


def _shaped(key: str, name: str, array: np.ndarray, field: Field) -> np.ndarray:
    is_image = key.startswith(IMAGE_PREFIX)
    if array.dtype.kind not in "biuf" or (is_image and array.dtype != np.uint8):
        raise SpecError(f"'{name}' has dtype {array.dtype}; '{key}' needs {field.dtype}.")
    if not is_image:
        array = array.astype(np.float32)
    frames = array[None] if array.ndim == len(field.shape) else array
    if is_image and frames.ndim == 4 and frames.shape[1:] != field.shape:
        turned = np.moveaxis(frames, 1, -1)
        frames = turned if turned.shape[1:] == field.shape else frames
    if frames.ndim != len(field.shape) + 1 or frames.shape[1:] != field.shape or not len(frames):
        advice = " Resize the image before sending it." if is_image else ""
        raise SpecError(f"'{name}' has shape {list(array.shape)}; '{key}' needs {list(field.shape)}.{advice}")
    return frames


def _task(names: Mapping[str, Any], spec: PolicySpec) -> str:
    for name in ("task", "prompt"):
        if name in names:
            if not isinstance(names[name], str):
                raise SpecError(f"'{name}' is text, not {type(names[name]).__name__}.")
            return names[name]
    return spec.instructions[0] if spec.instructions else ""
