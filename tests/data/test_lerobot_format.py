"""LeRobotDataset v3: written in bulk, read back exactly, read by lerobot itself, and clear errors."""

import errno
import json
import shutil

import numpy as np
import pytest
import torch
from moving_episodes import FRONT, moving_episodes

from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import DataError, RobopolicyWarning, StorageError
from robopolicy.core.spec import STATE
from robopolicy.data.lerobot_format import read_dataset, write_dataset


def assert_equal(left: Episodes, right: Episodes, image_tolerance: int = 0) -> None:
    assert left.observation_fields == right.observation_fields
    assert left.action_field == right.action_field
    assert (left.fps, left.tasks) == (right.fps, right.tasks)
    for name in ("actions", "lengths", "step_success", "terminated", "seeds", "final_known"):
        assert torch.equal(getattr(left, name), getattr(right, name)), name
    assert left.rewards.keys() == right.rewards.keys()
    assert all(torch.equal(left.rewards[name], right.rewards[name]) for name in left.rewards)
    for key, value in left.observation.items():
        assert value.dtype == right.observation[key].dtype
        difference = (value.float() - right.observation[key].float()).abs().max()
        assert difference <= (image_tolerance if key == FRONT else 0), key


@pytest.fixture(scope="module")
def exact_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "png"
    write_dataset(moving_episodes(), folder, images="png")
    return folder


@pytest.fixture
def copy(exact_folder, tmp_path):
    return shutil.copytree(exact_folder, tmp_path / "copy")


def test_png_round_trip_is_exact(exact_folder):
    assert_equal(moving_episodes(), read_dataset(exact_folder))
    assert [path.name for path in exact_folder.parent.iterdir()] == ["png"]


def test_video_round_trip_keeps_every_frame_in_its_place(tmp_path):
    episodes = moving_episodes()
    write_dataset(episodes, tmp_path / "video")
    back = read_dataset(tmp_path / "video")
    assert_equal(episodes, back, image_tolerance=3)
    chosen = read_dataset(tmp_path / "video", episodes=[2])
    assert torch.equal(chosen.observation[FRONT], back.select([2]).observation[FRONT])


def test_choosing_episodes_and_cameras(exact_folder):
    chosen = read_dataset(exact_folder, episodes=[0, 2], cameras=())
    expected = moving_episodes(image=True).select([0, 2])
    assert chosen.cameras == ()
    assert torch.equal(chosen.observation[STATE], expected.observation[STATE])
    assert torch.equal(chosen.seeds, expected.seeds)
    with pytest.raises(DataError, match=r"no camera 'frnt'. Did you mean 'front'"):
        read_dataset(exact_folder, cameras=["frnt"])
    with pytest.raises(DataError, match=r"no episode \[7\]; it has episodes 0 to 2"):
        read_dataset(exact_folder, episodes=[7])


@pytest.mark.parametrize("image", [True, False])
def test_append_equals_writing_at_once(tmp_path, image):
    first, second = moving_episodes(image=image), moving_episodes((5, 7), image=image, seed=1)
    write_dataset(first, tmp_path / "data", images="png")
    with pytest.raises(DataError, match="is not empty"):
        write_dataset(second, tmp_path / "data")
    write_dataset(second, tmp_path / "data", existing="append")
    assert_equal(Episodes.concatenate([first, second]), read_dataset(tmp_path / "data"))
    with pytest.raises(DataError, match="differ"):
        write_dataset(moving_episodes(image=not image), tmp_path / "data", existing="append")
    write_dataset(second, tmp_path / "data", existing="replace", images="png")
    assert_equal(second, read_dataset(tmp_path / "data"))


def test_lerobot_reads_it_with_delta_timestamps(exact_folder):
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    rate = 12  # LeRobot keeps whole frames per second
    dataset = LeRobotDataset(
        "local/png",
        root=exact_folder,
        video_backend="pyav",
        delta_timestamps={STATE: [-1 / rate, 0.0], "action": [0.0, 1 / rate, 2 / rate], FRONT: [0.0]},
    )
    episodes = moving_episodes()
    batch = episodes.windows(torch.arange(episodes.step_count), 2, 3)
    for step in range(episodes.step_count):
        item = dataset[step]
        assert torch.equal(item[STATE], batch["observation"][STATE][step])
        assert torch.equal(item["action"], batch["actions"][step])
        assert torch.equal(~item["action_is_pad"], batch["action_valid"][step])
        assert item["task"] == batch["observation"]["task"][step]
        assert bool(item["next.success"]) == bool(episodes.step_success[step])
        image = batch["observation"][FRONT][step, 1].permute(2, 0, 1).float() / 255
        assert torch.allclose(item[FRONT].squeeze(0), image, atol=1e-6)


