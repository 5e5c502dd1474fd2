"""Checkpoints: self-describing, strict, atomic; every kind of damage is a clear error."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from robopolicy.core.errors import CheckpointError
from robopolicy.core.spec import Field
from robopolicy.policies import DenoisingPolicy, DenoisingPolicyConfig, load_policy

FIELDS = {"observation.state": Field((3,)), "observation.images.front": Field((16, 16, 3), "uint8", 0, 255)}
CONFIG = DenoisingPolicyConfig(width=16, depth=2, sampling_steps=4, denoising_steps=8)


def _policy(finetuned: bool = True) -> DenoisingPolicy:
    values = {"action": torch.tensor([[-1.0, 0.0], [1.0, 4.0]]), "observation.state": torch.eye(3)}
    action = Field((2,), low=(-1.0, -8.0), high=(1.0, 8.0), unit="m")
    policy = DenoisingPolicy(CONFIG, FIELDS, action, fps=12.5, instructions=("push the cube",), values=values)
    if finetuned:
        policy.prepare_finetuning(2, train_encoder=False)
        with torch.no_grad():
            for weight in policy.trainable_parameters():
                weight.mul_(1.1)
    return policy


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    _policy().save(folder)
    return folder


@pytest.mark.parametrize("finetuned", [False, True])
def test_everything_comes_back(tmp_path: Path, finetuned: bool):
    policy = _policy(finetuned)
    policy.save(tmp_path / "checkpoint")
    restored = load_policy(tmp_path / "checkpoint")
    assert isinstance(restored, DenoisingPolicy)
    assert restored.spec == policy.spec and restored.config == policy.config
    assert restored.finetuning == policy.finetuning
    before, after = policy.state_dict(), restored.state_dict()
    assert set(before) == set(after)
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    trainable = [weight.requires_grad for weight in restored.parameters()]
    assert trainable == [weight.requires_grad for weight in policy.parameters()]
    image = torch.zeros(2, 1, 16, 16, 3, dtype=torch.uint8)
    observation = {"observation.state": torch.ones(2, 1, 3), "observation.images.front": image}
    first, second = (item.act(observation, torch.Generator().manual_seed(3)) for item in (policy, restored))
    assert torch.equal(first.actions, second.actions) and torch.equal(first.logp, second.logp)


def test_a_checkpoint_describes_itself(folder: Path):
    description = json.loads((folder / "config.json").read_text())
    assert description["kind"] == "denoising_policy"
    assert description["spec"]["action"]["unit"] == "m"
    assert description["finetuning"] == {"steps": 2, "train_encoder": False}
    names = set(load_file(folder / "model.safetensors"))
    assert "action_normalizer.scale" in names
    assert any(name.startswith("base.") for name in names)


def test_saving_again_replaces_the_old_one(folder: Path):
    _policy(finetuned=False).save(folder)
    assert load_policy(folder).spec.scored_steps == 4
    assert [path.name for path in folder.parent.iterdir()] == ["checkpoint"]


def test_a_crash_between_the_renames_is_recovered(folder: Path):
    folder.rename(folder.with_name(".checkpoint.robopolicy-old"))
    assert load_policy(folder).spec.scored_steps == 2


def test_missing_files_are_named(folder: Path, tmp_path: Path):
    with pytest.raises(CheckpointError, match="does not exist"):
        load_policy(tmp_path / "nowhere")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_policy(folder)


def test_corrupt_files_are_named(folder: Path):
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="corrupt"):
        load_policy(folder)
    weights.write_bytes(whole)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="corrupt"):
        load_policy(folder)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"kind": "ensemble_model"}, "contains 'ensemble_model', not a policy"),
        ({"format": 99}, "format 99"),
        ({"config": {"widht": 3}}, "widht"),
        ({"config": {"width": 32}}, "does not match"),
        ({"spec": {}}, "does not describe a policy"),
        ({"finetuning": None}, "does not match"),
        ({"finetuning": {"steps": 9, "train_encoder": True}}, "does not describe"),
    ],
)
def test_a_wrong_description_is_refused(folder: Path, change: dict, complaint: str):
    description = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**description, **change}))
    with pytest.raises(CheckpointError, match=complaint):
        load_policy(folder)


def test_a_folder_that_needs_its_own_code_is_refused(tmp_path: Path):
    description = {"model_type": "openvla", "auto_map": {"AutoConfig": "configuration_prismatic.OpenVLAConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(description))
    (tmp_path / "configuration_prismatic.py").write_text("raise RuntimeError('executed')")
    with pytest.raises(CheckpointError, match="code of a checkpoint is never executed"):
        load_policy(tmp_path)


def test_missing_weights_are_never_filled_in(folder: Path):
    weights = load_file(folder / "model.safetensors")
    del weights["network.denoiser.head.bias"]
    save_file(weights, folder / "model.safetensors")
    description = json.loads((folder / "config.json").read_text())
    del description["sha256"]
    (folder / "config.json").write_text(json.dumps(description))
    with pytest.raises(CheckpointError, match=r"head\.bias"):
        load_policy(folder)
