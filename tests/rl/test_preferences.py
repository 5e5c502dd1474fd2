"""Preference coefficients are the gradients of their losses; ties and strangers make no pairs."""

import pytest
import torch
from made_rollouts import make_rollouts, make_scored
from torch.nn import functional

from robopolicy.rl.coefficients import preference as preferences
from robopolicy.rl.objective import policy_loss

GROUPS, RETURNS = [0, 0, 0, 1, 1, 2], [1.0, 0.0, 0.0, 2.0, 2.0, 5.0]


def scored_at(seed: int):
    rollouts = make_rollouts([2, 3, 1, 2, 2, 1], GROUPS, RETURNS, seed=seed)
    draws = torch.Generator().manual_seed(seed)
    noise = 0.2 * torch.randn(rollouts.logp_behaviour.shape, generator=draws, dtype=torch.float64)
    logp = (rollouts.logp_behaviour + noise).requires_grad_()
    return rollouts, logp, make_scored(rollouts, logp.detach(), torch.zeros_like(logp.detach()))


def sums(rollouts, logp):
    return torch.where(rollouts.mask, logp - rollouts.logp_behaviour, 0.0).sum((1, 2))


def dpo_loss(total):
    pairs = [(0, 1), (0, 2)]
    terms = [-functional.logsigmoid(0.1 * (total[better] - total[worse])) for better, worse in pairs]
    return len(total) * torch.stack(terms).mean()


def sppo_loss(total):
    rate = torch.tensor([1.0, 0.25, 0.25, 0.5, 0.5, 0.5], dtype=torch.float64)
    return (total - (rate - 0.5)).square().sum()


def p3o_loss(total):
    ratio = total.exp()
    gain = [0.5 * (1 + 1) / 2, 0.5 * (-1 + 0) / 2, 0.5 * (-1 + 0) / 2, 0.0, 0.0, 0.0]
    return -sum(
        torch.min(ratio[row] * value, ratio[row].clamp(0.8, 1.2) * value) for row, value in enumerate(gain) if value
    )


@pytest.mark.checks("coefficient/dpo", "coefficient/sppo", "coefficient/p3o")
@pytest.mark.parametrize(
    ("function", "loss"),
    [(preferences.dpo, dpo_loss), (preferences.sppo, sppo_loss), (preferences.p3o, p3o_loss)],
)
@pytest.mark.parametrize("seed", range(5))
def test_gradients(function, loss, seed: int):
    rollouts, logp, scored = scored_at(seed)
    coefficient, _ = function(scored)
    found = torch.autograd.grad(policy_loss(logp, coefficient, scored.mask.double()), logp)[0]
    expected = torch.autograd.grad(loss(sums(rollouts, logp)), logp)[0]
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-7)


def test_pairs_are_of_one_group_and_unequal():
    _, _, scored = scored_at(0)
    assert preferences.preferred(scored).nonzero().tolist() == [[0, 1], [0, 2]]


def test_p3o_does_not_mind_a_constant_added_to_a_start():
    _, _, scored = scored_at(1)
    before, _ = preferences.p3o(scored)
    shift = torch.tensor([7.0 if group == 0 else 0.0 for group in GROUPS])
    rewards = {"reward": scored.rollouts.rewards["reward"]}
    last = scored.rollouts.terminated
    rewards["extra"] = torch.zeros_like(rewards["reward"])
    rewards["extra"][..., 0] = torch.where(last, shift[:, None], 0.0)
    from dataclasses import replace

    moved = replace(scored, rollouts=replace(scored.rollouts, rewards=rewards))
    torch.testing.assert_close(preferences.p3o(moved)[0], before, atol=1e-6, rtol=1e-5)
