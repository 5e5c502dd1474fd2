"""Clip-Cov, also as SPEAR uses it, and KL-Cov: steps whose probability and advantage rise together most."""

import math
from dataclasses import replace

import pytest
import torch
from made_rollouts import make_rollouts, make_scored

from robopolicy.rl.algorithm import build_algorithm
from robopolicy.rl.coefficients import clip_cov, decoupled_ppo
from robopolicy.rl.configuration import AlgorithmConfig
from robopolicy.rl.experimental.coefficients import kl_cov
from robopolicy.rl.objective import policy_loss


def scored_with(logp: torch.Tensor, advantage: torch.Tensor):
    """Episodes of one decision of one step, scored by the policy that acted."""
    rollouts = make_rollouts([1] * len(logp), [0] * len(logp), steps=1)
    rollouts = replace(rollouts, logp_behaviour=logp[:, None, None])
    return make_scored(rollouts, logp[:, None, None], advantage[:, None, None])


@pytest.mark.checks("coefficient/clip_cov", "SPEAR")
def test_the_largest_covariances_by_hand():
    # Centred log-probabilities -1.5, -.5, .5, 1.5 and advantages -2, 2, -1, 1: covariances 3, -1, -.5, 1.5.
    logp, advantage = torch.tensor([-4.0, -3.0, -2.0, -1.0]).double(), torch.tensor([-2.0, 2.0, -1.0, 1.0]).double()
    for share, expected in ((0.25, [0, 2, -1, 1]), (0.5, [0, 2, -1, 0]), (0.99, [0, 2, -1, 0]), (0.2, [-2, 2, -1, 1])):
        assert clip_cov(scored_with(logp, advantage), share=share)[0].flatten().tolist() == expected
    clipped_share = clip_cov(scored_with(logp, advantage))[1]["covariance"]
    assert float(clipped_share) == pytest.approx(3 / 4)


@pytest.mark.checks("SPEAR")
def test_the_preset_spear_leaves_steps_out_of_a_minibatch_of_a_hundred():
    logp, advantage = (torch.randn(100, generator=torch.Generator().manual_seed(seed)).double() for seed in (1, 2))
    c, _ = build_algorithm(AlgorithmConfig(algorithm="spear")).coefficient(scored_with(logp, advantage))
    covariance = (logp - logp.mean()) * (advantage - advantage.mean())
    left_out = (c.flatten() == 0).nonzero().squeeze(1).tolist()
    assert sorted(left_out) == sorted(covariance.topk(2).indices.tolist())


