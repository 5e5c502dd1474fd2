"""Padded rollouts with masks: padding is never read, and no chunk crosses it."""

import numpy as np
import pytest
import torch

from robopolicy.cli import main
from robopolicy.core.errors import DataError
from robopolicy.core.spec import STATE
from robopolicy.data.formats.format import format_of
from robopolicy.data.formats.masked import Masked, runs_of
from robopolicy.data.lerobot_reading import read_dataset
from robopolicy.rl.offline.decisions import recorded_decisions
from robopolicy.rl.offline.interface import Interface

PADDING = 99.0


def write(path, masks, **more):
    """Write rollouts whose states and actions count their steps, with PADDING where masks [N, T] are 0."""
    masks = np.array(masks)
    steps = np.where(masks == 1, np.arange(masks.size).reshape(masks.shape) / 10, PADDING)
    arrays = {"observations": np.repeat(steps[..., None], 2, -1), "actions": steps[..., None]}
    arrays |= {"rewards": np.where(masks == 1, 1.0, PADDING)[..., None], "masks": masks[..., None]}
    np.savez(path, **{**arrays, "fps": 10, **more})
    return path


def transitions(path, folder, chunk=1):
    assert main(["convert", str(path), str(folder)]) == 0
    episodes = read_dataset(folder)
    interface = Interface(
        episodes.observation_fields,
        episodes.action_field,
        chunk=chunk,
        bounds=(torch.tensor([-1.0]), torch.tensor([1.0])),
    )
    return episodes, recorded_decisions(episodes, interface, 0.9).transitions


@pytest.mark.checks("ImagineBench")
def test_two_steps_and_padding_are_two_transitions_and_the_second_has_no_next_action(tmp_path):
    path = write(tmp_path / "one.npz", [[1, 1, 0]], task="tidy up")
    assert isinstance(format_of(path), Masked)
    episodes, data = transitions(path, tmp_path / "data")
    assert episodes.lengths.tolist() == [2] and episodes.tasks == ("tidy up",)
    assert len(data) == 2 and data.next_known.tolist() == [True, False]
    assert data.terminated.tolist() == [False, True] and data.reward.tolist() == [1.0, 1.0]


@pytest.mark.checks("ImagineBench")
@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_padding_is_never_drawn_and_chunks_never_cross_it(tmp_path, chunk):
    masks = [[1, 1, 0, 1, 1], [1, 1, 1, 1, 0], [0, 0, 1, 0, 0]]
    episodes, data = transitions(write(tmp_path / "some.npz", masks, task=["a", "b", "c"]), tmp_path / "data", chunk)
    assert episodes.lengths.tolist() == [2, 2, 4, 1] and episodes.tasks == ("a", "a", "b", "c")
    assert episodes.terminated.tolist() == [False, True, True, True]
    values = np.concatenate([episodes.observation[STATE].numpy().ravel(), episodes.actions.numpy().ravel()])
    assert values.max() < PADDING
    place = episodes.observation[STATE][:, 0]
    # What a chunk repeats at its episode's end is that episode's last action.
    last = {}
    for episode in range(len(episodes)):
        end = int(episodes.starts[episode] + episodes.lengths[episode]) - 1
        last[episode] = float(episodes.actions[end])
    assert float(place.max()) == pytest.approx(1.2)
    for row, episode in enumerate(data.episode.tolist()):
        assert float(data.action[row].max()) <= min(1.0, last[episode]) + 1e-6


def test_arrays_of_other_shapes_are_named(tmp_path):
    path = write(tmp_path / "some.npz", [[1, 1, 0]], fps=20, notes=np.zeros((2, 3)))
    with Masked().open(path) as source:
        assert source.fps == 20 and source.notes[0].startswith("1 of 3 steps")
        assert source.notes[1:] == ("These arrays do not begin with [1, 3] and are ignored: notes [2, 3].",)


def test_runs_of_masks_by_hand():
    masks = np.array([[1, 1, 0, 1], [0, 0, 0, 0], [0, 1, 1, 1]], dtype=bool)
    assert runs_of(masks).tolist() == [[0, 0, 2], [0, 3, 4], [2, 1, 4]]


@pytest.mark.parametrize(
    ("masks", "more", "message"),
    [
        ([[1, 2, 0]], {}, "must be 1"),
        ([[0, 0, 0]], {}, "every step is padding"),
        ([[1, 1, 0]], {"actions": np.zeros((3, 1))}, "no array 'actions'"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path, masks, more, message):
    path = write(tmp_path / "bad.npz", masks, **more)
    with pytest.raises(DataError, match=message), Masked().open(path):
        pass
