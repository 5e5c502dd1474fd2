"""What papers and their authors' code compute, by hand, where a mechanism here once computed something else."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from made_rollouts import make_rollouts, make_scored

from robopolicy.core.errors import RobopolicyWarning
from robopolicy.rl import credit
from robopolicy.rl.advantages import step
from robopolicy.rl.coefficients import off_policy, trust_region
from robopolicy.rl.context import Context
from robopolicy.rl.objective import policy_loss
from robopolicy.rl.starts.samplers import ReplaySampler

CONTEXT = Context(torch.Generator(), discount=1.0)


def scored_at(ratios: list[float], advantages: list[float]):
    """One decision of one step an episode, with these ratios and advantages."""
    rollouts = make_rollouts([1] * len(ratios), [0] * len(ratios), steps=1)
    log_ratio = torch.tensor(ratios, dtype=torch.float64).log()[:, None, None]
    advantage = torch.tensor(advantages, dtype=torch.float64)[:, None, None]
    return make_scored(rollouts, rollouts.logp_behaviour + log_ratio, advantage)


def test_the_ring_of_rec_drops_what_lies_between_near_and_far_astray():
    good = scored_at([0.3, 0.41, 0.7, 0.81, 1.19, 1.3, 4.0], [1.0] * 7)
    kept = off_policy.rec(good, region="ring", importance=False)[0].flatten()
    assert kept.tolist() == [1, 0, 0, 1, 1, 0, 0]
    bad = scored_at([0.3, 0.79, 0.81, 1.19, 1.5, 2.9, 3.1], [-1.0] * 7)
    kept = off_policy.rec(bad, region="ring", importance=False)[0].flatten()
    assert kept.tolist() == [0, 0, -1, -1, 0, 0, -1]
    wider = off_policy.rec(good, region="ring", importance=False, far_low=0.5)[0].flatten()
    assert wider.tolist() == [1, 1, 0, 1, 1, 0, 0]


def test_the_prefix_of_min_pro_may_exceed_one():
    rollouts = make_rollouts([3, 2], [0, 0], steps=1)
    ratio = torch.tensor([[1.35, 1.35, 1.35], [0.5, 2.0, 9.9]], dtype=torch.float64)[..., None]
    scored = make_scored(rollouts, rollouts.logp_behaviour + ratio.log(), torch.ones_like(ratio))
    weight = off_policy.min_pro(scored)[0].squeeze(-1)
    expected = torch.tensor([[1.35, 1.35**2, 1.35**2], [0.5, 1.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(weight, expected)


def test_bapo_leaves_bounds_alone_where_clipped_values_are_already_in_balance():
    # min(r, 1.2) A sums to 2.4 over the good, max(r, 0.6) |A| to 1.6 over the bad.
    _, stats = trust_region.bapo(scored_at([1.5, 2.0, 0.5, 1.0], [1.0, 1.0, -1.0, -1.0]))
    assert (float(stats["bapo_low"]), float(stats["bapo_high"])) == pytest.approx((0.6, 1.2))
    assert float(stats["positive_share"]) == pytest.approx(0.6)
    # 2.4 against 2.62 at first; the lower bound raises that to 2.92, so the upper one must reach 1.5.
    _, stats = trust_region.bapo(scored_at([1.9, 2.0, 0.5, 1.0, 1.02], [1.0, 1.0, -1.0, -1.0, -1.0]))
    assert (float(stats["bapo_low"]), float(stats["bapo_high"])) == pytest.approx((0.9, 1.5))
    assert float(stats["positive_share"]) == pytest.approx(3.0 / 5.92)


def test_grpo_guard_is_the_gradient_of_its_clipped_surrogate():
    draws = torch.Generator().manual_seed(0)
    rollouts = make_rollouts([1] * 64, [0] * 64, steps=3)
    std = torch.tensor([0.4, 0.2, 0.05], dtype=torch.float64)[:, None, None].expand(64, 1, 3, 2, 1)
    old = torch.randn(64, 1, 3, 2, 1, generator=draws, dtype=torch.float64)
    mean = old + 0.8 * std * torch.randn(old.shape, generator=draws, dtype=torch.float64)
    rollouts = replace(rollouts, latents={"mean": old})
    advantage = torch.randn(64, 1, 3, generator=draws, dtype=torch.float64)
    noise = torch.randn(advantage.shape, generator=draws, dtype=torch.float64)
    logp = (rollouts.logp_behaviour + 0.5 * noise).requires_grad_()
    scored = make_scored(rollouts, logp, advantage, (0.05, 0.05), extras={"mean": mean, "std": std})

    shift, spread = trust_region.mean_shift(scored)
    regulated = ((logp - rollouts.logp_behaviour + shift) * spread).exp()
    surrogate = torch.minimum(regulated * advantage, regulated.clamp(0.95, 1.05) * advantage)
    (expected,) = torch.autograd.grad(-surrogate.sum(), logp)
    c, _ = trust_region.grpo_guard(scored)
    (found,) = torch.autograd.grad(policy_loss(logp, c, torch.ones_like(logp)), logp)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    assert 0.1 < float((found == 0).double().mean()) < 0.9, "some are clipped, some are not"

    balanced, _ = trust_region.grpo_guard(scored, balance=True)
    variance = spread.square()
    torch.testing.assert_close(balanced, c * variance.mean() / variance)


def test_gtpo_takes_the_penalty_off_before_it_protects():
    entropy = torch.tensor([[[0.2], [0.4]], [[0.1], [0.3]]])
    rollouts = make_rollouts([2, 2], [0, 0], steps=1).with_extras(entropy=entropy)
    rollouts = replace(rollouts, latents={"tokens": torch.tensor([[[3], [1]], [[3], [2]]])})
    advantage = torch.tensor([1.0, -1.0])[:, None, None].expand(2, 2, 1)
    found = credit.gtpo(rollouts, advantage, CONTEXT, penalty=0.1)
    good, bad = 1.0 - 0.1 * 0.3, -1.0 - 0.1 * 0.2  # minus the episode's mean entropy
    torch.testing.assert_close(found.squeeze(-1), torch.tensor([[2 * good, good], [0.0, bad]]))
    with pytest.warns(RobopolicyWarning, match=r"leaves out every episode.*entropy_limit=0\.1"):
        assert not credit.gtpo(rollouts, advantage, CONTEXT, entropy_limit=0.1).any()


def test_vppo_keeps_the_same_share_of_every_episode():
    rollouts = make_rollouts([2, 1], [0, 0], steps=2)
    shift = torch.tensor([[[-3.0, -2.0], [-2.5, 0.0]], [[-0.2, -0.1], [0.0, 0.0]]])
    rollouts = rollouts.with_extras(blackout_logp=rollouts.logp_behaviour + shift)
    found = credit.vppo(rollouts, torch.ones(2, 2, 2), CONTEXT, share=0.3, low=1.0, high=1.0)
    # ceil(0.3 * 4) = 2 steps of the episode that looks, ceil(0.3 * 2) = 1 of the one that hardly does.
    assert found.tolist() == [[[1, 0], [1, 0]], [[1, 0], [0, 0]]]


def test_hgpo_skips_levels_that_say_nothing():
    rollouts = make_rollouts([2, 2, 2], [0, 0, 0], [1.0, 0.0, 0.0], steps=1)
    keys = torch.tensor([[0, 7], [0, 8], [0, 8]])
    found = step.hgpo(rollouts.with_extras(state_key=keys), CONTEXT, context_length=1)
    first = 2**0.5  # of returns 1, 0, 0: (1 - 1/3) / std, with std = sqrt(2) / 3
    # The second decision of the first episode is alone at both levels; those of the others have equal returns.
    expected = torch.tensor([[first, 0.0], [-first / 2, 0.0], [-first / 2, 0.0]])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_prompt_replay_takes_those_nearest_to_one_half():
    sampler = ReplaySampler(share=1.0, near=0.4, cooldown=0, limit=9)
    won = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])
    chosen = sampler.propose(7, 7, np.random.default_rng(0))
    sampler.observe(np.arange(7), won, np.full(7, 8.0), np.ones(7))
    assert sorted(chosen.tolist()) == list(range(7))
    for seed in range(5):
        fresh = ReplaySampler(share=1.0, near=0.4, cooldown=0, limit=9)
        fresh.restore(sampler.state())
        assert sorted(fresh.propose(3, 7, np.random.default_rng(seed)).tolist()) == [2, 3, 4]
