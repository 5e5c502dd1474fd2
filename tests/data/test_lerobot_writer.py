"""The bulk writer's files equal those of LeRobot's own writer, feature by feature, and LeRobot's tools take them."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from moving_episodes import FRONT, moving_episodes

from robopolicy.core.episodes import Episodes
from robopolicy.data.lerobot_format import read_dataset, write_dataset

OWN = ("timestamp", "frame_index", "episode_index", "index", "task_index")


def lerobots_own(episodes: Episodes, folder: Path, like: Path, append: bool = False):
    """Write `episodes` frame by frame with LeRobot's recorder, with the features that `like` has."""
    from lerobot.configs.video import RGBEncoderConfig
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    information = json.loads((like / "meta" / "info.json").read_text())
    features = {key: value for key, value in information["features"].items() if key not in OWN}
    features = {key: {name: entry[name] for name in ("dtype", "shape", "names")} for key, entry in features.items()}
    encoder = {"rgb_encoder": RGBEncoderConfig(vcodec="h264", pix_fmt="yuv444p", crf=10)}
    if append:
        dataset = LeRobotDataset.resume("own/data", root=folder, **encoder)
    else:
        dataset = LeRobotDataset.create("own/data", information["fps"], features, root=folder, **encoder)
    for episode in range(len(episodes)):
        start, first = int(episodes.starts[episode]), int(episodes.frame_starts[episode])
        length = int(episodes.lengths[episode])
        for step in range(length):
            last = step == length - 1
            frame = {key: values[first + step].numpy() for key, values in episodes.observation.items()}
            rewards = {f"next.reward.{name}": values[start + step] for name, values in episodes.rewards.items()}
            scalars = {"next.done": last, "next.reward": episodes.reward[start + step], **rewards}
            scalars |= {"next.success": episodes.step_success[start + step]}
            scalars |= {"next.terminated": last and bool(episodes.terminated[episode])}
            scalars |= {"episode_seed": episodes.seeds[episode]}
            kinds = {"bool": np.bool_, "float32": np.float32, "int64": np.int64}
            frame |= {key: np.array([value], kinds[features[key]["dtype"]]) for key, value in scalars.items()}
            frame["action"] = episodes.actions[start + step].numpy()
            dataset.add_frame({**frame, "task": episodes.tasks[episode]})
        dataset.save_episode()
    dataset.finalize()


def assert_close(ours, theirs, where: str) -> None:
    """Equal structure, numbers to 1e-6 of their size."""
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), where
        for key, value in theirs.items():
            assert_close(ours[key], value, f"{where}/{key}")
    elif isinstance(theirs, float | list) and np.asarray(theirs).dtype.kind in "if":
        ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
        assert ours.shape == theirs.shape, where
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6, err_msg=where)
    else:
        assert ours == theirs, where


def assert_same_files(ours: Path, theirs: Path) -> None:
    def names(folder: Path) -> list[str]:
        files = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        return sorted(name for name in files if not name.startswith("meta/robopolicy/"))

    assert names(ours) == names(theirs)
    for name in names(theirs):
        if name.endswith(".json"):
            assert_close(json.loads((ours / name).read_text()), json.loads((theirs / name).read_text()), name)
        elif name.endswith(".parquet"):
            mine, other = pq.ParquetFile(ours / name), pq.ParquetFile(theirs / name)
            assert mine.schema_arrow.names == other.schema_arrow.names, name
            assert mine.schema_arrow.types == other.schema_arrow.types, name
            if name.startswith("data/"):
                noted = [json.loads(file.schema_arrow.metadata[b"huggingface"])["info"] for file in (mine, other)]
                assert noted[0] == noted[1]
                assert mine.num_row_groups == other.num_row_groups
            left, right = mine.read(), other.read()
            for column in right.column_names:
                if column.startswith("stats/") or column.endswith("_timestamp"):
                    assert_close(left[column].to_pylist(), right[column].to_pylist(), column)
                else:
                    assert left[column].to_pylist() == right[column].to_pylist(), column


