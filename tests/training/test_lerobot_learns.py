"""PPO in the chain teaches a SmolVLA, an untrained one of LeRobot's own class, to reach what it sees and is told."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lerobot_models import smolvla_config, tiny_smolvlm
from seeing_toys import CAMERA, SIZE, SeeingWorld

from robopolicy.build import load_trainable
from robopolicy.core.policy import to_tensors
from robopolicy.core.spec import STATE
from robopolicy.policies.lerobot_configuration import LeRobotTuning
from robopolicy.rl.critic import state_critic
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.finetune import finetune

pytestmark = pytest.mark.slow
CONFIG = FinetuneConfig(
    iterations=16, rollout_length=2, minibatch=256, epochs=4, critic_warmup=1, learning_rate=6e-4, actor_warmup=1,
    evaluate_every=0,
)  # fmt: skip


class Deaf(SeeingWorld):
    """The same world, whose rewards are those of other rows."""

    def step(self, actions):
        step = super().step(actions)
        step.rewards["reward"] = np.roll(step.rewards["reward"], 1, axis=0)
        return step


def save(folder: Path) -> Path:
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors

    inputs = {
        STATE: PolicyFeature(FeatureType.STATE, (2,)),
        CAMERA: PolicyFeature(FeatureType.VISUAL, (3, SIZE, SIZE)),
    }
    outputs = {"action": PolicyFeature(FeatureType.ACTION, (2,))}
    config = smolvla_config(
        tiny_smolvlm(folder / "vlm"), inputs, outputs, chunk_size=1, n_action_steps=1, num_steps=3, num_vlm_layers=2,
        max_action_dim=3, max_state_dim=2,
    )  # fmt: skip
    torch.manual_seed(0)
    policy: Any = get_policy_class("smolvla")(config)
    ones = {STATE: torch.ones(2), "action": torch.ones(2), CAMERA: torch.ones(3, 1, 1)}
    known = {key: {"mean": 0 * one, "std": 0.4 * one, "min": -one, "max": one} for key, one in ones.items()}
    for part in (policy, *make_pre_post_processors(config, dataset_stats=known)):
        part.save_pretrained(folder / "smolvla")
    return folder / "smolvla"


def mean_reward(policy: Any) -> float:
    """Return the mean reward of noise-free decisions at 256 starts that training does not see."""
    world = SeeingWorld(256, horizon=1)
    observation = to_tensors(world.reset(seeds=np.arange(10**6, 10**6 + 256)))
    actions = policy.act(observation, torch.Generator().manual_seed(5), deterministic=True).actions
    return float(world.step(actions.numpy()).rewards["reward"].mean())


@pytest.mark.parametrize("world", [SeeingWorld(256, horizon=1), Deaf(256, horizon=1)], ids=["told", "deaf"])
def test_it_learns_from_its_rewards_and_not_from_those_of_others(tmp_path, world):
    policy = load_trainable(save(tmp_path), LeRobotTuning(flow_noise_level=0.15))
    policy.prepare_finetuning()
    before = mean_reward(policy)
    critic = state_critic(world.spec.observation, 1, 16, 1, world.spec.instructions)
    finetune(policy, critic, world, CONFIG)
    after = mean_reward(policy)
    print({"before": round(before, 3), "after": round(after, 3)})
    assert before < -0.8
    assert after > -0.25 if type(world) is SeeingWorld else after < -0.6
