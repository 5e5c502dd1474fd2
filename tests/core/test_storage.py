import errno
import json
import os
import stat

import pytest
import torch

from robopolicy.core.errors import CheckpointError, DataError, StorageError
from robopolicy.core.run import RunFolder
from robopolicy.core.storage import (
    LARGEST_TEXT,
    read_json,
    recover_folder,
    write_atomic,
    write_folder_atomic,
    write_json,
)
from robopolicy.core.tensors import load_tree, save_tree


def test_trees_round_trip(tmp_path):
    tree = {
        "step": 3,
        "nested": {"weight": torch.randn(2, 3), "state": torch.arange(4, dtype=torch.uint8)},
        "none": None,
    }
    save_tree(tmp_path, "state", tree)
    loaded = load_tree(tmp_path, "state")
    assert loaded["step"] == 3 and loaded["none"] is None
    assert torch.equal(loaded["nested"]["weight"], tree["nested"]["weight"])
    assert loaded["nested"]["state"].dtype == torch.uint8


def test_corrupt_and_missing_files_are_named(tmp_path):
    save_tree(tmp_path, "state", {"weight": torch.zeros(3)})
    (tmp_path / "state.safetensors").write_bytes(b"rubbish")
    with pytest.raises(CheckpointError, match=r"state\.safetensors"):
        load_tree(tmp_path, "state")
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"state\.json"):
        read_json(tmp_path / "state.json")
    with pytest.raises(CheckpointError, match=r"has no absent\.json: it is a folder with state\.json"):
        read_json(tmp_path / "absent.json")


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "file.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": 1}
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_failed_folder_leaves_the_old_folder(tmp_path):
    folder = tmp_path / "checkpoint"
    write_folder_atomic(folder, lambda inside: write_atomic(inside / "a", "old"))

    def fail(inside):
        write_atomic(inside / "a", "new")
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        write_folder_atomic(folder, fail)
    assert (folder / "a").read_text() == "old"
    assert [item.name for item in tmp_path.iterdir()] == ["checkpoint"]


def test_a_crash_between_the_renames_is_recovered(tmp_path):
    folder = tmp_path / "checkpoint"
    write_folder_atomic(folder, lambda inside: write_atomic(inside / "a", "old"))
    folder.rename(tmp_path / ".checkpoint.robopolicy-old")
    assert (recover_folder(folder) / "a").read_text() == "old"


def test_a_crash_of_an_earlier_version_is_recovered_where_it_can_be_told_from_a_backup(tmp_path):
    folder = tmp_path / "checkpoint"
    (tmp_path / "checkpoint.old").mkdir()
    assert not recover_folder(folder).exists()
    (tmp_path / ".checkpoint.ab12_xyz").mkdir()
    assert recover_folder(folder).exists()


@pytest.mark.parametrize("number", [errno.EFBIG, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOENT, errno.EIO])
def test_whatever_the_system_refuses_is_a_sentence(tmp_path, monkeypatch, number):
    def refuse(_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(StorageError, match=r"/file .*run\.root"):
        write_atomic(tmp_path / "file", b"data")
    assert list(tmp_path.iterdir()) == []


def test_a_name_as_long_as_a_file_may_have_is_written(tmp_path):
    write_json(tmp_path / ("a" * 250), {})
    write_folder_atomic(tmp_path / ("b" * 230), lambda inside: None)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("text", ["[" * 100_000, "1" * 5000, b"\xff", " " * (LARGEST_TEXT + 1), None, "pipe", "loop"])
def test_what_is_no_json_file_is_named(tmp_path, text):
    path = tmp_path / "config.json"
    if text is None:
        path.mkdir()
    elif text == "pipe":
        os.mkfifo(path)
    elif text == "loop":
        path.symlink_to(path)
    else:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match=r"config\.json"):
        read_json(path, DataError)


def test_a_full_disk_is_a_sentence(tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="No space left"):
        write_atomic(tmp_path / "file", b"data")
    assert list(tmp_path.iterdir()) == []


def test_metrics_survive_a_half_written_line(tmp_path):
    run = RunFolder(tmp_path / "run")
    for step in (1, 2, 3):
        run.log({"step": step})
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "lo')
    assert [record["step"] for record in run.metrics()] == [1, 2, 3]
    run.rewind("step", 2)
    assert [record["step"] for record in run.metrics()] == [1, 2]
    (run.path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "lo\n{"step": 3}\n')
    with pytest.raises(DataError, match=r"metrics.jsonl line 2 is not JSON"):
        run.metrics()
