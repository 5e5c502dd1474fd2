"""Data that is no LeRobotDataset of today: what the errors print, and what the page shows, works as it stands."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from robopolicy.cli import main
from robopolicy.core.errors import DataError
from robopolicy.core.spec import IMAGE_PREFIX, STATE
from robopolicy.data.lerobot_reading import read_dataset, read_information

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "recorded_data.md"


def test_the_page_converts_an_npz_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(code, {})  # noqa: S102 (what the page shows)
    assert main(["convert", "demos.npz", "data"]) == 0
    episodes = read_dataset(tmp_path / "data")
    assert episodes.lengths.tolist() == [3, 4] and episodes.tasks == ("reach the goal",) * 2 and episodes.fps == 10
    assert set(episodes.observation) == {STATE, IMAGE_PREFIX + "image"}


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


@pytest.mark.parametrize("version", ["v2.0", "v2.1"])
def test_the_command_for_an_older_dataset_converts_it(tmp_path, version):
    folder = old(tmp_path / "my data", version)
    with pytest.raises(DataError, match=r"another format, LeRobotDataset v2\. Convert it: ") as caught:
        read_dataset(folder)
    assert main(shlex.split(str(caught.value).partition("robopolicy ")[2])) == 0
    episodes = read_dataset(tmp_path / "my data_v3")
    assert episodes.lengths.tolist() == [4, 4] and episodes.tasks == ("reach", "reach")


def test_what_nobody_converts_is_said_honestly(tmp_path):
    with pytest.raises(DataError, match="The format is newer: update robopolicy"):
        read_information(old(tmp_path / "four", "v4.0"))
    with pytest.raises(
        DataError, match=r"is a LeRobotDataset v1\.6, which is not supported: let LeRobot 0\.3 write it as v2"
    ):
        read_information(old(tmp_path / "one", "v1.6"))
    (tmp_path / "folder").mkdir()
    with pytest.raises(
        DataError,
        match=r"is an empty folder. A LeRobotDataset is a folder with meta/info.json. .*'robopolicy convert' reads",
    ):
        read_information(tmp_path / "folder")
    (tmp_path / "notes.txt").write_bytes(b"x")
    with pytest.raises(DataError, match=r"is a text file. A LeRobotDataset is a folder.*'robopolicy convert' reads"):
        read_information(tmp_path / "notes.txt")
    with pytest.raises(DataError, match=r"nowhere does not exist\."):
        read_information(tmp_path / "nowhere")
