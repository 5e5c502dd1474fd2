"""A dataset is not written with numbers that are none: its statistics would be worthless, and so would training be."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from robopolicy.core.errors import DataError
from robopolicy.core.spec import STATE
from robopolicy.data.lerobot_format import read_dataset, write_dataset
from robopolicy.data.lerobot_statistics import vector_statistics
from robopolicy.data.record import record
from sims.registry import load_task, make_world


@pytest.fixture(scope="module")
def episodes():
    world = make_world("reach_planar", 3)
    yield record(world, load_task("reach_planar").expert(), np.arange(3))
    world.close()


def spoiled(episodes, key, number):
    if key == "action":
        actions = episodes.actions.clone()
        actions[int(episodes.starts[1]), 1] = number
        return replace(episodes, actions=actions)
    frames = episodes.observation[key].clone()
    frames[int(episodes.frame_starts[1]) + 1, 1] = number
    return replace(episodes, observation={**episodes.observation, key: frames})


@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize(("key", "element"), [("action", "elbow"), (STATE, "elbow_cos")])
def test_what_is_not_finite_is_refused_with_column_and_episode(episodes, tmp_path, key, element, number):
    with pytest.raises(DataError, match=rf"'{key}' \({element}\).*episode 1"):
        write_dataset(spoiled(episodes, key, number), tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_appending_it_leaves_the_dataset_as_it_was(episodes, tmp_path):
    write_dataset(episodes, tmp_path / "data")
    with pytest.raises(DataError, match="episode 1"):
        write_dataset(spoiled(episodes, STATE, np.nan), tmp_path / "data", existing="append")
    assert torch.equal(read_dataset(tmp_path / "data").actions, episodes.actions)


def test_statistics_of_no_numbers_say_where_they_are(episodes):
    values = np.array([[1.0], [2.0], [np.nan], [4.0]], dtype=np.float32)
    with pytest.raises(DataError, match=r"'speed'.*episode 1"):
        vector_statistics(values, np.array([2, 2]), column="speed")
