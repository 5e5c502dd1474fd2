"""Keys of observations, LeRobot's, and the names under which a client may send them.

`observation.state` (robot state), `observation.environment_state` (objects, goals), `observation.images.<camera>` and
`task` (instruction).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from .errors import SpecError, did_you_mean

STATE = "observation.state"
QUEUE = "observation.action_queue"
"""Key of the queue of decided but not yet executed actions, [d * A] in world units, next action first; see
`core.delayed`.
"""
ENVIRONMENT_STATE = "observation.environment_state"
IMAGE_PREFIX = "observation.images."
TASK = "task"
HOLD = "latency_hold"
"""Option of every world: hold action before the first chunk ("zero" or "last", see `element_kinds`)."""


def camera_of(key: str) -> str:
    """Return the camera of an image's key; other keys are returned unchanged."""
    return key[len(IMAGE_PREFIX) :] if key.startswith(IMAGE_PREFIX) else key


def cameras_of(keys: Iterable[str]) -> tuple[str, ...]:
    """Return the camera names among observation keys."""
    return tuple(camera_of(key) for key in keys if key.startswith(IMAGE_PREFIX))


def accepted_names(fields: Iterable[str], rename: Mapping[str, str]) -> dict[str, list[str]]:
    """Return every name under which a client may send the fields of a policy, field -> names.

    rename: name in the client's messages -> field. Raises SpecError on an unknown field.
    """
    fields = list(fields)
    names_of_field = {key: _names(key, cameras_of(fields)) for key in fields}
    for name, key in rename.items():
        if key not in names_of_field:
            raise SpecError(
                f"'{name}' is renamed to '{key}', which is not a field of the policy.{did_you_mean(key, fields)}"
            )
        names_of_field[key].insert(0, name.replace(".", "/"))
    return names_of_field


def _names(key: str, cameras: Sequence[str]) -> list[str]:
    if key == STATE:
        return ["observation/state", "state"]
    if key == ENVIRONMENT_STATE:
        return ["observation/environment_state", "environment_state"]
    if not key.startswith(IMAGE_PREFIX):
        return [key.replace(".", "/")]
    camera = camera_of(key)
    other_names = [
        name for other in cameras if other != camera for name in (*_own_names(other), *_alike(other, cameras))
    ]
    return [*_own_names(camera), *(name for name in _alike(camera, cameras) if name not in other_names)]


def _own_names(camera: str) -> list[str]:
    name = camera.replace(".", "/")
    return [f"observation/images/{name}", f"images/{name}", f"observation/{name}", name]


def _alike(camera: str, cameras: Sequence[str]) -> list[str]:
    """Return alternative names of this camera that could not mean another camera."""
    names = [f"observation/{camera.replace('.', '/')}_image"]
    if "wrist" in camera:
        names += ["observation/wrist_image", "observation/wrist_image_left"]
    if camera == cameras[0]:
        names += ["observation/image", "observation/exterior_image_1_left"]
    return names
