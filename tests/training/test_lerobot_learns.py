"""PPO teaches untrained policies of LeRobot's own classes to reach what they see and are told."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lerobot_models import smolvla_config, tiny_act, tiny_smolvlm, word_tokenizer, xvla_config
from seeing_toys import CAMERA, SIZE, SeeingWorld

from robopolicy.build import load_trainable
from robopolicy.core.policy import to_tensors
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE
from robopolicy.policies.lerobot_configuration import LeRobotTuning
from robopolicy.rl.critic import state_critic
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.finetune import finetune

pytestmark = pytest.mark.slow
RATES = {"smolvla": 6e-4, "xvla": 5e-5, "act": 3e-5}
SEEDS = {"smolvla": 0, "xvla": 2, "act": 0}
"""Of the weights: the policy begins far from what is asked for."""


def config(kind: str) -> FinetuneConfig:
    return FinetuneConfig(
        iterations=16, rollout_length=2, minibatch=256, epochs=4, critic_warmup=1, learning_rate=RATES[kind],
        actor_warmup=1, evaluate_every=0,
    )  # fmt: skip


class Deaf(SeeingWorld):
    """The same world, whose rewards are those of other rows."""

    def step(self, actions):
        step = super().step(actions)
        step.rewards["reward"] = np.roll(step.rewards["reward"], 1, axis=0)
        return step


def save(kind: str, folder: Path) -> Path:
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors

    inputs = {
        STATE: PolicyFeature(FeatureType.STATE, (2,)),
        CAMERA: PolicyFeature(FeatureType.VISUAL, (3, SIZE, SIZE)),
    }
    outputs = {"action": PolicyFeature(FeatureType.ACTION, (2,))}
    sizes: dict[str, Any] = {"chunk_size": 1, "n_action_steps": 1, "max_action_dim": 3, "max_state_dim": 2}
    if kind == "act":
        del inputs[CAMERA]
        inputs[ENVIRONMENT_STATE] = PolicyFeature(FeatureType.ENV, (2,))
        (folder / "policy").mkdir()
        settings = {"features": {ENVIRONMENT_STATE: STATE}}  # without a camera ACT asks for both
        (folder / "policy" / "robopolicy.json").write_text(json.dumps(settings))
        made = tiny_act(inputs, outputs, chunk_size=1, n_action_steps=1)
    elif kind == "smolvla":
        made = smolvla_config(tiny_smolvlm(folder / "vlm"), inputs, outputs, num_steps=3, num_vlm_layers=2, **sizes)
    else:
        word_tokenizer().save_pretrained(folder / "words")
        made = xvla_config(folder / "words", inputs, outputs, num_denoising_steps=3, **sizes)
    torch.manual_seed(SEEDS[kind])
    policy: Any = get_policy_class(kind)(made)
    ones = {
        STATE: torch.ones(2),
        ENVIRONMENT_STATE: torch.ones(2),
        "action": torch.ones(2),
        CAMERA: torch.ones(3, 1, 1),
    }
    known = {key: {"mean": 0 * one, "std": 0.4 * one, "min": -one, "max": one} for key, one in ones.items()}
    for part in (policy, *make_pre_post_processors(made, dataset_stats=known)):
        part.save_pretrained(folder / "policy")
    return folder / "policy"


def mean_reward(policy: Any) -> float:
    """Return the mean reward of noise-free decisions at 256 starts that training does not see."""
    world = SeeingWorld(256, horizon=1)
    observation = to_tensors(world.reset(seeds=np.arange(10**6, 10**6 + 256)))
    actions = policy.act(observation, torch.Generator().manual_seed(5), deterministic=True).actions
    return float(world.step(actions.numpy()).rewards["reward"].mean())


@pytest.mark.parametrize("kind", ["smolvla", "xvla", "act"])
@pytest.mark.parametrize("world", [SeeingWorld(256, horizon=1), Deaf(256, horizon=1)], ids=["told", "deaf"])
def test_it_learns_from_its_rewards_and_not_from_those_of_others(tmp_path, kind, world):
    policy = load_trainable(save(kind, tmp_path), LeRobotTuning(flow_noise_level=0.15, std=0.15))
    policy.prepare_finetuning()
    before = mean_reward(policy)
    critic = state_critic(world.spec.observation, 1, 16, 1, world.spec.instructions)
    finetune(policy, critic, world, config(kind))
    after = mean_reward(policy)
    print({"before": round(before, 3), "after": round(after, 3)})
    assert before < -0.7
    assert after > -0.25 if type(world) is SeeingWorld else after < -0.6
