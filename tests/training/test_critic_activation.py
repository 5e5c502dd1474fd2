"""The critic's activation function is a setting; runs of before it was one resume with Mish."""

from pathlib import Path
from typing import Any

import pytest
import torch
from bandit_toys import FIELDS, BanditWorld, ChainPolicy
from torch.nn import functional

from robopolicy.core.errors import ConfigError
from robopolicy.core.run import RunFolder
from robopolicy.rl.critic import state_critic
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.finetune import finetune
from robopolicy.training.state import load_trainer, save_trainer


def tune(folder: Path, **changes: Any) -> None:
    policy: Any = ChainPolicy()
    config = FinetuneConfig(rollout_length=2, minibatch=64, evaluate_every=0, **changes)
    finetune(policy, state_critic(FIELDS, 1, width=8), BanditWorld(16), config, RunFolder(folder))


def test_a_run_of_before_the_activation_was_a_setting_goes_on_with_mish(tmp_path: Path):
    tune(tmp_path, iterations=1)
    point = RunFolder(tmp_path).resume_point
    tree = load_trainer(point)
    assert tree is not None
    older = {key: value for key, value in tree["config"].items() if key != "critic_activation"}
    save_trainer(point, {**tree, "config": older})
    with pytest.raises(ConfigError, match=r"critic_activation was 'mish', now 'relu'"):
        tune(tmp_path, iterations=2, critic_activation="relu")
    tune(tmp_path, iterations=2)
    assert RunFolder(tmp_path).metrics()[-1]["iteration"] == 2


@pytest.mark.parametrize("name", ["mish", "silu", "relu"])
def test_a_critic_has_the_activation_function_of_its_name(name: str):
    critic = state_critic(FIELDS, 1, 8, activation=name)
    first, _, second, _, head = critic.layers
    torch.nn.init.normal_(head.get_parameter("weight"))
    observation = {key: torch.randn(5, 1, *field.shape) for key, field in FIELDS.items()}
    hidden = critic.encoder(observation)
    for layer in (first, second):
        hidden = getattr(functional, name)(layer(hidden))
    torch.testing.assert_close(critic(observation), head(hidden).squeeze(-1))