@pytest.mark.checks("coefficient/clip_cov")
def test_it_is_the_gradient_of_the_decoupled_surrogate_of_what_is_left():
    draws = torch.Generator().manual_seed(0)
    rollouts = make_rollouts([3, 2, 4], [0, 0, 0])
    old = rollouts.logp_behaviour
    stale = old - 0.3 * torch.rand(old.shape, generator=draws, dtype=torch.float64)
    rollouts = replace(rollouts, logp_behaviour=stale, logp_proximal=old)
    noise, advantage = (torch.randn(old.shape, generator=draws, dtype=torch.float64) for _ in range(2))
    logp = (old + 0.2 * noise).requires_grad_()
    scored = make_scored(rollouts, logp, advantage)

    mask, own = scored.mask, logp.detach()
    cov = (own - own[mask].mean()) * (advantage - advantage[mask].mean())
    ratio = (logp - old).exp()
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) * (old - stale).exp().clamp(max=5.0)
    left = mask & (cov < cov[mask].sort().values[-math.floor(0.3 * int(mask.sum()))])
    (expected,) = torch.autograd.grad(-surrogate[left].sum(), logp)
    (gradient,) = torch.autograd.grad(policy_loss(logp, clip_cov(scored, share=0.3)[0], mask.double()), logp)
    torch.testing.assert_close(gradient, expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(clip_cov(scored, share=0.0)[0], decoupled_ppo(scored)[0])


@pytest.mark.checks("coefficient/clip_cov")
def test_a_softmax_keeps_more_entropy_without_them():
    """The claim: entropy falls by the covariance of log-probability and advantage, so by less without the largest."""
    logits = torch.randn(32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    chosen = torch.multinomial(logits.softmax(-1), 400, True, generator=torch.Generator().manual_seed(2))
    advantage = (chosen == int(logits.argmax())).double() - 0.2

    def entropy_after(coefficient, **options) -> float:
        weights = logits.clone().requires_grad_()
        logp = weights.log_softmax(-1)[chosen]
        c = coefficient(scored_with(logp.detach(), advantage), **options)[0].flatten()
        (step,) = torch.autograd.grad((c * logp).mean(), weights)
        changed = (logits + step).log_softmax(-1)
        return float(-(changed.exp() * changed).sum())

    before = float(-(logits.softmax(-1) * logits.log_softmax(-1)).sum())
    plain, kept = entropy_after(decoupled_ppo), entropy_after(clip_cov, share=0.1)
    assert plain < kept < before + 0.05


@pytest.mark.checks("coefficient/clip_cov", "Clip-Cov")
def test_steps_between_bounds_are_drawn_at_random():
    """Of 200 steps with cov 2, 200 with 9 and 200 below 0, a twentieth of all, 30, are drawn from the first."""
    logp = torch.tensor([1.0, 4.5, 0.0]).repeat_interleave(200).double()
    advantage = torch.full((600,), 2.0).double()
    advantage[400:] = -4.0
    scored = scored_with(logp, advantage)
    centred, mean = logp - logp.mean(), advantage.mean()
    covariance = centred * (advantage - mean)
    candidates = covariance[0] + 1e-9
    low, high = sorted((float(covariance[0]), float(covariance[200])))
    assert low < high and covariance[400] > high
    draws = torch.Generator().manual_seed(0)
    picks = []
    for _ in range(2):
        c = clip_cov(replace(scored, generator=draws), share=0.05, bounds=(low - 0.1, float(candidates) + 0.1))[0]
        dropped = (c.flatten() == 0).nonzero().squeeze(1)
        assert len(dropped) == 30 and dropped.max() < 200
        picks.append(dropped.tolist())
    assert picks[0] != picks[1]
    few = clip_cov(replace(scored, generator=draws), share=0.0, bounds=(low - 0.1, float(candidates) + 0.1))[0]
    assert int((few == 0).sum()) == 1, "at least one"
    none = clip_cov(replace(scored, generator=draws), share=0.05, bounds=(100.0, 200.0))[0]
    assert bool((none != 0).all())


@pytest.mark.checks("coefficient/kl_cov", "Clip-Cov")
def test_the_largest_covariances_are_held_by_a_penalty():
    """The gradient is that of -A r, plus beta |log r| at two of twelve steps."""
    draws = torch.Generator().manual_seed(0)
    rollouts = make_rollouts([3, 2, 1], [0, 0, 0])
    old = rollouts.logp_behaviour
    noise, advantage = (torch.randn(old.shape, generator=draws, dtype=torch.float64) for _ in range(2))
    logp = (old + 0.2 * noise).requires_grad_()
    scored = make_scored(rollouts, logp, advantage)
    mask, own = scored.mask, logp.detach()
    cov = torch.where(mask, (own - own[mask].mean()) * (advantage - advantage[mask].mean()), -torch.inf)
    largest = cov >= cov.flatten().sort().values[-2]
    ratio = logp - old
    loss = torch.where(mask, -advantage * ratio.exp(), 0.0) + torch.where(largest, 0.7 * ratio.abs(), 0.0)
    (expected,) = torch.autograd.grad(loss.sum(), logp)
    (gradient,) = torch.autograd.grad(policy_loss(logp, kl_cov(scored, share=0.2, beta=0.7)[0], mask.double()), logp)
    torch.testing.assert_close(gradient, expected, atol=1e-12, rtol=1e-12)
    assert int((kl_cov(scored, share=0.0, beta=0.7)[0] != kl_cov(scored, share=0.0, beta=0.0)[0]).sum()) == 1
