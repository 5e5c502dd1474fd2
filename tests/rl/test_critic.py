"""The critic and the scale of its targets."""

import numpy as np
import pytest
import torch

from robopolicy.core.errors import ConfigError
from robopolicy.core.spec import Field
from robopolicy.rl.critic import ReturnScale, state_critic

FIELDS = {"observation.state": Field((2,)), "observation.images.top": Field((4, 4, 3), "uint8")}


def test_critic_learns_a_function_of_history():
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    critic = state_critic(FIELDS, history=2, width=32)
    observation = {"observation.state": 50 + 10 * torch.randn(512, 2, 2, generator=generator)}
    critic.fit(observation)
    assert critic(observation).abs().max() == 0
    target = (observation["observation.state"][:, 1, 0] - 50) / 10
    optimiser = torch.optim.Adam(critic.parameters(), 1e-2)
    for _ in range(100):
        loss = (critic(observation) - target).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert float(loss.detach()) < 0.05


def test_state_critic_needs_a_vector_field():
    with pytest.raises(ConfigError, match="image encoder"):
        state_critic({"observation.images.top": FIELDS["observation.images.top"]}, history=1)


def test_return_scale_is_the_pooled_deviation_of_discounted_returns():
    generator = torch.Generator().manual_seed(1)
    scale, collected = ReturnScale(), []
    assert float(scale.scale) == 1.0
    for _ in range(3):
        rewards = 3 * torch.randn(4, 6, generator=generator)
        ended = torch.rand(4, 6, generator=generator) < 0.3
        discount = torch.full((4, 6), 0.9)
        scale.update(rewards, ended, discount)
        for row in range(4):
            running = 0.0
            for column in range(6):
                running += float(rewards[row, column])
                collected.append(running)
                running = 0.0 if ended[row, column] else 0.9 * running
    assert float(scale.scale) == pytest.approx(float(np.std(collected)), rel=1e-5)


def test_return_scale_of_constant_returns_changes_nothing():
    scale = ReturnScale()
    scale.update(torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool), torch.ones(2, 3))
    assert float(scale.scale) == 1.0