@pytest.fixture
def awkward() -> Episodes:
    """Episodes of many lengths (one of a single step, two of one length, one above 100) with constant columns."""
    episodes = moving_episodes((1, 6, 6, 120, 37), image=False)
    episodes.observation["observation.state"][:, 1] = 0.3
    episodes.observation["observation.state"][:, 2] *= 1e-5
    episodes.actions[:, 0] = 0.0
    episodes.seeds[:] = torch.arange(5)
    return episodes


@pytest.mark.long
def test_state_data_equals_lerobots_own(tmp_path, awkward):
    two, rest = awkward.select([1, 2]), awkward.select([3, 4])
    write_dataset(two, tmp_path / "ours")
    lerobots_own(two, tmp_path / "theirs", tmp_path / "ours")
    assert_same_files(tmp_path / "ours", tmp_path / "theirs")
    write_dataset(rest, tmp_path / "ours", existing="append")
    lerobots_own(rest, tmp_path / "theirs", tmp_path / "ours", append=True)
    assert_same_files(tmp_path / "ours", tmp_path / "theirs")


def test_an_episode_of_one_step_has_statistics(tmp_path, awkward):
    write_dataset(awkward, tmp_path / "ours")
    table = pq.read_table(next((tmp_path / "ours/meta/episodes").glob("*/*"))).to_pylist()
    assert table[0]["stats/next.done/min"] == table[0]["stats/next.done/q50"] == [1.0]
    assert table[0]["stats/observation.state/std"] == [0.0, 0.0, 0.0]
    assert torch.equal(read_dataset(tmp_path / "ours").actions, awkward.actions)


@pytest.mark.parametrize("images", ["png", "video"])
def test_images_equal_lerobots_own(tmp_path, images):
    episodes = moving_episodes()
    write_dataset(episodes, tmp_path / "ours", images=images)
    lerobots_own(episodes, tmp_path / "theirs", tmp_path / "ours")
    assert_same_files(tmp_path / "ours", tmp_path / "theirs")
    mine, other = read_dataset(tmp_path / "ours"), read_dataset(tmp_path / "theirs")
    # LeRobot keeps no last observation: those frames are compared with what was written.
    taken = torch.ones(len(mine.observation[FRONT]), dtype=torch.bool)
    taken[mine.frame_starts + mine.lengths] = False
    difference = (mine.observation[FRONT].int() - other.observation[FRONT].int()).abs()[taken]
    assert difference.max() <= (0 if images == "png" else 2)


def test_videos_split_into_files_and_still_read(tmp_path, monkeypatch):
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    from robopolicy.data import lerobot_tables

    monkeypatch.setattr(lerobot_tables, "_MEGABYTE", 10)  # bytes
    episodes = moving_episodes((60, 41, 90, 30, 79))
    write_dataset(episodes, tmp_path / "data")
    assert len(list((tmp_path / "data/videos").rglob("*.mp4"))) > 1
    assert len(list((tmp_path / "data/data").rglob("*.parquet"))) > 1
    back = read_dataset(tmp_path / "data")
    assert (back.observation[FRONT].int() - episodes.observation[FRONT].int()).abs().max() <= 3
    dataset = LeRobotDataset("own/data", root=tmp_path / "data", video_backend="pyav")
    assert len(dataset) == 300
    image = dataset[299][FRONT].permute(1, 2, 0) * 255
    assert (image - episodes.observation[FRONT][-2]).abs().max() <= 4


@pytest.mark.long
def test_lerobots_tools_edit_what_was_written(tmp_path):
    from lerobot.datasets.dataset_tools import delete_episodes, merge_datasets, split_dataset
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    episodes = moving_episodes((6, 4, 9), image=False)
    write_dataset(episodes, tmp_path / "data")
    dataset = LeRobotDataset("own/data", root=tmp_path / "data")
    fewer = delete_episodes(dataset, [1], output_dir=tmp_path / "fewer", repo_id="own/fewer")
    assert fewer.num_frames == 15
    back = read_dataset(tmp_path / "fewer").actions
    assert torch.equal(back, episodes.select([0, 2]).actions)
    parts = split_dataset(dataset, {"first": [0], "rest": [1, 2]}, output_dir=tmp_path / "split")
    assert [part.num_episodes for part in parts.values()] == [1, 2]
    merged = merge_datasets([dataset, fewer], output_repo_id="own/merged", output_dir=tmp_path / "merged")
    assert merged.num_episodes == 5
