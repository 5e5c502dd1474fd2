"""What is kept of modules on disk: damage is seen and named, older files load, hashes cost little."""

import json
import os
import re
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from robopolicy.core.checkpoints import (
    HASH,
    LARGEST_DESCRIPTION,
    WEIGHTS,
    Checkpoint,
    invalid_field_entry,
    read_description,
    read_weights,
    restoring,
    write_checkpoint,
)
from robopolicy.core.errors import CheckpointError
from robopolicy.core.tensors import file_hash, load_tree, save_tree


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "checkpoint", {"kind": "line"}, nn.Linear(3, 2))
    return tmp_path / "checkpoint"


def flip(path: Path, place: int = -3) -> None:
    """Flip one bit of a file."""
    whole = bytearray(path.read_bytes())
    whole[place] ^= 1
    path.write_bytes(whole)


def test_the_description_holds_the_hash_of_the_weights(folder: Path):
    assert read_description(folder)[HASH] == file_hash(folder / WEIGHTS)
    read_weights(nn.Linear(3, 2), folder)


def test_a_flipped_bit_is_refused_by_name(folder: Path):
    flip(folder / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not the file that was saved with config\.json"):
        read_weights(nn.Linear(3, 2), folder)


@pytest.mark.parametrize("wrong", [7, ["a"], "abc", {}, ""])
def test_a_hash_that_is_none_is_refused(folder: Path, wrong: object):
    description = {**read_description(folder), HASH: wrong}
    (folder / "config.json").write_text(json.dumps(description))
    with pytest.raises(CheckpointError, match="not the file"):
        read_weights(nn.Linear(3, 2), folder)


def test_older_checkpoints_have_no_hash(folder: Path):
    description = {key: value for key, value in read_description(folder).items() if key != HASH}
    (folder / "config.json").write_text(json.dumps(description))
    flip(folder / WEIGHTS)
    read_weights(nn.Linear(3, 2), folder)


def test_weights_alone_decide_the_weights_file(tmp_path: Path):
    line = nn.Linear(3, 2)
    write_checkpoint(tmp_path / "a", {"kind": "line"}, line)
    write_checkpoint(tmp_path / "b", {"kind": "other", "more": 1}, line)
    assert (tmp_path / "a" / WEIGHTS).read_bytes() == (tmp_path / "b" / WEIGHTS).read_bytes()


def test_a_flipped_bit_of_a_tree_is_refused_by_name(tmp_path: Path):
    save_tree(tmp_path, "state", {"weight": torch.arange(4.0), "step": 3, "inner": {"more": torch.zeros(2)}})
    loaded = load_tree(tmp_path, "state")
    assert set(loaded) == {"weight", "step", "inner"}
    flip(tmp_path / "state.safetensors")
    with pytest.raises(CheckpointError, match=r"state\.safetensors is not the file that was saved with state\.json"):
        load_tree(tmp_path, "state")


def test_older_trees_have_no_hash(tmp_path: Path):
    save_tree(tmp_path, "state", {"weight": torch.arange(4.0)})
    (tmp_path / "state.json").write_text('{"weight": {"__tensor__": "weight"}}')
    flip(tmp_path / "state.safetensors")
    load_tree(tmp_path, "state")


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(10**6, 10**6),
        lambda: [nn.Linear(8, 8) for _ in range(10**9)],
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 1, 8), 10**9),
        lambda: torch.linspace(0, 1, 10**12),
        lambda: torch.logspace(0, 1, steps=10**12),
        lambda: torch.arange(10**12),
        lambda: torch.arange(0, 1, 1e-12, dtype=torch.float64),
        lambda: torch.arange(start=10**12, end=0, step=-1),
        lambda: torch.eye(10**5),
        lambda: torch.eye(10, m=10**12),
        lambda: torch.zeros(10**5, 10**5),
        lambda: nn.Embedding(10**12, 4),
    ],
)
def test_a_description_cannot_ask_for_more_than_its_weights_fill(folder: Path, make):
    with pytest.raises(CheckpointError, match=r"config\.json.* far more memory") as caught, restoring(folder, "a line"):
        make()
    assert "\n" not in str(caught.value)


