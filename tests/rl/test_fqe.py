"""Fitted Q evaluation against values that are known exactly, and the alarm where it must ring."""

import pytest
import torch

from robopolicy.core.errors import ConfigError
from robopolicy.core.transitions import Transitions
from robopolicy.rl.offline.agent import Critics
from robopolicy.rl.offline.fqe import FqeConfig, fit_q, td_targets

QUICK = FqeConfig(steps=400, batch_size=128, width=32, depth=1, rate=5e-3, discount=0.5, renew=20, samples=4)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def line(count=2000, seed=0):
    """A point on a line moves by its action and is paid it; an episode never ends."""
    draws = generator(seed)
    state = 2 * torch.rand(count, 1, generator=draws) - 1
    action = 2 * torch.rand(count, 1, generator=draws) - 1
    return Transitions(state, action, action[:, 0], state + action, torch.zeros(count, dtype=torch.bool))


@pytest.mark.parametrize("share", [0.5, -0.25])
def test_a_constant_policy_is_worth_its_discounted_reward(share):
    data = line()
    drawn = torch.full((len(data), 4, 1), share)
    evaluator = fit_q(data, drawn, (-2.0, 2.0), QUICK, generator())
    asked = torch.zeros(8, 1)
    value = evaluator.values(asked, torch.full((8, 4, 1), share))
    assert value.mean() == pytest.approx(share / (1 - 0.5), abs=0.06)
    assert not evaluator.diverged


def test_targets_by_hand():
    data, critics = line(6), Critics(2, 1, 1, 8, 1)
    batch = Transitions(
        data.state, data.action, data.reward, data.next_state,
        torch.tensor([True] + [False] * 5), decay=torch.full((6,), 0.25),
    )  # fmt: skip
    drawn = torch.rand(6, 3, 1, generator=generator())
    targets = td_targets(critics, batch, drawn, 0.9)
    for row in range(6):
        ahead = torch.stack([critics(batch.next_state[row : row + 1], drawn[row, i : i + 1])[:, 0] for i in range(3)])
        rest = 0.0 if row == 0 else 0.25 * ahead.mean(0)
        assert torch.allclose(targets[:, row], batch.reward[row] + rest, atol=1e-6)


def test_values_that_rewards_do_not_allow_ring_the_alarm():
    data = line()
    drawn = torch.full((len(data), 1, 1), 0.9)
    evaluator = fit_q(data, drawn, (-0.1, 0.1), FqeConfig(**{**vars(QUICK), "samples": 1}), generator())
    assert evaluator.diverged and evaluator.clipped > 0.5
    assert float(evaluator.values(data.state, data.action[:, None]).abs().max()) < 0.5  # held by the clip all the same


def test_the_same_seed_is_the_same_fit():
    data = line(300)
    drawn = torch.zeros(300, 1, 1)
    config = FqeConfig(**{**vars(QUICK), "steps": 20})
    one, two = (fit_q(data, drawn, (-2.0, 2.0), config, generator(3)) for _ in range(2))
    assert torch.equal(one.critics.members.weights[0], two.critics.members.weights[0])
    with pytest.raises(ConfigError, match="at least 1"):
        FqeConfig(steps=0)
