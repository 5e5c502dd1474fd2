"""The one-file DPPO of the documentation computes what the trainer computes: chain, gradient, advantages."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from robopolicy.core.exchange import Part
from robopolicy.nn.configuration import Spacing
from robopolicy.policies import DenoisingPolicy, DenoisingPolicyConfig
from robopolicy.rl.advantages.gae import gae
from robopolicy.rl.algorithm import build_algorithm
from robopolicy.rl.collect import play, start_streams
from robopolicy.rl.configuration import AlgorithmConfig
from robopolicy.rl.context import Context
from robopolicy.rl.objective import policy_loss
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.experience import with_executed
from robopolicy.training.update import Learner
from sims.registry import make_world

pytestmark = pytest.mark.long

PATH = Path(__file__).parents[2] / "docs" / "dppo_one_file.py"
STEPS, BASE, CLEANEST, GAMMA = 5, 0.02, 0.1, 0.85


@pytest.fixture(scope="module")
def one_file() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dppo_one_file", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["dppo_one_file"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def pair(one_file):
    """The package's policy, and the file's with that policy's network in place of its own."""
    world = make_world("reach_planar", 6)
    config = DenoisingPolicyConfig(
        width=32,
        depth=2,
        chunk=8,
        prediction_steps=8,
        sampling_steps=STEPS,
        timestep_spacing=Spacing.LEADING,
        min_sampling_std=0.2,
        min_logprob_std=0.2,
    )
    policy = DenoisingPolicy(config, world.spec.observation, world.spec.action, fps=world.spec.fps, seed=0)
    policy.prepare_finetuning(STEPS)
    settings = one_file.Settings(
        denoising_steps=STEPS, clip_noisy=BASE, clip_clean=CLEANEST, denoising_discount=GAMMA, width=8
    )
    mine = one_file.DiffusionPolicy(1, world.spec.action.size, settings)

    def predict(x, level, observation):
        return policy.network.denoise(x, (level + 1) / settings.grid, {"condition": observation})

    mine.predict = predict
    return world, policy, mine, settings


def test_the_gradient_is_the_trainers(one_file, pair):
    world, policy, mine, settings = pair
    generator = torch.Generator().manual_seed(0)
    streams = start_streams(world, policy, 0, "x")
    recorded = with_executed(play(world, policy, 7, generator, streams), policy, ("",))
    raw = torch.randn(recorded.shape, generator=generator)
    with torch.no_grad():
        for weight in policy.trainable_parameters():
            weight.add_(0.02 * torch.randn(weight.shape, generator=generator))

    algorithm = build_algorithm(AlgorithmConfig(options={"denoising_discount": {"gamma": GAMMA}}))
    prepared = algorithm.prepare(recorded.with_extras(advantage_gae=raw), Context(generator, scored_steps=STEPS))
    learner = Learner(policy, None, None, algorithm, FinetuneConfig(clip=CLEANEST, clip_base=BASE), ("",))
    rows = prepared.flat()
    rows = rows.take(rows.alive.squeeze(1).nonzero().squeeze(1))
    observation = {key: torch.as_tensor(value)[:, 0] for key, value in rows.observation.items()}
    latents = {key: value[:, 0] for key, value in rows.latents.items()}
    scores = policy.log_prob(observation, latents)
    step = torch.arange(STEPS).expand(len(rows.group), 1, STEPS)
    scored = learner._score(rows, scores.logp.detach()[:, None], step, scores, Part(len(rows.group)), 0.0)
    coefficient, _ = algorithm.coefficient(scored)
    theirs = policy_loss(scores.logp[:, None], coefficient, algorithm.weight(scored.mask, rows))
    expected = torch.autograd.grad(theirs, policy.trainable_parameters())

    condition = policy.encode(observation)["condition"]
    logp = mine.log_prob(latents["chain"], condition, rows.valid[:, 0])
    assert torch.allclose(logp, scores.logp, atol=1e-5)
    advantage = raw.flatten()[recorded.alive.flatten()]
    advantage = (advantage - advantage.mean()) / (advantage.std(unbiased=False) + 1e-8)
    loss, _ = one_file.ppo_loss(logp, rows.logp_behaviour[:, 0], advantage, settings)
    gradients = torch.autograd.grad(loss, policy.trainable_parameters())
    largest = max(float(item.abs().max()) for item in expected)
    assert largest > 1e-3
    for ours, other in zip(gradients, expected, strict=True):
        assert float((ours - other).abs().max()) < 1e-5 * max(1.0, largest)


def test_the_chain_without_noise_is_the_policys(pair):
    world, policy, mine, _ = pair
    observation = {key: torch.from_numpy(value) for key, value in world.reset(seeds=range(6)).items() if key != "task"}
    noise = torch.randn(6, 8, world.spec.action.size)
    expected = policy.trajectory(observation | {"task": [""] * 6}, noise)
    condition = policy.encode(observation | {"task": [""] * 6})["condition"]
    x = noise
    for k in range(STEPS):
        x, _ = mine.transition(x, torch.full((6,), k), condition, eta=0.0)
        assert torch.allclose(x, expected[:, k + 1], atol=1e-5)


def test_the_advantages_are_the_trainers(one_file):
    settings = one_file.Settings()
    draw = np.random.default_rng(0)
    rows, decisions, chunk = 5, 6, settings.chunk
    length = torch.from_numpy(draw.integers(1, chunk + 1, (rows, decisions)))
    valid = torch.arange(chunk) < length[:, :, None]
    reward, values, following = (
        torch.from_numpy(draw.normal(size=(rows, decisions, n))).float() for n in (chunk, 1, 1)
    )
    ended = torch.from_numpy(draw.random((rows, decisions)) < 0.3)
    terminated = ended & torch.from_numpy(draw.random((rows, decisions)) < 0.5)
    nothing = torch.zeros(0)
    rollout = one_file.Rollout(nothing, nothing, nothing, nothing, reward, valid, terminated, ended)
    values, following = values.squeeze(-1), following.squeeze(-1)
    estimate = one_file.advantages(rollout, values, following, settings)
    expected = gae(reward, valid, values, following, terminated, ended, settings.discount, settings.gae_lambda)
    assert torch.allclose(estimate, expected.advantages, atol=1e-5)


def test_the_schedule_is_the_packages(one_file, pair):
    _, policy, mine, _ = pair
    assert torch.allclose(mine.alphas, policy.schedule.alphas, atol=1e-6)
    table = policy.schedule.table
    x = torch.randn(STEPS, 8, policy.action.size)
    clean = torch.randn_like(x).clamp(-1, 1)
    mine.predict = lambda *_: clean
    mean, std = mine.transition(x, torch.arange(STEPS), torch.zeros(STEPS, 1))
    expected = table[:, 2][:, None, None] * clean + table[:, 3][:, None, None] * x
    assert torch.allclose(mean, expected.float(), atol=1e-5)
    assert torch.allclose(std.flatten(), table[:, 4].float(), atol=1e-6)


@pytest.mark.slow
def test_it_learns(one_file):
    before, after = one_file.main(one_file.Settings())
    assert after > before + 0.2, (before, after)
