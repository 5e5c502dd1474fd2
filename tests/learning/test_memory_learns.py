"""A policy with memory learns to try what it has not tried, and to go back to what it found in the episode before."""

import pytest
import torch

from robopolicy.benchmarks.small_worlds import ACTION, DOORS, DoorsWorld
from robopolicy.core.randomness import episode_seeds
from robopolicy.core.trials import with_trials_of
from robopolicy.evaluation.success import evaluate_policy
from robopolicy.nn.configuration import NormalizationMode
from robopolicy.policies.configuration import MemoryPolicyConfig
from robopolicy.policies.memory import MemoryPolicy
from robopolicy.rl.critic import state_critic
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.finetune import finetune

pytestmark = pytest.mark.slow
HISTORY = 8
PPO = FinetuneConfig(
    algorithm="ppo",
    iterations=200,
    rollout_length=14,
    epochs=4,
    minibatch=512,
    learning_rate=2e-3,
    critic_learning_rate=3e-3,
    critic_warmup=1,
    actor_warmup=1,
    discount=0.99,
    target_kl=None,
    evaluate_every=0,
    # Without it, or with twice the rate, one in two or three policies stays with doors that it tries in a fixed order.
    auxiliaries=("entropy",),
    options={"entropy": {"weight": 0.02}},
)


def trials(rows, history, episodes=2):
    return with_trials_of({"trial_episodes": episodes}, DoorsWorld(rows, history))


def learned(history, seed=0, **changes):
    """Success in the first and in the second episode of 400 trials, after PPO."""
    raw = NormalizationMode.IDENTITY
    config = MemoryPolicyConfig(
        history=history, bins=DOORS, width=32, state_normalization=raw, action_normalization=raw
    )
    world = trials(128, history)
    policy = MemoryPolicy(config, world.spec.observation, ACTION, fps=10.0, seed=seed)
    torch.manual_seed(seed)
    critic = state_critic(world.spec.observation, history, width=64)
    finetune(policy, critic, world, FinetuneConfig(**{**vars(PPO), **changes}), seed=seed)
    seeds = episode_seeds(5, "judged", 400)
    rates = []
    for episodes in (1, 2):
        played = trials(200, history, episodes)
        rates.append(evaluate_policy(played, policy, seeds, deterministic=False).success_rate)
    return rates


@pytest.mark.checks("ReLIC")
def test_what_was_found_is_remembered_in_the_next_episode():
    """Three different doors are right in 75 % of scenes, which the last action alone suffices for, in every episode.

    With memory the second episode opens the door that was right, or the fourth: 100 %.
    """
    first, second = learned(HISTORY)
    assert first > 0.65 and second > 0.9
    assert learned(1)[1] < 0.82  # three standard errors above 75 %


@pytest.mark.checks("replay/partial_updates")
def test_memory_is_learned_from_parts_of_a_rollout_as_well():
    parts = {"replay": "partial_updates", "options": {**PPO.options, "partial_updates": {"parts": 2}}}
    _, second = learned(HISTORY, rollout_length=7, iterations=300, **parts)
    assert second > 0.9
