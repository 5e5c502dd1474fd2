"""Importance sampling by chain densities: unbiased where enumeration says so, exact on itself, and refused in time."""

import copy
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from robopolicy.core.errors import ConfigError, DataError
from robopolicy.data.chains import Chains, read_chains
from robopolicy.data.lerobot_format import write_dataset
from robopolicy.data.lerobot_reading import read_dataset
from robopolicy.data.record import record, record_chains
from robopolicy.evaluation.importance import (
    ImportanceEvaluator,
    importance_estimate,
    log_densities,
    outcome,
    with_densities,
)
from robopolicy.policies.configuration import DenoisingPolicyConfig, Likelihood
from robopolicy.policies.denoising import DenoisingPolicy
from sims.registry import make_world


def test_every_variant_is_unbiased_or_exact_on_all_trajectories_of_two_tabular_decisions():
    behaviour, target = np.array([[0.5, 0.5], [0.2, 0.8]]), np.array([[0.9, 0.1], [0.6, 0.4]])
    paid = np.array([[1.0, 3.0], [-2.0, 5.0]])
    paths = list(itertools.product((0, 1), repeat=2))
    chance = np.array([behaviour[0, one] * behaviour[1, two] for one, two in paths])
    ratio = np.array([[np.log(target[t, a] / behaviour[t, a]) for t, a in enumerate(path)] for path in paths])
    reward = np.array([[paid[t, a] for t, a in enumerate(path)] for path in paths])
    truth = (target * paid).sum()
    for per_decision in (True, False):
        estimate = importance_estimate(ratio, reward, per_decision=per_decision, normalised=False)
        assert chance @ estimate.values == pytest.approx(truth, abs=1e-12)
        repeated = np.repeat(np.arange(4), np.round(100 * chance).astype(int))  # as often as they happen
        estimate = importance_estimate(ratio[repeated], reward[repeated], per_decision=per_decision)
        assert estimate.values.mean() == pytest.approx(truth, abs=1e-12)
        assert estimate.effective == pytest.approx(100 / (chance @ np.exp(2 * ratio.sum(1))))


def test_a_gaussian_step_against_the_closed_form():
    draws, shift, count = np.random.default_rng(0), 0.5, 40_000
    action = draws.normal(size=count)
    ratio = (action * shift - shift**2 / 2)[:, None]
    plain = importance_estimate(ratio, action[:, None] ** 2, normalised=False)
    own = importance_estimate(ratio, action[:, None] ** 2)
    truth = 1 + shift**2
    for estimate in (plain, own):
        error = estimate.values.std() / math.sqrt(count)
        assert abs(estimate.values.mean() - truth) < 4 * error
        assert estimate.effective / count == pytest.approx(math.exp(-(shift**2)), rel=0.05)
    replicates = [
        importance_estimate(part[:, :1], part[:, 1:]).values.mean()
        for part in np.split(np.concatenate([ratio, action[:, None] ** 2], 1), 200)
    ]
    assert own.values.std() / math.sqrt(200) == pytest.approx(np.std(replicates), rel=0.2), "the interval is right"
    clipped = importance_estimate(ratio, action[:, None] ** 2, normalised=False, clip=1.0)
    assert clipped.values.mean() < truth and clipped.clipped == pytest.approx((ratio > 0).mean())


def test_weights_that_vanish_do_not_divide_by_nothing():
    ratio, reward = np.array([[-1e4], [-2e4]]), np.ones((2, 1))
    estimate = importance_estimate(ratio, reward)
    assert estimate.effective == 1.0 and estimate.values.tolist() == [1.0, 1.0]


def make_policy(seed=0, **settings) -> DenoisingPolicy:
    config = DenoisingPolicyConfig(
        chunk=2, prediction_steps=3, sampling_steps=3, min_sampling_std=0.3, width=16, depth=1, **settings
    )
    spec = make_world("reach_planar", 1).spec
    return DenoisingPolicy(config, spec.observation, spec.action, fps=spec.fps, seed=seed).eval()


def play(policy, count=24):
    draws = torch.Generator().manual_seed(0)
    return record_chains(make_world("reach_planar", 16), policy, np.arange(count), generator=draws)


@pytest.fixture(scope="module")
def logged():
    """A policy, its episodes, and their chains."""
    policy = make_policy()
    episodes, chains = play(policy)
    return policy, episodes, with_densities(policy, episodes, chains)


def moved(policy, size):
    """The same policy with its last bias moved."""
    other = copy.deepcopy(policy)
    with torch.no_grad():
        list(other.network.parameters())[-1].add_(size)
    return other


def test_chains_are_those_of_the_episodes_that_record_plays(logged):
    policy, episodes, chains = logged
    draws = torch.Generator().manual_seed(0)
    alone = record(make_world("reach_planar", 16), policy, np.arange(24), generator=draws)
    assert torch.equal(alone.actions, episodes.actions) and torch.equal(alone.lengths, episodes.lengths)
    first = episodes.starts
    assert bool(torch.isin(first, chains.step).all()) and chains.chain.shape[1:] == (4, 3, 2)
    decided = policy.action_normalizer.inverse(chains.chain[:, -1, 0])
    low, high = (torch.as_tensor(bound).float() for bound in (episodes.action_field.low, episodes.action_field.high))
    assert torch.allclose(decided.clamp(low, high), episodes.actions[chains.step], atol=1e-6)


