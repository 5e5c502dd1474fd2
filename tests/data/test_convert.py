"""`robopolicy convert`: what other projects wrote comes out with the same values, upright, in the right colours."""

import json
import re

import numpy as np
import pytest
import torch
from foreign_data import (
    HEIGHT,
    LENGTHS,
    WIDTH,
    arrays,
    recorded,
    write_aloha,
    write_minari,
    write_older_lerobot,
    write_push_t,
    write_robomimic,
)

from robopolicy.cli import main
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE
from robopolicy.data.configuration import ConvertConfig
from robopolicy.data.conversion import Conversion
from robopolicy.data.lerobot_reading import read_dataset

pytest.importorskip("h5py", reason="pip install 'robopolicy[convert]'")
pytest.importorskip("zarr", reason="pip install 'robopolicy[convert]'")

TOP = "observation.images.{}"


def convert(source, target, *settings) -> int:
    return main(["convert", str(source), str(target), *settings])


def converted(source, target, *settings):
    assert convert(source, target, *settings) == 0
    return read_dataset(target)


def states(part=slice(None, -1), columns=slice(None)):
    """The states of all episodes [N, S]; part: of which rows."""
    return np.concatenate([each.state[part, columns] for each in recorded()]).astype(np.float32)


def steps_of(episodes, key):
    """A column without the row after the last action of each episode."""
    last = (episodes.frame_starts + episodes.lengths).tolist()
    return np.delete(episodes.observation[key].numpy(), last, axis=0)


def same_pictures(episodes, key, tolerance):
    frames = steps_of(episodes, key).astype(int)
    wanted = np.concatenate([each.image[:-1] for each in recorded()]).astype(int)
    assert frames.shape == wanted.shape == (sum(LENGTHS), HEIGHT, WIDTH, 3)
    assert np.abs(frames - wanted).max() <= tolerance


def same_actions(episodes):
    assert episodes.lengths.tolist() == list(LENGTHS)
    assert np.array_equal(episodes.actions.numpy(), np.concatenate([e.action for e in recorded()]).astype(np.float32))


def test_robomimic(tmp_path, capsys):
    episodes = converted(write_robomimic(tmp_path / "demo.hdf5"), tmp_path / "out", "convert.images=png")
    same_actions(episodes)
    same_pictures(episodes, TOP.format("agentview"), 0)
    assert np.array_equal(steps_of(episodes, STATE), states(columns=slice(3)))
    assert np.array_equal(steps_of(episodes, ENVIRONMENT_STATE), states(columns=slice(3, None)))
    assert episodes.observation_fields[STATE].names == ("robot0_eef_pos_0", "robot0_eef_pos_1", "robot0_gripper_qpos_0")
    assert episodes.final_known.all() and episodes.fps == 20 and episodes.terminated.all()
    last = episodes.frame_starts + episodes.lengths  # next_obs of the last step
    assert np.array_equal(episodes.observation[STATE][last].numpy(), states(slice(-1, None), slice(3)))
    assert np.array_equal(episodes.rewards["reward"].numpy(), np.concatenate([e.success for e in recorded()]))
    shown = " ".join(capsys.readouterr().out.split())
    assert "obs/agentview_image images uint8 [16, 24, 3] observation.images.agentview" in shown
    assert "states float64 [5] dropped" in shown


def test_libero_is_turned_upright_and_says_its_instruction(tmp_path, capsys):
    episodes = converted(
        write_robomimic(tmp_path / "task_demo.hdf5", libero=True), tmp_path / "out", "convert.images=png"
    )
    same_pictures(episodes, TOP.format("agentview"), 0)
    assert set(episodes.tasks) == {"lift the cube"} and not episodes.final_known.any()
    assert np.array_equal(steps_of(episodes, STATE), states(columns=slice(3)))
    assert "upside down" in capsys.readouterr().out


@pytest.mark.parametrize("encoded", ["", "padded", "bytes", "ragged"])
def test_aloha(tmp_path, encoded):
    episodes = converted(
        write_aloha(tmp_path / "aloha", encoded=encoded), tmp_path / "out", "convert.fps=50", "convert.images=png"
    )
    same_actions(episodes)
    for camera in ("cam_high", "cam_left_wrist"):
        same_pictures(episodes, TOP.format(camera), 8 if encoded else 0)
    assert np.array_equal(steps_of(episodes, STATE), states())
    assert np.array_equal(steps_of(episodes, "observation.effort"), states() * 2)
    assert episodes.fps == 50 and set(episodes.tasks) == {""} and episodes.step_success is None


