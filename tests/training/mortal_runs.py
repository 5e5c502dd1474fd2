"""Runs of fine-tuning whose process may be killed: in a module of its own, for theirs imports nothing else."""

from dataclasses import replace
from pathlib import Path

import torch
from bandit_toys import FIELDS, ChainPolicy, MortalWorld, mean_reward

from robopolicy.core.run import RunFolder
from robopolicy.rl.critic import state_critic
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.finetune import finetune

GRAPE = FinetuneConfig(
    algorithm="grape",
    iterations=5,
    groups=6,
    group_size=4,
    epochs=2,
    minibatch_episodes=8,
    checkpoint_every=2,
    evaluate_every=0,
    target_kl=None,
)


def train_streams(folder: Path, kill_at: int) -> None:
    """Tune with a critic; three calls of the world's `step` an iteration, and more where it is evaluated."""
    world = MortalWorld(16, horizon=5)
    world.kill_at = kill_at
    torch.manual_seed(0)
    critic = state_critic(FIELDS, 1, width=8)
    config = FinetuneConfig(
        iterations=7,
        rollout_length=3,
        epochs=2,
        minibatch=32,
        scored_steps=1,
        auxiliaries=("bc",),
        discount=0.9,
        checkpoint_every=2,
        evaluate_every=3,
    )
    finetune(ChainPolicy(), critic, world, config, RunFolder(folder), evaluate=mean_reward, seed=4)


def train_pairs(folder: Path, kill_at: int) -> None:
    """Tune on groups and stored pairs, by GRAPE; four calls of the world's `step` an iteration."""
    world = MortalWorld(24)
    world.kill_at = kill_at
    config = replace(GRAPE, options={"preferences": {"share": 1.0, "refresh": 2}})
    finetune(ChainPolicy(), None, world, config, RunFolder(folder), seed=4)
