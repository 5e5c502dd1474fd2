"""What fine-tuning would take, known before any weights are there: as much as with them, and nothing is left behind."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lerobot_models import FRONT, smolvla_config, tiny_smolvlm, word_tokenizer, xvla_config
from test_lerobot_policies import act_config, features, save, statistics

from robopolicy.cli import main
from robopolicy.core.errors import CheckpointError
from robopolicy.core.policy import require_trainable
from robopolicy.nn import shapes
from robopolicy.policies.lerobot import load_lerobot_policy
from robopolicy.policies.lerobot_configuration import LeRobotTuning
from robopolicy.training.memory import plan_memory

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
    from lerobot.policies.factory import make_pre_post_processors
    from transformers import SmolVLMConfig

    root = tmp_path_factory.mktemp("large")
    vlm = tiny_smolvlm(root / "vlm")
    text = {
        "model_type": "llama", "hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32,
        "num_attention_heads": 15, "num_key_value_heads": 5, "head_dim": 64, "vocab_size": 49280,
    }  # fmt: skip
    vision = {
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
        "image_size": 512, "patch_size": 16,
    }  # fmt: skip
    made: Any = SmolVLMConfig
    known = {"image_token_id": word_tokenizer().unk_token_id, "pad_token_id": 0}
    made(text_config=text, vision_config=vision, scale_factor=4, **known).save_pretrained(vlm)
    inputs, outputs = features(state=6, environment=None, cameras=(FRONT,))
    sizes = {"chunk_size": 50, "n_action_steps": 10, "max_state_dim": 32, "max_action_dim": 32, "num_steps": 10}
    sizes |= {"resize_imgs_with_padding": (512, 512), "tokenizer_max_length": 48, "num_vlm_layers": 16}
    config = smolvla_config(vlm, inputs, outputs, **sizes)
    target = root / "policy"
    config.save_pretrained(target)
    for part in make_pre_post_processors(config, dataset_stats=statistics(inputs, outputs)):
        part.save_pretrained(target)
    return target


def planned(folder: Path, tuning: LeRobotTuning, weights: bool):
    policy = require_trainable(load_lerobot_policy(folder, weights=weights).tuned_by(tuning))
    policy.prepare_finetuning()
    return plan_memory(policy, 10, 4, device=CPU)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_shapes_tell_what_weights_would(folder, monkeypatch, checkpointing):
    kind = json.loads((folder / "config.json").read_text())["type"]
    if checkpointing and kind == "act":
        pytest.skip("act has no steps to compute again")
    tuning = LeRobotTuning(checkpointing=checkpointing)
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
    command = [
        "finetune",
        f"finetune.policy={large}",
        "world=push_cube",
        "world.cameras=[front]",
        "world.image_size=32",
    ]
    command += ["finetune.dry_run=true", f"run.root={tmp_path / 'runs'}", "finetune.num_envs=4"]
    fits = ["finetune.rollout_length=2", "finetune.minibatch=1", "lerobot.checkpointing=true"]
    assert main([*command, *fits]) == 0
    said = capsys.readouterr().out
    assert "450 million parameters, 99.8 million of them learn" in said and "8 decisions and a copy of 1 42" in said
    assert not (tmp_path / "runs").exists()
    assert main([*command, "finetune.rollout_length=2000", "finetune.minibatch=8000"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "lower minibatch=8000" in said
    monkeypatch.setattr("robopolicy.verbs.finetune.free_memory", lambda device: 25 * 10**9)
    assert main([*command, "finetune.rollout_length=8", "finetune.minibatch=32"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "lower minibatch=32" in said
    size = re.search(r"micro_batch=(\d+) fits", said).group(1)
    assert main([*command, "finetune.rollout_length=8", "finetune.minibatch=32", f"finetune.micro_batch={size}"]) == 0
    assert f"activations of {size} decisions" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="model"):
        load_lerobot_policy(large)