def test_one_file_of_aloha_and_colours_that_are_swapped(tmp_path):
    folder = write_aloha(tmp_path / "aloha")
    settings = (
        "convert.fps=50",
        "convert.images=png",
        "convert.bgr=[cam_high]",
        "convert.flip=[cam_left_wrist]",
        "convert.task=fold it",
    )
    episodes = converted(folder / "episode_1.hdf5", tmp_path / "out", *settings)
    wanted = recorded()[1].image[:-1]
    assert np.array_equal(steps_of(episodes, TOP.format("cam_high")), wanted[..., ::-1])
    assert np.array_equal(steps_of(episodes, TOP.format("cam_left_wrist")), wanted[:, ::-1])
    assert episodes.tasks == ("fold it",)


@pytest.mark.parametrize(("name", "version"), [("p.zarr", 2), ("p.zarr", 3), ("p.zarr.zip", 2), ("p.zarr.zip", 3)])
def test_push_t(tmp_path, name, version):
    episodes = converted(write_push_t(tmp_path / name, version=version), tmp_path / "out", "convert.fps=10")
    same_actions(episodes)
    same_pictures(episodes, TOP.format("image"), 12)  # floats from 0 to 255, in a video
    assert np.array_equal(steps_of(episodes, STATE), states(columns=slice(2)))
    assert episodes.observation_fields[ENVIRONMENT_STATE].shape == (18,)


def test_push_t_without_keypoints_keeps_the_blocks_pose(tmp_path):
    episodes = converted(write_push_t(tmp_path / "p.zarr", keypoints=False), tmp_path / "out", "convert.fps=10")
    assert np.array_equal(steps_of(episodes, ENVIRONMENT_STATE), states(columns=slice(2, 5)))


@pytest.mark.parametrize("codec", ["Jpegxl", "Jpeg2k"])
def test_pictures_in_jpeg_xl_and_jpeg_2000_as_umi_has_them(tmp_path, codec):
    codecs = pytest.importorskip("imagecodecs.numcodecs", reason="pip install 'robopolicy[convert]'")
    codecs.register_codecs(verbose=False)
    made = getattr(codecs, codec)(level=99) if codec == "Jpegxl" else codecs.Jpeg2k(level=0)
    episodes = converted(
        write_push_t(tmp_path / "p.zarr", codec=made), tmp_path / "out", "convert.fps=10", "convert.images=png"
    )
    same_pictures(episodes, TOP.format("image"), 8)


@pytest.mark.parametrize("place", ["", "data", "data/main_data.hdf5"])
def test_minari(tmp_path, place):
    episodes = converted(write_minari(tmp_path / "toy") / place, tmp_path / "out", "convert.fps=20")
    same_actions(episodes)
    assert np.array_equal(episodes.observation[STATE].numpy(), states(slice(None)))
    assert np.array_equal(episodes.observation[ENVIRONMENT_STATE].numpy(), states(slice(None), slice(2)))
    assert np.array_equal(
        episodes.rewards["reward"].numpy(), np.concatenate([e.reward for e in recorded()]).astype(np.float32)
    )
    assert np.array_equal(episodes.step_success.numpy(), np.concatenate([e.success for e in recorded()]))
    assert episodes.terminated.tolist() == [False, True, True] and episodes.seeds.tolist() == [40, 41, 42]
    assert episodes.final_known.all()
    same_pictures(episodes, TOP.format("image"), 14)  # JPEG files, in a video


@pytest.mark.parametrize(("version", "images"), [("v2.0", "video"), ("v2.1", "video"), ("v2.1", "image")])
def test_older_lerobot(tmp_path, version, images):
    import pyarrow.parquet as pq

    source = write_older_lerobot(tmp_path / "old", version, images)
    episodes = converted(source, tmp_path / "out", "convert.images=png")
    paths = sorted(source.glob("data/*/*.parquet"))
    for name, values in (("action", episodes.actions.numpy()), (STATE, steps_of(episodes, STATE))):
        stored = np.concatenate([np.stack(pq.read_table(path)[name].to_numpy()) for path in paths])
        assert np.array_equal(values, stored)
    same_pictures(episodes, TOP.format("top"), 0 if images == "image" else 12)
    assert episodes.tasks == ("push", "pull", "push") and episodes.fps == 10
    assert episodes.action_field.names == ("a", "b", "c")
    assert "next.done" in json.loads((tmp_path / "out/meta/info.json").read_text())["features"]


