"""The window of the last H frames that an observation shows: how it begins, and how new frames move it.

Axes: R row, H history frame (oldest first), C new frame (oldest first).
"""

from collections.abc import Mapping

import numpy as np

from robopolicy.core.arrays import Array
from robopolicy.core.spec import Field, Observation


def begin(frames: Array, history: int) -> Array:
    """Return the window [R, H, *shape] of rows of which only `frames` [R, n >= 1, *shape] are known.

    It holds the newest H of them; where they are fewer, the first one repeats.
    """
    if frames.shape[1] == history:
        return frames
    return frames[:, np.maximum(np.arange(-history, 0), -frames.shape[1])]


def newest(observation: Observation, fields: Mapping[str, Field], history: int) -> Observation:
    """Return an observation whose `fields` hold the newest H frames where they hold more, [R, H, *shape].

    For who reads less of the past than somebody else in the same world. What is no such window stays as it is.
    """
    cut = {
        key: value[:, -history:]
        for key, field in fields.items()
        if (value := observation.get(key)) is not None
        and value.ndim == len(field.shape) + 2
        and value.shape[1] > history
    }
    return {**observation, **cut} if cut else observation


def places(length: Array, history: int) -> Array:
    """Return where a moved window's frames lie in the old window followed by the new frames, [R, H] int64.

    length: [R], how many of the new frames each row takes; places from H on are new frames.
    """
    return length[:, None] + np.arange(history)


def latest(joined: Array, length: Array, history: int) -> Array:
    """Return the moved window [R, H, *shape] of `joined` [R, H + C, *shape], the old window followed by new frames.

    length: [R], how many of the new frames each row takes.
    """
    return select(joined, places(length, history))


def move(window: Array, frames: Array, length: Array | None = None) -> Array:
    """Return `window` [R, H, *shape] moved on by the first `length` [R] (None: all) of `frames` [R, C, *shape]."""
    if length is None:
        new = frames[:, -window.shape[1] :]
        return np.concatenate([window[:, new.shape[1] :], new], axis=1)
    return latest(np.concatenate([window, frames], axis=1), length, window.shape[1])


def held(frames: Array, length: Array | None) -> Array:
    """Return `frames` [R, C, *shape] with all after the first `length` [R] >= 1 (None: all) replaced by their last."""
    if length is None:
        return frames.copy()
    return select(frames, np.minimum(np.arange(frames.shape[1]), length[:, None] - 1))


def select(frames: Array, index: Array) -> Array:
    """Return the frames [R, n, *shape] at places `index` [R, n] of each row's `frames` [R, C, *shape]."""
    return frames[np.arange(len(frames))[:, None], index]