def test_reads_what_others_recorded_with_lerobot(tmp_path):
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    features = {
        STATE: {"dtype": "float32", "shape": (2,), "names": {"motors": ["shoulder", "elbow"]}},
        "action": {"dtype": "float64", "shape": (1,), "names": None},
        "observation.images.top": {"dtype": "image", "shape": (3, 32, 48), "names": ["channels", "height", "width"]},
        "operator": {"dtype": "string", "shape": (1,), "names": None},
    }
    dataset = LeRobotDataset.create("other/one", 30, features, root=tmp_path / "other", use_videos=False)
    for episode, length in enumerate((3, 5)):
        for step in range(length):
            image = np.full((3, 32, 48), 40 * episode + step, np.uint8)
            state = np.array([episode, step], np.float32)
            frame = {STATE: state, "action": np.array([step * 0.5]), "observation.images.top": image}
            dataset.add_frame({**frame, "operator": "ann", "task": f"task {episode}"})
        dataset.save_episode()
    dataset.finalize()
    episodes = read_dataset(tmp_path / "other")
    assert episodes.lengths.tolist() == [3, 5]
    assert episodes.tasks == ("task 0", "task 1")
    assert (episodes.rewards, episodes.success, episodes.seeds) == (None, None, None)
    assert episodes.final_known.tolist() == [False, False]
    assert episodes.observation_fields[STATE].names == ("shoulder", "elbow")
    assert episodes.actions[:, 0].tolist() == [0.0, 0.5, 1.0, 0.0, 0.5, 1.0, 1.5, 2.0]
    images = episodes.observation["observation.images.top"]
    assert images.shape == (10, 32, 48, 3)
    assert images[:, 0, 0, 0].tolist() == [0, 1, 2, 2, 40, 41, 42, 43, 44, 44]
    with pytest.raises(DataError, match="rewards"):
        episodes.transitions()


def test_an_episode_that_changes_its_task_is_several(tmp_path):
    """LeRobot says the task of every frame: an episode's first alone would put other actions under its words."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    features = {
        STATE: {"dtype": "float32", "shape": (1,), "names": None},
        "action": {"dtype": "float32", "shape": (1,), "names": None},
    }
    dataset = LeRobotDataset.create("other/two", 30, features, root=tmp_path / "two", use_videos=False)
    for length in (4, 6):
        for step in range(length):
            left = step < length // 2 or length == 4
            action = np.array([1.0 if left else -1.0], np.float32)
            frame = {STATE: np.array([step], np.float32), "action": action}
            dataset.add_frame({**frame, "task": "go left" if left else "go right"})
        dataset.save_episode()
    dataset.finalize()
    with pytest.warns(RobopolicyWarning, match="1 of 2 episodes change their task"):
        episodes = read_dataset(tmp_path / "two")
    assert episodes.lengths.tolist() == [4, 3, 3] and episodes.tasks == ("go left", "go left", "go right")
    told = [episodes.tasks[place] for place in episodes.episode_of_step.tolist()]
    assert all((text == "go left") == (action > 0) for text, action in zip(told, episodes.actions[:, 0], strict=True))
    assert episodes.observation[STATE][:, 0].tolist() == [0, 1, 2, 3, 3, 0, 1, 2, 2, 3, 4, 5, 5]
    with pytest.warns(RobopolicyWarning):
        assert read_dataset(tmp_path / "two", [1]).lengths.tolist() == [3, 3]


def test_missing_and_foreign_folders(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        read_dataset(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"a folder with meta/info\.json"):
        read_dataset(tmp_path)


def test_damaged_datasets_say_what_is_wrong(copy):
    information = copy / "meta" / "info.json"
    good = information.read_text()
    information.write_text(good[:40])
    with pytest.raises(DataError, match="damaged"):
        read_dataset(copy)
    information.write_text(json.dumps({**json.loads(good), "codebase_version": "v2.1"}))
    with pytest.raises(
        DataError, match=r"LeRobotDataset v2, and it cannot be converted as it is: .*meta/episodes\.jsonl"
    ):
        read_dataset(copy)
    information.write_text(json.dumps({**json.loads(good), "total_frames": 99}))
    with pytest.raises(DataError, match="declares 99 frames but its data files contain 19"):
        read_dataset(copy)
    information.write_text(good)
    data = next((copy / "data").glob("*/*.parquet"))
    data.write_bytes(data.read_bytes()[:-20])
    with pytest.raises(DataError, match="never finalised"):
        read_dataset(copy)


def test_a_side_table_of_other_episodes_is_refused(copy, tmp_path):
    write_dataset(moving_episodes((6, 5, 9), image=False), tmp_path / "changed")
    shutil.rmtree(copy / "meta" / "robopolicy")
    assert read_dataset(copy).final_known.tolist() == [False] * 3
    shutil.copytree(tmp_path / "changed" / "meta" / "robopolicy", copy / "meta" / "robopolicy")
    with pytest.raises(DataError, match="edited by another program"):
        read_dataset(copy)


def test_a_recording_that_was_never_finalised(tmp_path):
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    features = {"action": {"dtype": "float32", "shape": (2,), "names": None}}
    dataset = LeRobotDataset.create("other/half", 30, features, root=tmp_path / "half", use_videos=False)
    for _ in range(3):
        dataset.add_frame({"action": np.zeros(2, np.float32), "task": ""})
    dataset.save_episode()
    with pytest.raises(DataError, match="never finalised"):
        read_dataset(tmp_path / "half")
    dataset.finalize()


def test_a_full_disk_leaves_the_old_dataset(copy, monkeypatch):
    import robopolicy.data.lerobot_format as subject

    def no_space(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(subject, "_store_sidecar", no_space)
    with pytest.raises(StorageError, match="No space left"):
        write_dataset(moving_episodes((2, 2), image=False), copy, existing="replace")
    assert_equal(moving_episodes(), read_dataset(copy))
    assert [path.name for path in copy.parent.iterdir()] == ["copy"]


def test_writing_nothing_is_an_error(tmp_path):
    with pytest.raises(DataError, match="no episodes to write"):
        write_dataset(moving_episodes().select([]), tmp_path / "none")
