import json
import os
import stat

import pytest
import torch

from robopolicy.core.errors import CheckpointError, DataError, StorageError
from robopolicy.core.run import RunFolder
from robopolicy.core.storage import read_json, recover_folder, write_atomic, write_folder_atomic, write_json
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
    with pytest.raises(CheckpointError, match="does not exist"):
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
    folder.rename(tmp_path / "checkpoint.old")
    assert (recover_folder(folder) / "a").read_text() == "old"


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
