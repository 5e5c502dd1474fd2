"""Observation history: initialise and shift the window of the last H frames.

Axes: R row, H history frame (oldest first), C new frame (oldest first).
"""

from collections.abc import Callable, Mapping

import numpy as np

from robopolicy.core.arrays import Array
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.spec import Field, Observation


def initial_window(frames: Array, history: int) -> Array:
    """Return the initial window [R, H, *shape] for rows with only `frames` [R, n >= 1, *shape] so far.

    It contains the newest H frames; if there are fewer, the first one is repeated.
    """
    if frames.shape[1] == history:
        return frames
    return frames[:, np.maximum(np.arange(-history, 0), -frames.shape[1])]


def newest_window(observation: Observation, fields: Mapping[str, Field], history: int) -> Observation:
    """Return an observation with `fields` cut to their newest H frames where they have more, [R, H, *shape].

    For policies that read a shorter history than others in the same world. Entries that are not such a window are
    unchanged.
    """
    shortened = {
        key: value[:, -history:]
        for key, field in fields.items()
        if (value := observation.get(key)) is not None
        and value.ndim == len(field.shape) + 2
        and value.shape[1] > history
    }
    return {**observation, **shortened} if shortened else observation


def shifted_indices(length: Array, history: int) -> Array:
    """Return the indices of the shifted window's frames in the old window followed by the new frames, [R, H] int64.

    length: [R], number of new frames per row; indices from H on are new frames.
    """
    return length[:, None] + np.arange(history)


def shifted_window(joined: Array, length: Array, history: int) -> Array:
    """Return the shifted window [R, H, *shape] from `joined` [R, H + C, *shape], the old window followed by new frames.

    length: [R], number of new frames per row.
    """
    return select(joined, shifted_indices(length, history))


def shift_drawn_window(window: Array, length: Array, draw: Callable[[Array, Array], Array]) -> Array:
    """Shift `window` [R, H, *shape] by the first `length` [R] frames of a chunk, drawing only those that are in the
    result.

    draw: rows [n] and steps of the chunk [n] -> frames [n, *shape].
    """
    history = window.shape[1]
    places = shifted_indices(length, history)
    shifted = select(window, np.minimum(places, history - 1))
    row, slot = np.nonzero(places >= history)
    shifted[row, slot] = draw(row, places[row, slot] - history)
    return shifted


def shift_window(window: Array, frames: Array, length: Array | None = None) -> Array:
    """Shift `window` [R, H, *shape] by the first `length` [R] (None: all) of `frames` [R, C, *shape]."""
    if length is None:
        new = frames[:, -window.shape[1] :]
        return np.concatenate([window[:, new.shape[1] :], new], axis=1)
    return shifted_window(np.concatenate([window, frames], axis=1), length, window.shape[1])


def repeat_last_valid(frames: Array, length: Array | None) -> Array:
    """Repeat the last valid frame: replace all of `frames` [R, C, *shape] after the first `length` [R] >= 1 (None:
    all).
    """
    if length is None:
        return frames.copy()
    return select(frames, np.minimum(np.arange(frames.shape[1]), length[:, None] - 1))


def select(frames: Array, index: Array) -> Array:
    """Return the frames [R, n, *shape] at indices `index` [R, n] of each row's `frames` [R, C, *shape]."""
    return frames[np.arange(len(frames))[:, None], index]


keep_former_names(
    __name__,
    {
        "begin": "initial_window",
        "newest": "newest_window",
        "places": "shifted_indices",
        "latest": "shifted_window",
        "move": "shift_window",
        "held": "repeat_last_valid",
    },
)
