"""What fine-tuning would take, known before any weights are there: as much as with them, and nothing is left behind."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lerobot_models import FRONT, smolvla_config, tiny_smolvlm, word_tokenizer, xvla_config
from test_lerobot_policies import act_config, features, save

from robopolicy.benchmarks import full_size
from robopolicy.cli import main
from robopolicy.core.errors import CheckpointError
from robopolicy.core.policy import require_trainable
from robopolicy.nn import shapes
from robopolicy.policies.lerobot.acting import load_lerobot_policy
from robopolicy.policies.lerobot.configuration import LeRobotTuning
from robopolicy.training.memory import plan_memory

pytestmark = pytest.mark.long

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["smolvla", "xvla", "act"])
def folder(tmp_path_factory, request) -> Path:
    root = tmp_path_factory.mktemp("dry")
    inputs, outputs = features(state=6, environment=None, cameras=(FRONT,))
    word_tokenizer().save_pretrained(root / "words")
    if request.param == "smolvla":
        config = smolvla_config(tiny_smolvlm(root / "vlm"), inputs, outputs)
    elif request.param == "act":
        config = act_config(state=6, environment=None, cameras=(FRONT,))
    else:
        config = xvla_config(root / "words", inputs, outputs, num_image_views=2)
    return save(config, root / "policy")


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """A SmolVLA at its own sizes: config.json, processors, and no weights."""
    root = tmp_path_factory.mktemp("large")
    config = full_size.write_configuration("smolvla", root)
    config.num_steps = 2  # ten take five times as long to plan
    config.save_pretrained(root)
    return root


def planned(folder: Path, tuning: LeRobotTuning, weights: bool):
    policy = require_trainable(load_lerobot_policy(folder, weights=weights).tuned_by(tuning))
    policy.prepare_finetuning()
    return plan_memory(policy, 10, 4, device=CPU)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_shapes_tell_what_weights_would(folder, monkeypatch, checkpointing):
    kind = json.loads((folder / "config.json").read_text())["type"]
    if checkpointing and kind == "act":
        pytest.skip("act has no steps to compute again")
    tuning = LeRobotTuning(gradient_checkpointing=checkpointing)
    real = planned(folder, tuning, weights=True)
    monkeypatch.setattr(shapes, "LARGE", 64)  # so that the tiny policy has tensors without numbers as well
    with shapes.shapes_only():
        dry = planned(folder, tuning, weights=False)
    untold = {"activations": 0, "deciding": 0, "scoring": 0, "each": 0}
    assert replace(dry, **untold) == replace(real, **untold)
    assert real.deciding > 0 and real.scoring > 0
    # Kernels of attention keep other things with weights on a CPU, and their operations are not counted there.
    activations, deciding, scoring = (0.08, 0.25, 0.11) if kind == "xvla" else (0.05, 0.01, 0)
    assert dry.activations == pytest.approx(real.activations, rel=activations)
    assert dry.deciding == pytest.approx(real.deciding, rel=deciding)
    assert dry.scoring == pytest.approx(real.scoring, rel=scoring)


def test_without_numbers_nothing_is_taken(folder, monkeypatch):
    monkeypatch.setattr(shapes, "LARGE", 64)
    with shapes.shapes_only():
        weight, count = torch.randn(100, 100), torch.arange(100)
        mixed = (weight[count > 50] @ weight).mean()
        assert weight.device == mixed.device == shapes.META and weight[:7].shape == (7, 100)
        assert count.sum() == 4950 and bool(mixed) and torch.zeros(5).sum() == 0
    assert torch.randn(100, 100).device == CPU


def test_a_policy_at_its_own_size_is_planned_from_its_configuration_alone(large, tmp_path, capsys, monkeypatch):
    command = ["finetune", f"finetune.policy={large}", "world=push_cube", "world.cameras=[front]"]
    command += ["world.image_size=32", "finetune.dry_run=true", f"run.root={tmp_path / 'runs'}", "finetune.num_envs=4"]
    fits = ["finetune.rollout_length=2", "finetune.minibatch=1", "lerobot.gradient_checkpointing=true"]
    assert main([*command, *fits]) == 0
    output = capsys.readouterr().out
    assert (
        "450 million parameters, 99.8 million trainable" in output and "8 action chunks and a minibatch of 1 " in output
    )
    assert not (tmp_path / "runs").exists()
    more = ["finetune.rollout_length=8", "finetune.minibatch=32"]
    monkeypatch.setattr("robopolicy.verbs.finetune.free_memory", lambda device: 6 * 10**9)
    assert main([*command, *more]) == 2
    output = " ".join(capsys.readouterr().err.split())
    assert "lower finetune.minibatch=32" in output
    size = re.search(r"micro_batch=(\d+) fits", output).group(1)
    assert main([*command, *more, f"finetune.micro_batch={size}"]) == 0
    assert f"activations of {size} chunks" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="model"):
        load_lerobot_policy(large)
