"""A path that exists and holds something else is called what it is, wherever a checkpoint or a dataset is expected."""

import json
import zipfile

import imageio.v3 as iio
import numpy as np
import pytest
from foreign_data import arrays, write_older_lerobot, write_push_t, write_robomimic

from robopolicy.cli import main
from robopolicy.core.file_types import describe_path

pytest.importorskip("h5py", reason="pip install 'robopolicy[convert]'")
pytest.importorskip("zarr", reason="pip install 'robopolicy[convert]'")


def zipped(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("notes.txt", "a")


WRITTEN = {
    "demo.hdf5": (write_robomimic, "robomimic's HDF5. Convert it: robopolicy convert"),
    "push_t.zarr": (write_push_t, "diffusion_policy's zarr. Convert it"),
    "old": (write_older_lerobot, "LeRobotDataset v2. Convert it: robopolicy convert"),
    "demos.npz": (lambda path: np.savez(path, **arrays(), episode_ends=[6, 11, 18]), "an .npz file. Convert it"),
    "all.zip": (zipped, "is a zip archive"),
    "film.mp4": (lambda path: iio.imwrite(path, np.zeros((4, 16, 16, 3), np.uint8), fps=5), "is an MP4 video"),
    "notes.txt": (lambda path: path.write_text("notes"), "is a text file"),
    "empty": (lambda path: path.mkdir(), "is an empty folder"),
}
PLACES = {
    "check": "check.target={}",
    "train": "train.data={}",
    "evaluate": "evaluate.policy={}",
    "serve": "serve.policy={}",
    "doctor": "doctor.data={}",
    "offline": "offline.dataset={}",
    "finetune": "finetune.policy={}",
    "gate": "gate.candidate={}",
}


@pytest.mark.parametrize("name", WRITTEN)
def test_it_is_called_what_it_is(tmp_path, capsys, name):
    write, said = WRITTEN[name]
    path = tmp_path / name
    write(path)
    for verb, setting in PLACES.items():
        given = [setting.format(path), f"run.root={tmp_path / 'runs'}", "run.name=a"]
        given += ["world=push_cube"] if verb != "serve" else []
        if verb == "gate":
            given += [f"gate.incumbent={path}", f"gate.models=[{path}]"]
        if verb == "offline":
            given += [f"offline.policy={path}"]
        assert main([verb, *given]) == 2, verb
        error = " ".join(capsys.readouterr().err.split())
        assert str(path) in error and "does not exist" not in error, (verb, error)
        assert said in error or f"{path} is {describe_path(path)}. A checkpoint is a folder" in error, (verb, error)


def test_check_names_the_dataset_that_a_table_belongs_to(tmp_path, capsys):
    folder = write_older_lerobot(tmp_path / "old")
    table = next(folder.rglob("*.parquet"))
    assert main(["check", str(table)]) == 2
    assert f"robopolicy convert {folder}" in " ".join(capsys.readouterr().err.split())
    information = json.loads((folder / "meta/info.json").read_text())
    (folder / "meta/info.json").write_text(json.dumps(information | {"codebase_version": "v3.0"}))
    assert main(["check", str(table)]) == 2
    assert f"robopolicy doctor {folder}" in " ".join(capsys.readouterr().err.split())