ENDINGS = {
    "episode_ends": np.cumsum(LENGTHS),
    "traj_lengths": np.array(LENGTHS),
    "episode_index": np.repeat(np.arange(3), LENGTHS),
    "terminals": np.isin(np.arange(sum(LENGTHS)), np.cumsum(LENGTHS) - 1),
}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("kind", ["", "channels_first", "floats"])
def test_npz(tmp_path, ending, kind):
    save = np.savez_compressed if kind else np.savez
    save(tmp_path / "demos.npz", **arrays(**({kind: True} if kind else {})), **{ending: ENDINGS[ending]})
    episodes = converted(tmp_path / "demos.npz", tmp_path / "out", "convert.images=png")
    same_actions(episodes)
    same_pictures(episodes, TOP.format("image"), 0)
    assert np.array_equal(steps_of(episodes, STATE), states())
    assert episodes.success.all() and episodes.fps == 10
    assert (episodes.terminated is not None) == (ending == "terminals")


# -- choosing, merging, cutting ------------------------------------------------------------------------------------


def test_the_map_is_printed_and_can_be_set(tmp_path, capsys):
    source = write_robomimic(tmp_path / "demo.hdf5")
    assert main(["convert", str(source)]) == 0
    assert "nothing is written" in capsys.readouterr().out.lower() and [*tmp_path.iterdir()] == [source]
    chosen = (
        "convert.map={obs/object: null, states\\[1\\:4\\]: observation.state, rewards: [next.reward, next.success]}"
    )
    episodes = converted(source, tmp_path / "out", chosen, "convert.images=png")
    assert set(episodes.observation) == {STATE, TOP.format("agentview")}
    assert np.array_equal(steps_of(episodes, STATE), states(columns=slice(1, 4)))
    assert (
        episodes.success.all() and not episodes.final_known.any()
    )  # simulator states have no row after the last action


def test_episodes_are_left_out_and_cut(tmp_path):
    source = write_minari(tmp_path / "toy")
    cut = ("convert.fps=20", "convert.exclude_episodes=[1]", "convert.trim_start=1", "convert.trim_end=2")
    episodes = converted(source, tmp_path / "out", *cut)
    assert episodes.lengths.tolist() == [3, 4]
    wanted = np.concatenate([recorded()[number].state[1:-2] for number in (0, 2)]).astype(np.float32)
    assert np.array_equal(episodes.observation[STATE].numpy(), wanted)  # what followed the last action is known
    assert episodes.final_known.all() and episodes.seeds is None and not episodes.success.any()
    assert converted(source, tmp_path / "first", "convert.fps=20", "convert.episodes=2").lengths.tolist() == [6, 5]


def test_sources_are_merged(tmp_path):
    first, second = write_robomimic(tmp_path / "a.hdf5"), write_robomimic(tmp_path / "b.hdf5", upto=1)
    episodes = converted(first, tmp_path / "out", f"convert.merge=[{second}]")
    assert episodes.lengths.tolist() == [*LENGTHS, LENGTHS[0]]
    (tmp_path / "folder").mkdir()
    write_robomimic(tmp_path / "folder/one.hdf5"), write_robomimic(tmp_path / "folder/two.hdf5")
    assert len(converted(tmp_path / "folder", tmp_path / "both", "convert.exclude_episodes=[0,4]")) == 4


def test_a_dataset_larger_than_memory_is_written_part_by_part(tmp_path, monkeypatch):
    import robopolicy.data.conversion as conversion

    source = write_robomimic(tmp_path / "demo.hdf5")
    whole = converted(source, tmp_path / "whole", "convert.images=png")
    monkeypatch.setattr(conversion, "AT_ONCE", 1)
    parts = converted(source, tmp_path / "parts", "convert.images=png")
    assert len([*(tmp_path / "parts/data").glob("*/*.parquet")]) == 3
    for key, values in whole.observation.items():
        assert torch.equal(values, parts.observation[key])
    assert torch.equal(whole.actions, parts.actions) and torch.equal(whole.final_known, parts.final_known)
    described = [json.loads((tmp_path / name / "meta/stats.json").read_text()) for name in ("whole", "parts")]
    assert np.allclose(described[0]["action"]["mean"], described[1]["action"]["mean"])


