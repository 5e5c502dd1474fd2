"""PROPS: less sampling error than independent draws, on categories where it can be counted; and it trains."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from bandit_toys import BanditWorld, ChainPolicy, mean_reward

from robopolicy.core.errors import ConfigError
from robopolicy.training.collection.props import sampling_error_loss
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.finetune import finetune

CONFIG = FinetuneConfig(
    algorithm="grpo", iterations=25, groups=16, group_size=8, epochs=4, minibatch=128, learning_rate=5e-3, clip=0.1,
    target_kl=0.1, evaluate_every=0, props=4,
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


def test_sampling_error_is_lower_than_that_of_independent_draws():
    seeds = range(40)
    assert np.mean([draw(seed, True) for seed in seeds]) < 0.8 * np.mean([draw(seed, False) for seed in seeds])


def test_no_unit_is_pushed_below_the_clip():
    log_ratio = torch.tensor([[-0.5], [0.0], [0.5]], requires_grad=True)
    sampling_error_loss(log_ratio, torch.ones(3, 1, dtype=torch.bool), 0.1, 0.0).backward()
    assert log_ratio.grad is not None
    assert log_ratio.grad[0] == 0
    assert bool((log_ratio.grad[1:] > 0).all())


@pytest.mark.parametrize("algorithm", ["grpo", pytest.param("step_grpo", marks=pytest.mark.slow)])
def test_a_bandit_improves(algorithm: str):
    policy = ChainPolicy()
    before = mean_reward(policy, True)["reward"]
    finetune(policy, None, BanditWorld(64), replace(CONFIG, algorithm=algorithm), seed=0)
    assert mean_reward(policy, True)["reward"] > before / 3


def test_ways_of_collecting_exclude_one_another():
    with pytest.raises(ConfigError, match="choose one"):
        replace(CONFIG, delay=2)
