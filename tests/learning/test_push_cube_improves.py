"""The main job in small: clone noisy demonstrations of push-cube, fine-tune in the denoising chain, succeed more."""

import numpy as np
import pytest
import torch

from robopolicy.core.randomness import episode_seeds
from robopolicy.data.record import record
from robopolicy.evaluation.success import evaluate_policy
from robopolicy.policies.configuration import DenoisingPolicyConfig
from robopolicy.policies.denoising import DenoisingPolicy, build_policy
from robopolicy.rl.critic import state_critic
from robopolicy.training.finetune import FinetuneConfig, finetune
from robopolicy.training.fit import FitConfig
from robopolicy.training.pretrain import PretrainConfig, pretrain
from sims.experts import NoisyController
from sims.registry import load_task, make_world


def _cloned_policy() -> DenoisingPolicy:
    world = make_world("push_cube", 64)
    expert = NoisyController(load_task("push_cube").expert(), 0.2, 0, world.spec.action)
    episodes = record(world, expert, episode_seeds(0, "demonstrations", 150))
    policy = build_policy(
        DenoisingPolicyConfig(sampling_steps=5, min_sampling_std=0.2, min_logprob_std=0.2),
        world.spec.observation,
        world.spec.action,
        fps=world.spec.fps,
        values={**episodes.observation, "action": episodes.actions},
    )
    pretrain(policy, episodes, PretrainConfig(fit=FitConfig(steps=1500)))
    return policy


def _success(policy: DenoisingPolicy) -> np.ndarray:
    seeds = episode_seeds(0, "evaluate", 200)
    return evaluate_policy(make_world("push_cube", 200), policy, seeds, deterministic=True).success


@pytest.mark.slow
def test_fine_tuning_makes_push_cube_succeed_far_more_often():
    policy = _cloned_policy()
    before = _success(policy).mean()
    policy.prepare_finetuning()
    world = make_world("push_cube", 256)
    torch.manual_seed(0)
    finetune(policy, state_critic(world.spec.observation, 1), world, FinetuneConfig(iterations=20, evaluate_every=0))
    assert _success(policy).mean() > before + 0.2