def test_densities_are_of_all_elements_and_neither_averaged_nor_clamped(logged):
    policy, episodes, chains = logged
    rows = torch.arange(5)
    frames = chains.step[rows] + episodes.episode_of_step[chains.step[rows]]
    observation = {key: value[frames][:, None] for key, value in episodes.observation.items()} | {"task": [""] * 5}
    extras = policy.log_prob(observation, {"chain": chains.chain[rows]}).extras
    by_hand = torch.distributions.Normal(extras["mean"], extras["std"]).log_prob(chains.chain[rows, 1:]).sum((-2, -1))
    assert torch.allclose(chains.log_density[rows], by_hand, atol=1e-4)


def test_the_logged_policy_weighs_one_exactly_and_others_do_not(logged):
    policy, episodes, chains = logged
    judge = ImportanceEvaluator(episodes, chains, by="return", least=1.0)
    assert judge.values(policy) == pytest.approx(episodes.returns.numpy(), abs=1e-6)
    assert judge.effective == [len(episodes)], "weights of exactly 1"
    judge.values(moved(policy, 0.02))
    assert 1 <= judge.effective[1] < len(episodes)
    success = ImportanceEvaluator(episodes, chains, least=1.0)
    assert success.values(policy) == pytest.approx(episodes.success.double().numpy(), abs=1e-9)


def test_chains_of_single_decisions_tell_what_another_policy_earns(logged):
    """A bandit: each decision is an episode of its own, paid by its first action."""
    policy, episodes, chains = logged
    other = moved(policy, 0.05)
    frames = chains.step + episodes.episode_of_step[chains.step]
    observation = {key: value[frames][:, None] for key, value in episodes.observation.items()}
    observation = {key: value.repeat(40, 1, 1) for key, value in observation.items()} | {
        "task": [""] * (40 * len(frames))
    }
    old, new = (each.act(observation, torch.Generator().manual_seed(seed)) for seed, each in enumerate((policy, other)))
    densities = []
    for each in (policy, other):
        with torch.no_grad():
            extras = each.log_prob(observation, {"chain": old.latents["chain"]}).extras
        normal = torch.distributions.Normal(extras["mean"], extras["std"])
        densities.append(normal.log_prob(old.latents["chain"][:, 1:]).sum((1, 2, 3)).double())
    paid, earned = (decision.actions[:, 0, 0].double().numpy() for decision in (old, new))
    estimate = importance_estimate((densities[1] - densities[0]).numpy()[:, None], paid[:, None])
    error = math.hypot(estimate.values.std(), earned.std()) / math.sqrt(len(paid))
    assert abs(estimate.values.mean() - earned.mean()) < 4 * error
    assert abs(paid.mean() - earned.mean()) > 4 * error, "or it would say nothing"


def test_chains_of_a_dataset_are_read_back_and_absent_ones_refused(logged, tmp_path):
    policy, episodes, chains = logged
    write_dataset(episodes, tmp_path / "with", images="png", columns=chains.columns(episodes.step_count))
    write_dataset(episodes, tmp_path / "without", images="png")
    chains_read = read_chains([tmp_path / "with"], 3, 2)
    for name in ("step", "chain", "log_density"):
        assert torch.equal(getattr(chains_read, name), getattr(chains, name)), name
    judge = ImportanceEvaluator(read_dataset(tmp_path / "with"), chains_read, by="return", least=24.0)
    assert judge.values(policy) == pytest.approx(episodes.returns.numpy(), abs=1e-6), "still weights of exactly 1"
    with pytest.raises(DataError, match=r"has no denoising chains: record them with collect.chains=true"):
        read_chains([tmp_path / "with", tmp_path / "without"], 3, 2)
    with pytest.raises(DataError, match="chains of another policy"):
        read_chains([tmp_path / "with"], 4, 2)
    twice = read_chains([tmp_path / "with", tmp_path / "with"], 3, 2)
    assert torch.equal(twice.step[len(chains.step) :], chains.step + episodes.step_count)


def test_what_is_refused(logged):
    policy, episodes, chains = logged
    with pytest.raises(DataError, match=r"effective sample size of 24 recorded episodes is \d.*, below 20"):
        ImportanceEvaluator(episodes, chains, least=20.0).values(moved(policy, 1.0))
    with pytest.raises(DataError, match=r"3 denoising steps .* this policy has 2"):
        log_densities(prepared(policy), episodes, chains)
    with pytest.raises(ConfigError, match="evaluates success or return"):
        ImportanceEvaluator(episodes, chains, by="luck")
    with pytest.raises(DataError, match="lack the log-probabilities"):
        ImportanceEvaluator(episodes, Chains(chains.step, chains.chain))
    with pytest.raises(DataError, match="contain no success"):
        outcome(replace(episodes, step_success=None), "success")
    with pytest.raises(ConfigError, match="no noisy denoising steps"):
        play(make_policy(likelihood=Likelihood.MATCHING), 2)
    with pytest.raises(ConfigError, match="randomly chosen noisy steps"):
        play(make_policy(noisy_steps=1), 8)


def test_chains_of_another_normaliser_are_not_weighed(logged):
    """Its densities are of the same numbers, which stand for other actions: they would weigh one exactly."""
    policy, episodes, chains = logged
    other = copy.deepcopy(policy)
    other.action_normalizer.offset.add_(0.2)
    densities = log_densities(other, episodes, chains).float()
    assert torch.allclose(densities, chains.log_density), "nothing tells it from the logged one but what is executed"
    with pytest.raises(DataError, match="a policy with another action normaliser"):
        ImportanceEvaluator(episodes, chains, by="return", least=1.0).values(other)


def prepared(policy):
    other = copy.deepcopy(policy)
    other.prepare_finetuning(2)
    return other


def test_what_steps_are_paid_for_success():
    class Won:
        step_success = torch.tensor([False, True, True, True, False])
        starts = torch.tensor([0, 3])

    assert outcome(Won(), "success").tolist() == [0, 1, 0, 1, -1], "sums are what episodes end with"
