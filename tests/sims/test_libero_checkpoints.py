"""Checkpoints with LIBERO's keys, as LeRobot and openpi name them, are evaluated and fine-tuned by their path alone."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from lerobot_models import SIZE, pi_config, smolvla_config, tiny_pi, tiny_smolvlm, word_tokenizer
from safetensors.torch import load_file
from test_suite_libero import needs_libero

from robopolicy.benchmarks.tiny_vla import pi_processors
from robopolicy.cli import main
from robopolicy.core.spec import STATE
from robopolicy.policies.loading import load_policy

pytestmark = [needs_libero, pytest.mark.long]

CAMERAS = ("observation.images.image", "observation.images.image2")
WORLD = ["world.name=libero/libero_spatial:0", "world.options.horizon=8"]
REWARD = "world.options.reward=test_libero_checkpoints:height"
SMALL = [
    "finetune.iterations=1",
    "finetune.num_envs=2",
    "finetune.rollout_length=1",
    "finetune.minibatch=2",
    "finetune.epochs=1",
    "finetune.critic_width=8",
    "finetune.critic_warmup=0",
    "finetune.evaluate_every=1",
    "finetune.evaluate_episodes=2",
    "finetune.videos=0",
]


def height(observations):
    """A potential that every motion changes: random weights earn nothing of the task's own reward to learn from."""
    return observations[STATE][..., 2]


def save(kind: str, folder: Path, root: Path) -> Path:
    """Write a tiny policy of LeRobot's with LIBERO's keys, 8-dimensional state and 7-dimensional action."""
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors

    inputs = {camera: PolicyFeature(FeatureType.VISUAL, (3, SIZE, SIZE)) for camera in CAMERAS}
    inputs[STATE] = PolicyFeature(FeatureType.STATE, (8,))
    outputs = {"action": PolicyFeature(FeatureType.ACTION, (7,))}
    sizes = {"max_state_dim": 8, "max_action_dim": 8}
    shapes = {key: (3, 1, 1) if key in CAMERAS else each.shape for key, each in {**inputs, **outputs}.items()}
    known = {
        key: {"min": -torch.ones(shape), "max": torch.ones(shape), "mean": torch.zeros(shape), "std": torch.ones(shape)}
        for key, shape in shapes.items()
    }
    if kind == "smolvla":
        config = smolvla_config(tiny_smolvlm(root / "vlm"), inputs, outputs, **sizes)
        processors = make_pre_post_processors(config, dataset_stats=known)
    else:
        word_tokenizer().save_pretrained(root / "words")
        config = pi_config(kind, inputs, outputs, **sizes)
        processors = pi_processors(config, known, root / "words")
    torch.manual_seed(0)
    for part in (get_policy_class(config.type)(config), *processors):
        part.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["smolvla", "pi0"])
def test_a_checkpoint_is_evaluated_and_fine_tuned_by_path(kind, tmp_path):
    sys.modules.setdefault("test_libero_checkpoints", sys.modules[__name__])
    with tiny_pi(len(word_tokenizer())) if kind == "pi0" else nullcontext():
        folder = save(kind, tmp_path / kind, tmp_path)
        figures = tmp_path / "figures.json"
        batch = ["world.batch_size=2", f"run.root={tmp_path}"]
        settings = [*WORLD, *batch, "evaluate.episodes=2", "evaluate.videos=0", f"json={figures}"]
        assert main(["evaluate", str(folder), *settings]) == 0
        measured = json.loads(figures.read_text())["policy"]["deterministic"]
        assert measured["episodes"] == 2 and measured["world"] == "libero/libero_spatial:0"

        assert main(["finetune", f"finetune.policy={folder}", *WORLD, *batch, *SMALL, REWARD]) == 0
        (tuned,) = tmp_path.glob("finetune/**/last")
        spec = load_policy(tuned).spec
        assert spec.observation.keys() >= {*CAMERAS, STATE} and spec.action.shape == (7,)
        before, after = (load_file(each / "model.safetensors") for each in (folder, tuned))
        changed = [name for name, value in before.items() if not value.equal(after[name])]
        assert changed, "fine-tuning left every weight as it was"
