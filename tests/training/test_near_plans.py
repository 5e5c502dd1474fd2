"""Imitation beside reinforcement, averaged policies, who acts, experts as rows, planning in imagined training."""

import copy
from dataclasses import replace
from itertools import repeat
from pathlib import Path

import pytest
import torch
from bandit_toys import BanditWorld, ChainPolicy

from robopolicy.core.policy import Trainable
from robopolicy.core.rollouts import Rollouts
from robopolicy.core.run import RunFolder
from robopolicy.core.spec import STATE
from robopolicy.rl.algorithm import build_algorithm
from robopolicy.rl.context import Context
from robopolicy.rl.episodes import EpisodePlayer
from robopolicy.rl.requests import groups_of
from robopolicy.training.average import PolicyAverage
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.experience import decisions_at
from robopolicy.training.finetune import finetune
from robopolicy.training.guidance import Guidance
from robopolicy.training.update import Learner

CONFIG = FinetuneConfig(
    algorithm="grpo",
    weight="step_mean",
    iterations=4,
    groups=3,
    group_size=4,
    epochs=2,
    minibatch=16,
    learning_rate=3e-3,
    actor_warmup=1,
    gradient_clip=1e9,
    target_kl=None,
    evaluate_every=0,
    checkpoint_every=2,
)


def whole_episodes(policy: Trainable, seed: int = 0) -> Rollouts:
    """Six episodes of a policy in two groups, with made-up advantages."""
    world, draws = BanditWorld(6), torch.Generator().manual_seed(seed)
    rollouts = EpisodePlayer(world, policy).play(groups_of([1, 2], 3), draws)
    return rollouts.with_extras(advantage=torch.randn(rollouts.mask.shape, generator=draws))


def gradient_of(learner: Learner, rollouts: Rollouts) -> list[torch.Tensor]:
    """The gradient of the loss that one epoch of one minibatch takes a step along."""
    learner.update(rollouts, Context(torch.Generator().manual_seed(3)), torch.Generator().manual_seed(4), "the test")
    return [parameter.grad.clone() for parameter in learner.parameters if parameter.grad is not None]


def learner_of(policy: Trainable, config: FinetuneConfig, **parts) -> Learner:
    single = replace(config, epochs=1, minibatch=10**6)
    instructions = BanditWorld(1).spec.instructions
    return Learner(policy, None, None, build_algorithm(single), single, instructions, **parts)


@pytest.mark.checks("controller/imitation_mix", "DataMind")
def test_the_loss_is_the_mix_of_imitation_and_reinforcement():
    policy = ChainPolicy(seed=1)
    rollouts = whole_episodes(policy)
    batch = {"observation": {STATE: torch.rand(5, 1, 2)}, "actions": torch.rand(5, 1, 2)}
    config = replace(CONFIG, auxiliaries=("experts",), options={"experts": {"weight": 1.0}})

    def gradient(**knobs: float) -> list[torch.Tensor]:
        learner = learner_of(copy.deepcopy(policy), config, experts=repeat(batch))
        learner.knobs.update(knobs)
        return gradient_of(learner, rollouts)

    imitation = gradient(experts_scale=1.0, rl_scale=0.0)
    reinforcement = gradient(experts_scale=0.0, rl_scale=1.0)
    for mixed, a, b in zip(gradient(experts_scale=0.7, rl_scale=0.3), imitation, reinforcement, strict=True):
        assert float(a.abs().max()) > 0
        assert float(b.abs().max()) > 0
        torch.testing.assert_close(mixed, 0.7 * a + 0.3 * b)


@pytest.mark.checks("Missing-Old-Logits")
def test_the_average_of_policies_weighs_each_by_its_age():
    policy = ChainPolicy(seed=0)
    average, decay = PolicyAverage(policy, 0.8), 0.8
    past = [[weight.detach().clone() for weight in policy.parameters()]]
    for number in range(1, 6):
        with torch.no_grad():
            for weight in policy.parameters():
                weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)))
        past.append([weight.detach().clone() for weight in policy.parameters()])
        average.update(policy)
    shares = torch.tensor([decay ** (5 - number) for number in range(6)])
    for place, mean in enumerate(average.policy.parameters()):
        slow = sum(share * weights[place] for share, weights in zip(shares / shares.sum(), past, strict=True))
        torch.testing.assert_close(mean, slow)
    before = [mean.clone() for mean in average.policy.parameters()]
    average.update(policy)
    assert not torch.equal(before[0], next(iter(average.policy.parameters())))
    average.take_back()
    assert all(torch.equal(a, b) for a, b in zip(before, average.policy.parameters(), strict=True))


@pytest.mark.checks("Missing-Old-Logits", "coefficient/decoupled_ppo")
def test_clipping_around_the_average_is_the_gradient_of_the_decoupled_surrogate():
    actor, policy = ChainPolicy(seed=1), ChainPolicy(seed=1)
    rollouts = whole_episodes(actor)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(5)))
    config = replace(CONFIG, proximal="average", coefficient="decoupled_ppo", clip=0.05)
    learner = learner_of(policy, config)
    assert learner.average is not None
    learner.average.restore({"total": 1.0, "policy": actor.state_dict()})
    learner.average.update(policy)  # halfway between the two

    observation, latents = decisions_at(rollouts, rollouts.alive, BanditWorld(1).spec.instructions)
    mine = copy.deepcopy(policy)
    logp, proximal = mine.log_prob(observation, latents).logp, learner.average.log_prob(observation, latents)
    behaviour, advantage = rollouts.logp_behaviour[rollouts.alive], rollouts.extras["advantage"][rollouts.alive]
    ratio, weight = (logp - proximal).exp(), (proximal - behaviour).exp()
    assert bool((ratio > 1.05).any() & (ratio < 0.95).any())
    surrogate = torch.minimum(ratio * weight * advantage, ratio.clamp(0.95, 1.05) * weight * advantage).mean()
    expected = torch.autograd.grad(-surrogate, list(mine.parameters()))
    for found, slow in zip(gradient_of(learner, rollouts), expected, strict=True):
        torch.testing.assert_close(found, slow, atol=1e-6, rtol=1e-4)


def tuned(config: FinetuneConfig, run: Path | None = None, guidance: Guidance | None = None) -> dict[str, torch.Tensor]:
    policy = ChainPolicy()
    folder = None if run is None else RunFolder(run)
    finetune(policy, None, BanditWorld(12), config, folder, guidance=guidance or Guidance())
    return dict(policy.state_dict())


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.checks("Missing-Old-Logits")
def test_stale_decisions_are_clipped_around_what_the_configuration_says_and_averages_survive_a_resume(tmp_path):
    stale = replace(CONFIG, coefficient="decoupled_ppo", delay=2, clip=0.02, learning_rate=1e-2)
    around = {name: tuned(replace(stale, proximal=name), tmp_path / name) for name in ("current", "behaviour")}
    assert not same(around["current"], around["behaviour"])
    average = replace(stale, proximal="average", proximal_decay=0.8)
    whole = tuned(average)
    assert not same(whole, around["current"])
    tuned(replace(average, iterations=2), tmp_path / "parts")
    assert same(whole, tuned(average, tmp_path / "parts"))
