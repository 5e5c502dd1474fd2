"""The loss of the preset dppo equals the formula of Ren et al. 2024 (arXiv:2409.00588), written out on recorded chains.

    L = mean over (decision, step) of max(-r A g, -clip(r, 1 - e_k, 1 + e_k) A g),     g = gamma^(K' - 1 - k)
    log r = mean over dimensions of clamp(log N(x_{k+1}; mu_k, s_k), -5, 2), now minus then

with A standardised over the minibatch and e_k growing exponentially along the chain.
"""

import math

import pytest
import torch
from torch.distributions import Normal

from robopolicy.core.exchange import Part
from robopolicy.policies import DenoisingPolicy, DenoisingPolicyConfig
from robopolicy.rl.algorithm import build_algorithm
from robopolicy.rl.collect import play, start_streams
from robopolicy.rl.configuration import AlgorithmConfig
from robopolicy.rl.context import Context
from robopolicy.rl.objective import policy_loss
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.experience import with_executed
from robopolicy.training.update import Learner
from sims.registry import make_world

BASE, CLEANEST, RATE, GAMMA = 0.02, 0.1, 3.0, 0.85


@pytest.mark.checks("coefficient/ppo", "credit/denoising_discount", "weight/step_mean")
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("seed", [0, 1])
def test_gradients_of_the_published_loss(steps: int, seed: int):
    world = make_world("reach_planar", 6)
    spec = world.spec
    config = DenoisingPolicyConfig(width=32, depth=2, sampling_steps=5, logp_clamp=(-5.0, 2.0))
    policy = DenoisingPolicy(config, spec.observation, spec.action, fps=spec.fps, seed=seed)
    policy.prepare_finetuning(steps)
    generator = torch.Generator().manual_seed(seed)
    streams = start_streams(world, policy, seed, "x")
    recorded = with_executed(play(world, policy, 7, generator, streams), policy, ("",))
    raw = torch.randn(recorded.shape, generator=generator)
    with torch.no_grad():
        for weight in policy.trainable_parameters():
            weight.add_(0.02 * torch.randn(weight.shape, generator=generator))

    algorithm = build_algorithm(AlgorithmConfig(options={"denoising_discount": {"gamma": GAMMA}}))
    context = Context(generator, scored_steps=steps)
    prepared = algorithm.prepare(recorded.with_extras(advantage_gae=raw), context)
    settings = FinetuneConfig(clip=CLEANEST, clip_base=BASE, clip_rate=RATE)
    learner = Learner(policy, None, None, algorithm, settings, ("",))
    flat = prepared.flat()
    flat = flat.take(flat.alive.squeeze(1).nonzero().squeeze(1))
    observation = {key: value[:, 0] for key, value in flat.observation.items()}
    chain_latents = {key: value[:, 0] for key, value in flat.latents.items()}
    scores = policy.log_prob(observation, chain_latents)
    step = torch.arange(steps).expand(len(flat.group), 1, steps)
    scored = learner._score(flat, scores.logp.detach()[:, None], step, scores, Part(len(flat.group)), 0.0)
    coefficient, _ = algorithm.coefficient(scored)
    ours = policy_loss(scores.logp[:, None], coefficient, algorithm.weight(scored.mask, flat))
    gradients = torch.autograd.grad(ours, policy.trainable_parameters())

    again = policy.log_prob(observation, chain_latents)
    chain, executed = chain_latents["chain"], flat.valid[:, 0]
    density = Normal(again.extras["mean"], again.extras["std"].clamp(min=config.min_logprob_std))
    element = density.log_prob(chain[:, 1:]).clamp(-5, 2)[:, :, : policy.spec.chunk]
    counted = executed[:, None, :, None].expand_as(element).float()
    logp = (element * counted).sum((-2, -1)) / counted.sum((-2, -1))
    ratio = (logp - flat.logp_behaviour[:, 0]).exp()
    advantage = raw.flatten()[recorded.alive.flatten()]
    advantage = (advantage - advantage.mean()) / (advantage.std(unbiased=False) + 1e-8)
    t = torch.arange(steps) / max(1, steps - 1) if steps > 1 else torch.ones(1)
    width = BASE + (CLEANEST - BASE) * (torch.exp(RATE * t) - 1) / (math.exp(RATE) - 1)
    credit = advantage[:, None] * GAMMA ** (steps - 1 - torch.arange(steps)).float()
    published = torch.max(-credit * ratio, -credit * torch.clamp(ratio, 1 - width, 1 + width)).mean()
    expected = torch.autograd.grad(published, policy.trainable_parameters())
    assert not torch.allclose(ratio, torch.ones_like(ratio), atol=1e-3)
    assert bool(((ratio - 1).abs() > width).any())  # the clip is at work
    largest = max(float(item.abs().max()) for item in expected)
    for mine, theirs in zip(gradients, expected, strict=True):
        assert float((mine - theirs).abs().max()) < 1e-5 * max(1.0, largest)
