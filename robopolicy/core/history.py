"""The window of the last H frames that an observation shows: how it begins, and how new frames move it.

Axes: R row, H history frame (oldest first), C new frame (oldest first).
"""

import numpy as np


def begin(frames: np.ndarray, history: int) -> np.ndarray:
    """Return the window [R, H, *shape] of rows of which only `frames` [R, n >= 1, *shape] are known.

    It holds the newest H of them; where they are fewer, the first one repeats.
    """
    if frames.shape[1] == history:
        return frames
    return frames[:, np.maximum(np.arange(-history, 0), -frames.shape[1])]


def places(length: np.ndarray, history: int) -> np.ndarray:
    """Return where a moved window's frames lie in the old window followed by the new frames, [R, H] int64.

    length: [R], how many of the new frames each row takes; places from H on are new frames.
    """
    return length[:, None] + np.arange(history)


def latest(joined: np.ndarray, length: np.ndarray, history: int) -> np.ndarray:
    """Return the moved window [R, H, *shape] of `joined` [R, H + C, *shape], the old window followed by new frames.

    length: [R], how many of the new frames each row takes.
    """
    return select(joined, places(length, history))


def move(window: np.ndarray, frames: np.ndarray, length: np.ndarray | None = None) -> np.ndarray:
    """Return `window` [R, H, *shape] moved on by the first `length` [R] (None: all) of `frames` [R, C, *shape]."""
    taken = np.full(len(frames), frames.shape[1]) if length is None else length
    return latest(np.concatenate([window, frames], axis=1), taken, window.shape[1])


def held(frames: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Return `frames` [R, C, *shape] with all after the first `length` [R] >= 1 replaced by the last of those."""
    return select(frames, np.minimum(np.arange(frames.shape[1]), length[:, None] - 1))


def select(frames: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Return the frames [R, n, *shape] at places `index` [R, n] of each row's `frames` [R, C, *shape]."""
    return frames[np.arange(len(frames))[:, None], index]
