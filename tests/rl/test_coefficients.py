"""The coefficient form of PPO equals autograd of the textbook loss."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from robopolicy.rl.advantages.gae import denoising_discount
from robopolicy.rl.coefficients import clip_schedule, ppo
from robopolicy.rl.objective import (
    approximate_kl,
    clip_fraction,
    effective_sample_size,
    explained_variance,
    log_ratios,
    policy_loss,
    value_loss,
)
from robopolicy.rl.presets import RatioLevel
from robopolicy.rl.weights import constant_denominator, step_mean


@pytest.mark.checks("coefficient/ppo")
@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 5),
    latents=st.integers(1, 4),
    low=st.floats(0.01, 0.5),
    high=st.floats(0.01, 0.5),
    limit=st.floats(0.1, 3.0),
    level=st.sampled_from([RatioLevel.STEP, RatioLevel.DECISION_SUM, RatioLevel.DECISION_MEAN]),
)
def test_gradient_equals_autograd_of_the_clipped_surrogate(seed, rows, latents, low, high, limit, level):
    generator = torch.Generator().manual_seed(seed)
    old, advantage, noise = (torch.randn(rows, latents, generator=generator, dtype=torch.float64) for _ in range(3))
    if level is not RatioLevel.STEP:
        advantage = advantage[:, :1].expand_as(old)
    mask = torch.rand(rows, latents, generator=generator) < 0.8
    logp = (old + 0.4 * noise).requires_grad_()

    difference = torch.where(mask, logp - old, 0.0)
    if level is not RatioLevel.STEP:
        joint = difference.sum(-1, keepdim=True)
        if level is RatioLevel.DECISION_MEAN:
            joint = joint / mask.sum(-1, keepdim=True).clamp(min=1)
        difference = joint.expand_as(difference)
    ratio = difference.clamp(-limit, limit).exp()
    surrogate = torch.min(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    weight = step_mean(mask).double()
    if level is RatioLevel.STEP:
        textbook = -(weight * surrogate).sum()
    else:  # one term a decision: each unit holds the whole, so divide by what the sum over latents repeats
        repeats = (
            torch.ones_like(mask.sum(-1, keepdim=True)) if level is RatioLevel.DECISION_SUM else mask.sum(-1, True)
        )
        per_decision = torch.where(mask.any(-1, keepdim=True), weight.amax(-1, keepdim=True), 0.0)
        textbook = -(per_decision * repeats * surrogate[:, :1]).sum()
    (expected,) = torch.autograd.grad(textbook, logp)

    ratios = log_ratios(logp, old, mask, limit, level)
    coefficient = ppo(ratios.log_ratio, advantage, low, high, ratios.clamped)
    (gradient,) = torch.autograd.grad(policy_loss(logp, coefficient, weight), logp)
    torch.testing.assert_close(gradient, expected, atol=1e-12, rtol=1e-10)


@pytest.mark.checks("coefficient/ppo", "Dual clip")
def test_dual_clip_is_the_gradient_of_a_bounded_loss_of_bad_actions():
    """max(min(r A, clip(r) A), c A) for A < 0, Ye et al. 2020, eq. 5: no gradient beyond r = c."""
    ratio = torch.tensor([0.7, 0.9, 1.1, 1.3, 2.9, 3.1, 5.0], dtype=torch.float64)
    log_ratio = ratio.log().requires_grad_()
    for sign in (-1.0, 1.0):
        advantage = torch.full_like(ratio, sign)
        moved = log_ratio.exp()
        surrogate = torch.minimum(moved * advantage, moved.clamp(0.8, 1.2) * advantage)
        if sign < 0:
            surrogate = torch.maximum(surrogate, 3.0 * advantage)
        (expected,) = torch.autograd.grad(surrogate.sum(), log_ratio)
        torch.testing.assert_close(ppo(log_ratio.detach(), advantage, 0.2, 0.2, dual_clip=3.0), expected)
    bad = ppo(log_ratio.detach(), -torch.ones_like(ratio), 0.2, 0.2, dual_clip=3.0)
    assert bad[-3:].tolist() == pytest.approx([-2.9, 0.0, 0.0])


def test_clip_schedule_runs_from_base_to_epsilon_and_survives_a_single_unit():
    widths = clip_schedule(5, 0.001, 0.01, 3.0)
    assert float(widths[0]) == pytest.approx(0.001)
    assert float(widths[-1]) == pytest.approx(0.01)
    middle = 0.001 + 0.009 * (math.exp(1.5) - 1) / (math.exp(3) - 1)
    assert float(widths[2]) == pytest.approx(middle, rel=1e-6)
    assert clip_schedule(1, 0.001, 0.01, 3.0).tolist() == pytest.approx([0.01])
    assert clip_schedule(3, 0.0, 1.0, 0.0).tolist() == pytest.approx([0.0, 0.5, 1.0])
    assert clip_schedule(3, 0.05, 0.05, 0.0).tolist() == pytest.approx([0.05] * 3)


@pytest.mark.checks("credit/denoising_discount")
def test_denoising_discount_gives_the_cleanest_step_full_credit():
    assert denoising_discount(3, 0.5).tolist() == [0.25, 0.5, 1.0]
    assert denoising_discount(1, 0.5).tolist() == [1.0]


def test_log_ratios_are_clamped_and_counted():
    ratios = log_ratios(torch.tensor([[9.0, -9.0, 0.5]]), torch.zeros(1, 3), torch.tensor([[True, True, True]]), 3.0)
    assert ratios.log_ratio.tolist() == [[3.0, -3.0, 0.5]]
    assert ratios.clamped.tolist() == [[True, True, False]]


def test_policy_loss_is_blind_to_masked_units_even_if_not_finite():
    logp = torch.tensor([[1.0, torch.inf]], requires_grad=True)
    mask = torch.tensor([[True, False]])
    loss = policy_loss(logp, torch.tensor([[2.0, torch.nan]]), step_mean(mask), {"extra": torch.tensor(10.0)})
    loss.backward()
    assert float(loss.detach()) == 8.0
    assert logp.grad is not None
    assert logp.grad.tolist() == [[-2.0, 0.0]]


@pytest.mark.checks("weight/step_mean", "weight/constant")
def test_weights_sum_to_one_and_differ_in_what_counts_equally():
    mask = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
    assert step_mean(mask).tolist() == [[0.25] * 3, [0.25, 0.0, 0.0], [0.0] * 3]
    assert float(constant_denominator(mask, 8.0).sum()) == 0.5
    assert float(step_mean(torch.zeros(2, 2, dtype=torch.bool)).sum()) == 0.0


def test_value_loss_masks():
    values, returns = torch.tensor([1.0, 5.0]), torch.tensor([3.0, 0.0])
    assert float(value_loss(values, returns, torch.tensor([True, False]))) == 2.0
    assert float(value_loss(values, returns)) == (2.0 + 12.5) / 2


@pytest.mark.checks("controllers/vcpo")  # its effective sample size
def test_diagnostics_by_hand():
    mask = torch.ones(2, 2, dtype=torch.bool)
    zero = torch.zeros(2, 2)
    assert float(approximate_kl(zero, mask)) == 0.0
    assert float(effective_sample_size(zero, mask)) == 1.0
    ratios = torch.tensor([[math.log(2.0), 0.0], [0.0, 0.0]])
    assert float(approximate_kl(ratios, mask)) == pytest.approx((1 - math.log(2)) / 2, rel=1e-6)
    assert float(clip_fraction(ratios, mask, 0.2, 0.2)) == 0.25
    assert float(effective_sample_size(ratios, mask)) == pytest.approx(9 / 10)
    returns = torch.tensor([1.0, 2.0, 3.0])
    assert float(explained_variance(returns, returns)) == 1.0
    assert float(explained_variance(torch.full((3,), 2.0), returns)) == pytest.approx(0.0)


def test_approximate_kl_estimates_the_gaussian_kl():
    generator = torch.Generator().manual_seed(0)
    old = torch.distributions.Normal(torch.zeros(200_000, 1).double(), 1.0)
    new = torch.distributions.Normal(torch.full((200_000, 1), 0.3).double(), 1.0)
    sample = torch.randn(200_000, 1, generator=generator, dtype=torch.float64)
    kl = approximate_kl(new.log_prob(sample) - old.log_prob(sample), torch.ones(200_000, 1, dtype=torch.bool))
    assert float(kl) == pytest.approx(0.3**2 / 2, rel=0.03)
