"""The window of the last H frames against a queue, one frame at a time."""

from collections import deque

import numpy as np
import pytest

from robopolicy.core.history import (
    initial_window,
    newest_window,
    repeat_last_valid,
    shift_window,
    shifted_indices,
    shifted_window,
)
from robopolicy.core.spec import Field


def slow(frames: list[np.ndarray], history: int) -> np.ndarray:
    """A queue that begins with the first frame repeated."""
    queue = deque([frames[0]] * history, maxlen=history)
    for frame in frames[1:]:
        queue.append(frame)
    return np.stack(queue)


@pytest.mark.parametrize("history", [1, 2, 5])
@pytest.mark.parametrize("shape", [(), (3,), (4, 4, 3)])
def test_a_window_moves_like_a_queue(history, shape):
    draws = np.random.default_rng(history)
    rows, chunk = 6, 4
    rows_of_frames = [[draws.random(shape)] for _ in range(rows)]
    window = initial_window(np.stack([np.stack(frames) for frames in rows_of_frames]), history)
    for _ in range(3):
        new, length = draws.random((rows, chunk, *shape)), draws.integers(0, chunk + 1, rows)
        window = shift_window(window, new, length)
        for row in range(rows):
            rows_of_frames[row] += list(new[row, : length[row]])
            assert np.array_equal(window[row], slow(rows_of_frames[row], history))
    new = draws.random((rows, chunk, *shape))
    every = np.full(rows, chunk)
    assert np.array_equal(shift_window(window, new), shifted_window(np.concatenate([window, new], 1), every, history))


def test_a_window_begins_with_the_newest_known_frames_and_repeats_the_first_where_there_are_too_few():
    frames = np.arange(6).reshape(2, 3)
    assert initial_window(frames, 2).tolist() == [[1, 2], [4, 5]]
    assert initial_window(frames, 3).tolist() == frames.tolist()
    assert initial_window(frames, 5).tolist() == [[0, 0, 0, 1, 2], [3, 3, 3, 4, 5]]


def test_frames_after_the_end_repeat_the_last_and_places_say_which_frames_are_new():
    assert repeat_last_valid(np.arange(8).reshape(2, 4), np.array([1, 3])).tolist() == [[0, 0, 0, 0], [4, 5, 6, 6]]
    assert shifted_indices(np.array([0, 2]), 3).tolist() == [[0, 1, 2], [2, 3, 4]]
    assert repeat_last_valid(np.arange(8).reshape(2, 4), None).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_who_reads_less_of_the_past_sees_its_newest_frames():
    observation = {"a": np.arange(24.0).reshape(2, 4, 3), "b": np.arange(8.0).reshape(2, 4), "task": np.array(["", ""])}
    fields = {"a": Field((3,)), "b": Field((4,)), "c": Field((1,))}
    newest_frames = newest_window(observation, fields, 2)
    assert np.array_equal(newest_frames["a"], observation["a"][:, 2:])
    assert (
        newest_frames["b"] is observation["b"] and newest_frames["task"] is observation["task"]
    )  # no window, and nobody's field
    assert newest_window(observation, fields, 4) is observation and newest_window(observation, fields, 5) is observation
