"""Data that is no LeRobotDataset of today: what the errors print, and what the page shows, works as it stands."""

import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from robopolicy.core.errors import DataError
from robopolicy.core.spec import IMAGE_PREFIX, STATE
from robopolicy.data.lerobot_reading import read_dataset, read_information

PAGE = Path(__file__).parents[2] / "robopolicy" / "data" / "README.md"


def test_the_page_writes_a_dataset_of_another_format(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draws = np.random.default_rng(0)
    states, actions = draws.random((2, 7, 2), dtype=np.float32)
    images = np.repeat(np.arange(7, dtype=np.uint8) * 30, 32 * 32 * 3).reshape(7, 32, 32, 3)
    np.savez("demos.npz", states=states, actions=actions, images=images, episode_ends=np.array([3, 7]))
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "convert.py").write_text(code)
    runpy.run_path(str(tmp_path / "convert.py"))
    episodes = read_dataset(tmp_path / "data")
    assert episodes.lengths.tolist() == [3, 4] and episodes.tasks == ("reach the goal",) * 2
    assert np.array_equal(episodes.actions.numpy(), actions)
    assert episodes.observation_fields[STATE].names == ("x", "y")
    assert abs(episodes.observation[IMAGE_PREFIX + "top"][2].float().mean() - 60) < 1


def old(folder, version):
    """Write a dataset as LeRobot did before v3: a file an episode, and lines of JSON beside them."""
    feature = {"dtype": "float32", "shape": [2], "names": ["x", "y"]}
    whole = {"dtype": "int64", "shape": [1], "names": None}
    own = dict.fromkeys(("frame_index", "episode_index", "index", "task_index"), whole)
    own["timestamp"] = {**whole, "dtype": "float32"}
    features = {STATE: feature, "action": feature, **own}
    lines = {"tasks": [{"task_index": 0, "task": "reach"}], "episodes": [], "episodes_stats": []}
    (folder / "meta").mkdir(parents=True)
    (folder / "data" / "chunk-000").mkdir(parents=True)
    for episode in range(2):
        steps = np.arange(4)
        values = {STATE: list(np.ones((4, 2), np.float32) * episode), "action": list(np.ones((4, 2), np.float32))}
        values |= {"timestamp": (steps / 10).astype(np.float32), "frame_index": steps, "index": steps + 4 * episode}
        values |= {"episode_index": np.full(4, episode), "task_index": np.zeros(4, np.int64)}
        pq.write_table(pa.table(values), folder / "data" / "chunk-000" / f"episode_{episode:06d}.parquet")
        lines["episodes"].append({"episode_index": episode, "tasks": ["reach"], "length": 4})
        sizes = {name: feature["shape"][0] for name, feature in features.items()}
        some = {name: dict.fromkeys(("min", "max", "mean", "std"), [0.0] * size) for name, size in sizes.items()}
        stats = {name: {**each, "count": [4]} for name, each in some.items()}
        lines["episodes_stats"].append({"episode_index": episode, "stats": stats})
    for name, each in lines.items():
        (folder / "meta" / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in each))
    information = {
        "codebase_version": version,
        "robot_type": None,
        "total_episodes": 2,
        "total_frames": 8,
        "total_tasks": 1,
        "total_videos": 0,
        "total_chunks": 1,
        "chunks_size": 1000,
        "fps": 10,
        "splits": {"train": "0:2"},
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": None,
        "features": features,
    }
    (folder / "meta" / "info.json").write_text(json.dumps(information))
    return folder


def test_the_command_for_an_older_dataset_converts_it_where_it_lies(tmp_path, monkeypatch):
    folder = old(tmp_path / "my data", "v2.1")
    with pytest.raises(DataError, match=r"format v2\.1, this reads v3") as caught:
        read_dataset(folder)
    _, module, *options = shlex.split(str(caught.value).partition("python ")[2])
    monkeypatch.setattr(sys, "argv", ["convert", *options])
    runpy.run_module(module, run_name="__main__")
    episodes = read_dataset(folder)
    assert episodes.lengths.tolist() == [4, 4] and episodes.tasks == ("reach", "reach")


def test_what_nobody_converts_is_said_honestly(tmp_path):
    with pytest.raises(DataError, match=r"takes data sets on the Hugging Face hub and no folders.*data/README.md"):
        read_information(old(tmp_path / "two", "v2.0"))
    with pytest.raises(DataError, match="It is newer: update robopolicy"):
        read_information(old(tmp_path / "four", "v4.0"))
    (tmp_path / "zarr").mkdir()
    with pytest.raises(DataError, match=r"no meta/info.json. .*hdf5, zarr, npz.*LeRobotDataset.create"):
        read_information(tmp_path / "zarr")
    (tmp_path / "low_dim.hdf5").write_bytes(b"x")
    with pytest.raises(DataError, match=r"hdf5 is a file, and a LeRobotDataset is a folder.*LeRobotDataset.create"):
        read_information(tmp_path / "low_dim.hdf5")
