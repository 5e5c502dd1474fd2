"""Checkpoints of world models: what is damaged is refused by name, as a policy's is."""

import json
from pathlib import Path

import pytest
import torch
from point_world import SPEC, recorded
from safetensors.torch import load_file, save_file

from robopolicy.core.errors import CheckpointError
from worldmodels import load_world_model, save_world_model
from worldmodels.checkpoint import holds_world_model
from worldmodels.configuration import EnsembleConfig
from worldmodels.ensemble import EnsembleModel


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = EnsembleConfig(members=2, width=8, depth=1, head_width=8)
    save_world_model(EnsembleModel.build(config, SPEC, recorded(20), 0), tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"kind": "denoising_policy"}, "contains 'denoising_policy', not a world model"),
        ({"kind": "world_model/ensembel"}, r"Did you mean 'world_model/ensemble'"),
        ({"format": 99}, "format 99"),
        ({"format": None}, "format None"),
        ({"spec": {}}, "does not describe a world model"),
        ({"model": {"success_bonus": 1.0}}, "does not describe a world model"),
    ],
)
def test_a_wrong_description_is_refused(folder: Path, change: dict, complaint: str):
    description = {**json.loads((folder / "config.json").read_text()), **change}
    kept = {key: value for key, value in description.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    with pytest.raises(CheckpointError, match=complaint):
        load_world_model(folder)


def test_weights_that_do_not_fit_are_refused(folder: Path):
    weights = load_file(folder / "model.safetensors")
    del weights["max_logvar"]
    save_file(weights, folder / "model.safetensors")
    description = json.loads((folder / "config.json").read_text())
    del description["sha256"]
    (folder / "config.json").write_text(json.dumps(description))
    with pytest.raises(CheckpointError, match=r"(?s)model\.safetensors does not match .*max_logvar"):
        load_world_model(folder)


def test_a_checkpoint_of_before_settings_became_constants_opens_unless_they_differ(folder: Path):
    path, weights = folder / "config.json", load_world_model(folder).state_dict()
    description = json.loads(path.read_text())
    description["model"]["config"] |= {"min_logvar": -10.0, "max_logvar": 0.5}
    path.write_text(json.dumps(description))
    opened = load_world_model(folder).state_dict()
    assert all(torch.equal(value, opened[name]) for name, value in weights.items())
    description["model"]["config"]["max_logvar"] = 1.0
    path.write_text(json.dumps(description))
    with pytest.raises(CheckpointError, match=r"max_logvar' is 1\.0: it is fixed at 0\.5 since 0\.2\.0"):
        load_world_model(folder)


def test_a_description_that_is_no_object_is_refused(folder: Path):
    (folder / "config.json").write_text("[]")
    assert not holds_world_model(folder)
    with pytest.raises(CheckpointError, match="not a world model"):
        load_world_model(folder)


def test_a_failed_save_leaves_the_old_one(folder: Path, monkeypatch):
    model = load_world_model(folder)
    monkeypatch.setattr(type(model), "description", lambda self: {"gain": float("nan")})
    with pytest.raises(ValueError, match="not JSON compliant"):
        save_world_model(model, folder)
    assert [path.name for path in folder.parent.iterdir()] == ["checkpoint"]
    monkeypatch.undo()
    load_world_model(folder)
