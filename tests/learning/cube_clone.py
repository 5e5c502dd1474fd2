"""A policy that imitates noisy demonstrations of push-cube and succeeds now and then, and how often it does."""

from robopolicy.core.policy import Policy
from robopolicy.core.randomness import episode_seeds
from robopolicy.data.record import record
from robopolicy.evaluation.success import evaluate_policy
from robopolicy.policies.configuration import DenoisingPolicyConfig
from robopolicy.policies.denoising import DenoisingPolicy
from robopolicy.training.configuration import FitConfig, PretrainConfig
from robopolicy.training.pretrain import pretrain
from sims.experts import NoisyController
from sims.registry import load_task, make_world


def cloned_policy() -> DenoisingPolicy:
    """Return the policy."""
    world = make_world("push_cube", 64)
    expert = NoisyController(load_task("push_cube").expert(), 0.2, 0, world.spec.action)
    episodes = record(world, expert, episode_seeds(0, "demonstrations", 150))
    policy = DenoisingPolicy(
        DenoisingPolicyConfig(sampling_steps=5, min_sampling_std=0.2, min_logprob_std=0.2),
        world.spec.observation,
        world.spec.action,
        fps=world.spec.fps,
        values={**episodes.observation, "action": episodes.actions},
    )
    pretrain(policy, episodes, PretrainConfig(fit=FitConfig(steps=1500)))
    return policy


def success(policy: Policy) -> float:
    """Return how often it succeeds without exploration noise, in 200 episodes of the simulator."""
    seeds = episode_seeds(0, "evaluate", 200)
    return evaluate_policy(make_world("push_cube", 200), policy, seeds, deterministic=True).success_rate