def test_what_fits_is_made_as_ever(folder: Path):
    torch.manual_seed(0)
    free = nn.Linear(64, 64).weight, torch.randn(5), torch.randperm(9)
    torch.manual_seed(0)
    with restoring(folder, "a line"):
        bound = nn.Linear(64, 64).weight, torch.randn(5), torch.randperm(9)
    assert all(torch.equal(one, other) for one, other in zip(free, bound, strict=True))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"kind": ["a"]}', "its kind is a list instead of a text"),
        ("[" * 100_000 + "]" * 100_000, "corrupt"),
        ('{"a": ' * 100_000 + "1" + "}" * 100_000, "corrupt"),
        ('{"kind": ' + "1" * 10_000 + "}", "corrupt"),
        ('{"kind": "\\', "corrupt"),
    ],
    ids=["list", "deep list", "deep map", "long number", "cut"],
)
def test_descriptions_that_are_none_are_refused_in_a_line(folder: Path, text: str, complaint: str):
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=complaint) as caught:
        read_description(folder)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_that_was_written_anew_is_opened_anew(folder: Path):
    stamp = time.time_ns() - 10**9
    os.utime(folder / "config.json", ns=(stamp, stamp))
    first = Checkpoint.open(folder)
    assert first.description["kind"] == "line" and Checkpoint.open(str(folder)) is Checkpoint.open(first) is first
    for change in (lambda: write_checkpoint(folder, {"kind": "other"}, nn.Linear(3, 2)), lambda: rename_kind(folder)):
        before = read_description(folder)["kind"]
        change()
        assert Checkpoint.open(folder) is not first and read_description(folder)["kind"] != before
    os.rename(folder, folder.with_name(".checkpoint.robopolicy-old"))
    assert Checkpoint.open(folder).description["kind"] == "third" and folder.is_dir(), "it is put back"


def rename_kind(folder: Path) -> None:
    """Write config.json again in its place, as long as before."""
    (folder / "config.json").write_text((folder / "config.json").read_text().replace("other", "third"))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.int64, torch.bool])
def test_weights_are_neither_rounded_nor_reinterpreted(folder: Path, dtype: torch.dtype):
    """Without the hash, which whoever changes them on purpose removes."""
    tensors = load_file(folder / WEIGHTS)
    name = next(iter(tensors))
    save_file({**tensors, name: tensors[name].to(dtype)}, folder / WEIGHTS)
    description = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**description, HASH: None}))
    with pytest.raises(CheckpointError, match=rf"{name}' as {str(dtype)[6:]}, but it is used as float32"):
        read_weights(nn.Linear(3, 2), folder)
    save_file({name: value.bfloat16() for name, value in tensors.items()}, folder / WEIGHTS)
    read_weights(nn.Linear(3, 2), folder)


def test_a_description_is_of_a_usual_size_and_parsed_once(folder: Path, monkeypatch):
    parsed: list[str] = []
    real = json.loads
    monkeypatch.setattr("robopolicy.core.checkpoints.json.loads", lambda text: parsed.append(text) or real(text))
    for _ in range(3):
        read_description(folder)
    assert len(parsed) <= 1
    (folder / "config.json").write_text(json.dumps({"kind": "x", "more": "y" * LARGEST_DESCRIPTION}))
    with pytest.raises(CheckpointError, match=r"config\.json is larger than 4194304 bytes"):
        read_description(folder)
    assert len(parsed) <= 1


@pytest.mark.parametrize(
    ("bounds", "wrong"),
    [
        ({"low": 1, "high": -1}, "low 1 and high -1"),
        ({"low": [0, 2], "high": 1}, r"low \[0, 2\] and high 1"),
        ({"low": "inf"}, "no values in between"),
        ({"low": [0.0, "-inf"], "high": [0.0, "inf"]}, "^$"),
        ({"low": -1, "high": [0, 1]}, "^$"),
        ({}, "^$"),
    ],
)
def test_no_bounds_lie_the_wrong_way_round(bounds, wrong):
    """A policy of such a field would be evaluated with all its actions clipped to one end."""
    assert re.search(wrong, invalid_field_entry({"shape": [2], **bounds}))
