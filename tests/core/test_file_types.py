"""What a path is called in messages, for files as their own libraries write them."""

import os
import tarfile
import zipfile

import imageio.v3 as iio
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from robopolicy.core.file_types import describe_path

FRAMES = np.zeros((4, 16, 16, 3), np.uint8)


def packed(path):
    with tarfile.open(path, "w") as archive:
        archive.add(__file__, "a.py")


def zipped(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", "a")


WRITTEN = {
    "demo.parquet": (lambda path: pq.write_table(pa.table({"x": [1]}), path), "a parquet file"),
    "demo.npz": (lambda path: np.savez(path, x=np.ones(3)), "an .npz file"),
    "demo.npy": (lambda path: np.save(path, np.ones(3)), "a NumPy array (.npy)"),
    "film.mp4": (lambda path: iio.imwrite(path, FRAMES, fps=5), "an MP4 video"),
    "frame.png": (lambda path: iio.imwrite(path, FRAMES[0]), "a PNG image"),
    "frame.jpg": (lambda path: iio.imwrite(path, FRAMES[0]), "a JPEG image"),
    "all.tar": (packed, "a tar archive"),
    "all.zip": (zipped, "a zip archive"),
    "notes.txt": (lambda path: path.write_text("é" * 600), "a text file"),
    "said.json": (lambda path: path.write_text("{}"), "a JSON file"),
    "nothing": (lambda path: path.touch(), "an empty file"),
    "noise": (lambda path: path.write_bytes(b"\xff\xfe" * 400), "a file of unknown type"),
    "old.pt": (lambda path: torch.save({"a": 1}, path), "a PyTorch file, which holds a pickle"),
    "pipe": (os.mkfifo, "a pipe or device"),
    "folder": (lambda path: path.mkdir(), "an empty folder"),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_path_is_called_what_it_is(tmp_path, name):
    write, description = WRITTEN[name]
    assert describe_path(tmp_path / name) == ""
    write(tmp_path / name)
    assert describe_path(tmp_path / name).startswith(description)


def test_a_folder_is_called_by_what_it_holds(tmp_path):
    for name in "abcde":
        (tmp_path / name).touch()
    assert describe_path(tmp_path) == "a folder with a, b, c and 2 more"
    for name, description in (
        ("checkpoint/config.json", f"a run folder; its checkpoint is {tmp_path / 'checkpoint'}"),
        (".zgroup", "a zarr store"),
        ("meta/info.json", "a LeRobotDataset"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
        assert describe_path(tmp_path) == description
