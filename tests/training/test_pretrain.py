"""Behaviour cloning of a tiny policy from episodes."""

from pathlib import Path

import torch
from bandit_toys import ACTION, FIELDS, ChainPolicy

from robopolicy.core.episodes import Episodes
from robopolicy.core.randomness import Generators
from robopolicy.core.run import RunFolder
from robopolicy.core.spec import STATE
from robopolicy.training.configuration import FitConfig, PretrainConfig
from robopolicy.training.pretrain import pretrain


def _episodes() -> Episodes:
    generator = torch.Generator().manual_seed(0)
    state = torch.rand(20 * 6, 2, generator=generator) - 0.5
    frames = torch.arange(120).reshape(20, 6)
    return Episodes(FIELDS, ACTION, 10.0, {STATE: state}, 0.5 * state[frames[:, :-1].flatten()],
                    torch.full((20,), 5), ("",) * 20)  # fmt: skip


def test_the_cloned_policy_acts_like_the_demonstrator(tmp_path: Path):
    policy = ChainPolicy(std=0.01)
    config = PretrainConfig(batch_size=64, fit=FitConfig(steps=300, learning_rate=0.01))
    result = pretrain(policy, _episodes(), config, RunFolder(tmp_path))
    assert result.losses["imitation"] < 0.01
    state = torch.tensor([[[0.4, -0.2]]]).expand(64, 1, 2)
    decision = policy.act({STATE: state}, Generators(0)["act"], deterministic=True)
    error = decision.actions[:, 0].mean(0) - torch.tensor([0.2, -0.1])
    assert error.abs().max() < 0.06
    saved = ChainPolicy(seed=9).load(tmp_path / "checkpoint")
    assert torch.equal(saved.first.weight, policy.first.weight)
