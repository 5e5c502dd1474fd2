"""PROPS: less sampling error than independent draws, on categories where it can be counted; and it trains."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from bandit_toys import BanditWorld, ChainPolicy, mean_reward

from robopolicy.core.errors import ConfigError
from robopolicy.core.rollouts import Rollouts
from robopolicy.core.run import RunFolder
from robopolicy.training.collection.copies import PropsCollector, sampling_error_loss
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.finetune import finetune

CONFIG = FinetuneConfig(
    algorithm="grpo", iterations=25, groups=16, group_size=8, epochs=4, minibatch=128, learning_rate=5e-3, clip=0.1,
    target_kl=0.1, evaluate_every=0, props_parts=4,
)  # fmt: skip


def error(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """KL(empirical || policy)."""
    share = counts / counts.sum()
    some = share > 0
    return float((share[some] * np.log(share[some] / probabilities[some])).sum())


def draw(seed: int, adjusted: bool, total: int = 100, every: int = 10) -> float:
    draws = torch.Generator().manual_seed(seed)
    logits = torch.randn(10, generator=draws)
    policy = logits.log_softmax(-1)
    sampled: list[torch.Tensor] = []
    for _ in range(total // every):
        phi = logits.clone().requires_grad_()
        if adjusted and sampled:
            optimiser = torch.optim.Adam([phi], lr=0.05)
            actions = torch.cat(sampled)
            mask = torch.ones(len(actions), 1, dtype=torch.bool)
            for _ in range(20):
                log_ratio = (phi.log_softmax(-1) - policy)[actions]
                optimiser.zero_grad()
                sampling_error_loss(log_ratio[:, None], mask, 0.3, 0.1).backward()
                optimiser.step()
        probabilities = phi.detach().softmax(-1)
        sampled.append(torch.multinomial(probabilities, every, True, generator=draws))
    counts = np.bincount(torch.cat(sampled).numpy(), minlength=10)
    return error(counts, policy.exp().numpy())


@pytest.mark.long
@pytest.mark.checks("PROPS")
def test_sampling_error_is_lower_than_that_of_independent_draws():
    seeds = range(40)
    assert np.mean([draw(seed, True) for seed in seeds]) < 0.8 * np.mean([draw(seed, False) for seed in seeds])


@pytest.mark.checks("PROPS")
def test_no_unit_is_pushed_below_the_clip():
    log_ratio = torch.tensor([[-0.5], [0.0], [0.5]], requires_grad=True)
    sampling_error_loss(log_ratio, torch.ones(3, 1, dtype=torch.bool), 0.1, 0.0).backward()
    assert log_ratio.grad is not None
    assert log_ratio.grad[0] == 0
    assert bool((log_ratio.grad[1:] > 0).all())


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["grpo", "step_grpo"])
def test_a_bandit_improves(algorithm: str):
    policy = ChainPolicy()
    before = mean_reward(policy, True)["reward"]
    finetune(policy, None, BanditWorld(64), replace(CONFIG, algorithm=algorithm), seed=0)
    assert mean_reward(policy, True)["reward"] > before / 3


def test_ways_of_collecting_exclude_one_another():
    with pytest.raises(ConfigError, match="set only one"):
        replace(CONFIG, policy_lag=2)
    with pytest.raises(ConfigError, match="props_past_iterations=1 needs props_parts"):
        replace(CONFIG, props_parts=0, props_past_iterations=1)


@pytest.mark.checks("PROPS")
def test_the_loss_is_that_of_the_clipped_surrogate_with_an_advantage_of_minus_one():
    draws = torch.Generator().manual_seed(0)
    log_ratio = (0.3 * torch.randn(64, 3, generator=draws, dtype=torch.float64)).requires_grad_()
    mask = torch.rand(64, 3, generator=draws) < 0.8
    ratio = log_ratio.exp()
    surrogate = torch.minimum(-ratio, -ratio.clamp(0.9, 1.1))  # PPO's, to be maximised, with A = -1
    divergence = (ratio - 1) - log_ratio  # sum over actions of theta log (theta / phi), from samples of theta
    expected = (-surrogate + 0.1 * divergence)[mask].sum() / mask.sum()
    torch.testing.assert_close(sampling_error_loss(log_ratio, mask, 0.1, 0.1), expected)


def kept_run(folder: Path, iterations: int) -> tuple[ChainPolicy, list[dict], list[Rollouts]]:
    """Train with two iterations kept; return the policy, its records, and what it learned from."""
    rollouts_seen: list[Rollouts] = []
    policy, world = ChainPolicy(), BanditWorld(16)
    config = replace(
        CONFIG,
        props_parts=2,
        props_past_iterations=2,
        groups=4,
        group_size=4,
        iterations=iterations,
        checkpoint_every=2,
    )
    collect = PropsCollector.collect

    def spy(self: PropsCollector, iteration: int) -> Rollouts:
        rollouts_seen.append(collect(self, iteration))
        return rollouts_seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PropsCollector, "collect", spy)
        finetune(policy, None, world, config, RunFolder(folder))
    return policy, RunFolder(folder).metrics()[1:], rollouts_seen


@pytest.mark.long
@pytest.mark.checks("PROPS")
def test_past_iterations_come_back_as_the_policys_own_and_count_once(tmp_path: Path):
    policy, records, iterations = kept_run(tmp_path / "whole", 6)
    assert [len(rollouts.group) for rollouts in iterations] == [16, 32, 48, 48, 48, 48], "two iterations are kept"
    assert [len(rollouts.fresh.group) for rollouts in iterations] == [16] * 6
    for before, now in pairwise(iterations):
        old = now.take(now.extras["replayed"][:, 0].nonzero().squeeze(1))
        torch.testing.assert_close(old.actions[-16:], before.fresh.actions, rtol=0, atol=0)
        assert not torch.equal(old.logp_behaviour[-16:], before.fresh.logp_behaviour), "scored by the policy of now"
    assert [record["episodes"] for record in records] == [16.0] * 6
    assert records[-1]["env_steps"] == sum(int(rollouts.fresh.duration.sum()) for rollouts in iterations)

    kept_run(tmp_path / "parts", 2)
    resumed, again, _ = kept_run(tmp_path / "parts", 6)
    for name, value in policy.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    assert [record["success"] for record in again] == [record["success"] for record in records]