@pytest.mark.long
def test_lerobot_reads_what_was_converted(tmp_path):
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    converted(write_aloha(tmp_path / "aloha"), tmp_path / "out", "convert.fps=50", "convert.task=fold")
    theirs = LeRobotDataset("me/data", root=tmp_path / "out")
    assert len(theirs) == sum(LENGTHS) and theirs[0]["task"] == "fold"
    assert theirs[7]["observation.images.cam_high"].shape == (3, HEIGHT, WIDTH)
    assert np.allclose(theirs[7][STATE].numpy(), states()[7])


def test_nothing_half_written_is_left(tmp_path, monkeypatch):
    import robopolicy.data.lerobot_format as lerobot_format

    written = []

    def interrupted(target, *_, **__):
        written.append(target)
        raise KeyboardInterrupt

    source = write_minari(tmp_path / "toy")
    monkeypatch.setattr(lerobot_format, "write_tables", interrupted)
    assert convert(source, tmp_path / "out", "convert.fps=20") == 130
    assert written and sorted(item.name for item in tmp_path.iterdir()) == ["toy"]
    monkeypatch.undo()
    (tmp_path / ".out.robopolicy-0123abcd.tmp" / "data").mkdir(parents=True)  # of one that was killed
    assert convert(source, tmp_path / "out", "convert.fps=20") == 0
    assert sorted(item.name for item in tmp_path.iterdir()) == ["out", "toy"]


def test_a_second_conversion_replaces_only_when_asked(tmp_path, capsys):
    source = write_minari(tmp_path / "toy")
    assert convert(source, tmp_path / "out", "convert.fps=20") == 0
    assert convert(source, tmp_path / "out", "convert.fps=20") == 2
    assert "run.overwrite=true" in capsys.readouterr().err
    assert convert(source, tmp_path / "out", "convert.fps=20", "run.overwrite=true", "convert.episodes=1") == 0
    assert len(read_dataset(tmp_path / "out")) == 1
    assert convert(source, tmp_path, "convert.fps=20", "run.overwrite=true") == 2
    assert "not removed" in capsys.readouterr().err
    assert convert(source, source / "inside", "convert.fps=20") == 2


def test_a_format_of_a_strangers_is_named_by_its_path(tmp_path):
    pytest.importorskip("outside_robotics", reason="install it with: pip install -e tests/outside")
    (tmp_path / "log.csv").write_text("# rate 5\nepisode,x,y,push\n0,1,2,3\n0,4,5,6\n1,7,8,9\n")
    for settings in ([], ["convert.format=outside_robotics.dataset:CsvLog"]):
        episodes = converted(tmp_path / "log.csv", tmp_path / f"out{len(settings)}", *settings)
        assert episodes.lengths.tolist() == [2, 1] and episodes.fps == 5
        assert np.array_equal(steps_of(episodes, STATE), [[1, 2], [4, 5], [7, 8]])


@pytest.mark.long
def test_every_printed_command_works(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez(tmp_path / "demos.npz", **{**arrays(), "episode_ends": ENDINGS["episode_ends"]})
    made = [
        write_robomimic(tmp_path / "demo.hdf5"), write_aloha(tmp_path / "aloha"), write_push_t(tmp_path / "p.zarr"),
        write_push_t(tmp_path / "q.zarr.zip"), write_minari(tmp_path / "toy"), write_older_lerobot(tmp_path / "old"),
        tmp_path / "demos.npz",
    ]  # fmt: skip
    for source in made:
        assert main(["doctor", str(source), "world=push_t"]) == 2
        output = " ".join(capsys.readouterr().err.split())
        assert "does not exist" not in output
        command = re.search(r"robopolicy (convert \S+ \S+( convert.fps=\d+)?)", output)
        assert command, output
        assert main(command[1].split()) == 0
        capsys.readouterr()


def test_conversion_in_python(tmp_path):
    with Conversion([write_minari(tmp_path / "toy")], ConvertConfig(fps=20.0)) as conversion:
        assert conversion.write(tmp_path / "out") == (3, sum(LENGTHS))
