"""What `robopolicy convert` refuses: one sentence that names the thing and the way out, and nothing is written."""

import json
import struct
import zipfile

import numpy as np
import pytest
from foreign_data import arrays, write_aloha, write_minari, write_older_lerobot, write_push_t, write_robomimic

from robopolicy.cli import main

h5py = pytest.importorskip("h5py", reason="pip install 'robopolicy[convert]'")
zarr = pytest.importorskip("zarr", reason="pip install 'robopolicy[convert]'")

ENDS = np.cumsum([6, 5, 7])


@pytest.fixture
def refused(tmp_path, capsys):
    def check(source, *settings, fps=True):
        before = sorted(tmp_path.rglob("*"))
        given = ["convert", str(source), str(tmp_path / "out"), *(["convert.fps=10"] if fps else []), *settings]
        assert main(given) == 2
        output = " ".join(capsys.readouterr().err.split())
        assert output.startswith("Error: ") and "Traceback" not in output and "unexpected" not in output.lower()
        assert sorted(tmp_path.rglob("*")) == before
        return output

    return check


def changed(path, change):
    with h5py.File(path, "r+") as file:
        change(file)
    return path


def truncated(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    return path


def replace(file, key, **how):
    del file[key]
    return file.create_dataset(key, **how)


def external(file):
    del file["data/demo_1/actions"]
    file["data/demo_1/actions"] = h5py.ExternalLink("/etc/passwd", "/x")


def soft(file):
    del file["data/demo_0/obs/object"]
    file["data/demo_0/obs/object"] = h5py.SoftLink("/data/demo_1/obs/object")


def raw_file(file):
    del file["data/demo_0/actions"]
    file.create_dataset("data/demo_0/actions", (6, 3), dtype="f8", external=[("/etc/hostname", 0, 144)])


def virtual(file):
    layout = h5py.VirtualLayout((6, 3), "f8")
    layout[:] = h5py.VirtualSource("/etc/other.h5", "x", (6, 3))
    del file["data/demo_0/actions"]
    file.create_virtual_dataset("data/demo_0/actions", layout)


def promised(file):
    replace(file, "data/demo_0/actions", shape=(2**40, 3), dtype="f8", chunks=(1024, 3))
    file["data/demo_0"].attrs["num_samples"] = 2**40


def broken_off(file):
    frames = replace(file, "data/demo_1/obs/agentview_image", shape=(5, 16, 24, 3), dtype="u1", chunks=(1, 16, 24, 3))
    frames[:2] = 1


HDF5 = {
    "external": (external, r"'/data/demo_1/actions' is a link (ExternalLink) that may point outside the file"),
    "soft": (soft, "is a link (SoftLink)"),
    "raw_file": (raw_file, "is stored in other files: it is not read"),
    "virtual": (virtual, "is stored in other files: it is not read"),
    "promised": (promised, "is declared with shape [1099511627776, 3], but only 0% of it was written"),
    "broken_off": (broken_off, "only 40% of it was written: the recording was interrupted"),
    "count": (lambda file: file["data/demo_2"].attrs.update(num_samples=9), "declares 9 steps but contains 7 actions"),
    "rows": (lambda file: replace(file, "data/demo_2/rewards", data=np.ones(4)), "7 actions but 4 rows of 'rewards'"),
    "shape": (lambda file: replace(file, "data/demo_1/actions", data=np.ones((5, 4))), "'actions' with shape [4], but"),
    "lacking": (lambda file: file["data/demo_1/obs"].pop("object"), "has no '/data/demo_1/obs/object'"),
    "empty": (lambda file: [file["data"].pop(name) for name in list(file["data"])], "has no known format"),
    "said": (lambda file: file["data"].attrs.update(env_args="{"), "the attribute env_args is not JSON"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", HDF5)
def test_hdf5_that_is_not_what_it_promises(tmp_path, refused, wrong):
    change, message = HDF5[wrong]
    assert message in refused(changed(write_robomimic(tmp_path / "demo.hdf5"), change))


def test_a_truncated_hdf5_file_is_damaged_wherever_it_is_given(tmp_path, refused, capsys):
    path = truncated(write_robomimic(tmp_path / "demo.hdf5"))
    assert "demo.hdf5 is a damaged or truncated HDF5 file" in refused(path)
    assert main(["train", str(path), "world=push_t", f"run.root={tmp_path}"]) == 2
    assert "is a damaged or truncated HDF5 file" in " ".join(capsys.readouterr().err.split())
    (tmp_path / "none.hdf5").write_bytes(b"x")
    assert "damaged or truncated" in refused(tmp_path / "none.hdf5")


def test_simulator_states_without_observations(tmp_path, refused):
    assert "dataset_states_to_obs.py" in refused(write_robomimic(tmp_path / "demo.hdf5", states_only=True))


def test_aloha_of_unequal_lengths(tmp_path, refused):
    folder = write_aloha(tmp_path / "aloha")
    changed(folder / "episode_2.hdf5", lambda file: replace(file, "observations/qpos", data=np.ones((6, 5))))
    assert "episode_2.hdf5: 'observations/qpos' has 6 rows but 'action' has 7" in refused(folder)


def test_a_rate_that_nobody_says(tmp_path, refused):
    assert "add convert.fps=50, or the rate" in refused(write_aloha(tmp_path / "aloha"), fps=False)


def test_a_picture_that_is_no_picture(tmp_path, refused):
    folder = write_aloha(tmp_path / "aloha", encoded="padded")

    def spoil(file):
        file["observations/images/cam_high"][2] = 7

    changed(folder / "episode_1.hdf5", spoil)
    assert "'observations/images/cam_high', frame 2, is damaged, or not PNG or JPEG" in refused(folder)


def test_zarr_without_ends_of_episodes(tmp_path, refused):
    message = refused(write_push_t(tmp_path / "p.zarr", ends=False))
    assert "is a zarr without 'meta/episode_ends' [E], which defines where each episode ends" in message


def test_zarr_of_objects_links_and_other_lengths(tmp_path, refused):
    path = write_push_t(tmp_path / "p.zarr")
    group = zarr.open_group(path, mode="r+")
    group["data"].create_array("late", shape=(4, 2), dtype="f4")[:] = 1
    assert "'data/late' has 4 rows, but meta/episode_ends ends at 18" in refused(path)
    described = path / "data/action/.zarray"
    description = json.loads(described.read_text())
    described.write_text(json.dumps({**description, "dtype": "|O", "filters": [{"id": "pickle", "protocol": 4}]}))
    assert "contains Python objects (codec pickle), which are never read" in refused(path)
    described.write_text(json.dumps({**description, "chunks": [2**45, 2], "shape": [2**45, 2]}))
    assert "of memory, but only" in refused(path)
    (path / "data/state/.zarray").unlink()
    (path / "data/state/.zarray").symlink_to("/etc/hostname")
    assert "data/state/.zarray is a link to a place outside the folder" in refused(path)


def test_minari_that_lacks_episodes_or_is_arrow(tmp_path, refused):
    folder = write_minari(tmp_path / "toy")
    metadata = folder / "data/metadata.json"
    description = json.loads(metadata.read_text())
    metadata.write_text(json.dumps({**description, "total_episodes": 5}))
    assert "declares 5 episodes but there are 3" in refused(folder)
    (folder / "data/main_data.hdf5").unlink()
    metadata.write_text(json.dumps({**description, "data_format": "arrow"}))
    assert "stores its episodes as arrow, which is not supported" in refused(folder)


def test_npz_of_objects_short_ones_and_ones_without_ends(tmp_path, refused):
    path = tmp_path / "demos.npz"
    np.savez(path, **{**arrays(), "states": np.array([{}] * 18, object)}, episode_ends=ENDS)
    assert "'states' contains Python objects, which are never read, because they can run any code" in refused(path)
    np.savez(path, **arrays())
    assert "does not define where its episodes end: add an array 'episode_ends' [E]" in refused(path)
    np.savez(path, **arrays(), episode_ends=ENDS + 1)
    assert "its episodes end after [7, 12, 19] of 18 steps, which is invalid" in refused(path)
    floats = arrays(floats=True)
    floats["images"][8] = 3
    np.savez(path, **floats, episode_ends=ENDS)
    assert "'images' contains pixels up to 3, which are in neither 0 to 1 nor 0 to 255" in refused(path)
    floats["images"][8] = 0.5
    floats["images"][8, 0, 0, 0] = np.nan
    np.savez(path, **floats, episode_ends=ENDS)
    assert "pixels from nan to nan" in refused(path)
    path.write_bytes(path.read_bytes()[:-2000])
    assert "is a damaged or truncated .npz file" in refused(path)


def test_npz_that_promises_more_than_it_holds(tmp_path, refused):
    head = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1099511627776, 3), }"
    head += b" " * (-(len(head) + 11) % 64) + b"\n"
    with zipfile.ZipFile(tmp_path / "demos.npz", "w") as archive:
        archive.writestr("actions.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + b"x" * 24)
    assert "'actions' declares [1099511627776, 3] float64 but contains another number of bytes" in refused(
        tmp_path / "demos.npz"
    )


def test_older_lerobot_that_lacks_files_or_reaches_outside(tmp_path, refused):
    folder = write_older_lerobot(tmp_path / "old")
    video = folder / "videos/chunk-000/observation.images.top/episode_000001.mp4"
    data = video.read_bytes()
    video.unlink()
    assert "The video 'observation.images.top' of episode 1 should be at" in refused(folder)
    video.write_bytes(data[: len(data) // 2])
    assert "episode_000001.mp4" in refused(folder)
    information = json.loads((folder / "meta/info.json").read_text())
    (folder / "meta/info.json").write_text(json.dumps({**information, "data_path": "../../etc/{episode_index:06d}"}))
    assert f", outside {folder}: it is not read" in refused(folder)
    (folder / "meta/info.json").write_text(json.dumps({**information, "total_episodes": 4}))
    assert "lists 3 episodes, but meta/info.json declares 4" in refused(folder)


def test_sources_that_do_not_fit_together(tmp_path, refused):
    first = write_robomimic(tmp_path / "a.hdf5")
    other = changed(write_robomimic(tmp_path / "b.hdf5"), lambda file: file["data/demo_0/obs"].pop("object"))
    message = refused(first, f"convert.merge=[{other}]")
    assert "'observation.environment_state' is [2] in" in message and "and none in" in message
    rates = {"env_args": json.dumps({"env_kwargs": {"control_freq": 5}})}
    slow = changed(write_robomimic(tmp_path / "c.hdf5"), lambda file: file["data"].attrs.update(rates))
    assert "have different frame rates" in refused(first, f"convert.merge=[{slow}]", fps=False)


SETTINGS = {
    "convert.map={obs/objekt: observation.state}": "which is not a column of %s. Did you mean 'obs/object'?",
    "convert.map={obs/object: state}": "'obs/object' cannot be converted to 'state': valid names are action",
    "convert.map={obs/agentview_image: observation.state}": "each image needs a camera name: observation.images.NAME",
    "convert.map={obs/object: observation.images.top}": "'obs/object' is not an image (float64 [2])",
    "convert.map={actions: null}": "the action column is unknown",
    "convert.map={actions: [action, next.reward]}": "'next.reward' is one number per step",
    "convert.flip=[front]": "convert.flip contains 'front', which is not a camera; the cameras are agentview",
    "convert.episodes=[7]": "convert.episodes contains episode 7",
    "convert.trim_end=5": "has 5 steps, of which none remain after convert.trim_start and convert.trim_end",
    "convert.format=robomimc": "There is no dataset format 'robomimc'. Did you mean 'robomimic'?",
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_that_cannot_be(tmp_path, refused, setting):
    path = write_robomimic(tmp_path / "demo.hdf5")
    assert SETTINGS[setting].replace("%s", str(path)) in refused(path, setting)


def test_what_nobody_knows(tmp_path, refused):
    assert "does not exist: check the path" in refused(tmp_path / "nothing.hdf5")
    (tmp_path / "notes.txt").write_text("x")
    assert "has no known format (robomimic, aloha, minari, zarr, lerobot_v2, npz" in refused(tmp_path / "notes.txt")
    folder = tmp_path / "rlds"
    folder.mkdir()
    for name in ("dataset_info.json", "features.json"):
        (folder / name).write_text("{}")
    assert "is RLDS (TensorFlow Datasets), which is not supported" in refused(folder)


@pytest.mark.parametrize("verb", ["train", "evaluate"])
def test_data_of_another_format_is_never_said_not_to_exist(tmp_path, capsys, verb):
    path = write_robomimic(tmp_path / "demo.hdf5")
    assert main([verb, str(path), "world=push_t", f"run.root={tmp_path / 'runs'}"]) == 2
    output = " ".join(capsys.readouterr().err.split())
    assert "robomimic's HDF5. Convert it: robopolicy convert" in output and "not exist" not in output
