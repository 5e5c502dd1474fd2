"""Coefficients against autograd of what they stand for, where no other test has it."""

import math
from dataclasses import replace

import pytest
import torch
from made_rollouts import make_rollouts, make_scored
from torch.nn import functional

from robopolicy.nn.schedules import Normal
from robopolicy.policies.configuration import DenoisingPolicyConfig, LogpReduction
from robopolicy.policies.latents import ExecutedSlice
from robopolicy.policies.likelihood import logp_precision, reduce_logp
from robopolicy.rl import coefficients
from robopolicy.rl.experimental import coefficients as experimental_coefficients
from robopolicy.rl.objective import log_ratios, policy_loss
from robopolicy.rl.presets import RatioLevel


@pytest.mark.checks("coefficient/pacs")
@pytest.mark.parametrize("seed", range(3))
def test_pacs_balances_the_outcomes_of_every_start(seed: int):
    """One success of four, two of three, and a start where all fail: weights as in ritzz-ai/PACS at bbe1dc6."""
    group = [0, 0, 0, 0, 1, 1, 1, 2, 2]
    returns = [1.0, -1.0, -1.0, -1.0, 1.0, 1.0, -1.0, -1.0, -1.0]
    balance = torch.tensor([4 / 2, 4 / 6, 4 / 6, 4 / 6, 3 / 4, 3 / 4, 3 / 2, 1.0, 1.0], dtype=torch.float64)
    rollouts = make_rollouts([2, 1, 3, 1, 2, 2, 1, 1, 2], group, returns, seed=seed)
    noise = torch.randn(rollouts.mask.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    logp = (rollouts.logp_behaviour + 0.3 * noise).requires_grad_()
    scored = make_scored(rollouts, logp, torch.zeros_like(noise))
    score = 0.7 * torch.where(scored.mask, logp - rollouts.logp_behaviour, 0.0).sum((1, 2))
    rows = range(len(group))
    others = [[score[j] for j in rows if j != i and group[j] == group[i]] for i in rows]
    centred = torch.stack([score[i] - torch.stack(others[i]).mean() for i in rows])
    loss = functional.binary_cross_entropy_with_logits(
        centred, rollouts.row_success.double(), weight=balance, reduction="sum"
    )
    (expected,) = torch.autograd.grad(loss, logp)
    c, _ = experimental_coefficients.pacs(scored, beta=0.7)
    (gradient,) = torch.autograd.grad(policy_loss(logp, c, scored.mask.double()), logp)
    torch.testing.assert_close(gradient, expected, atol=1e-8, rtol=1e-6)


@pytest.mark.checks("coefficient/none")
def test_none_moves_nothing():
    rollouts = make_rollouts([2, 1], [0, 0])
    c, stats = coefficients.nothing(make_scored(rollouts, rollouts.logp_behaviour, torch.ones_like(rollouts.mask)))
    assert c.shape == rollouts.mask.shape and not c.any() and not stats


@pytest.mark.checks("coefficient/dcpo")
def test_rare_tokens_may_move_further_up_to_ten_times():
    """The table of DCPO's README: q = .9 may fall to .69 and rise to 1.06, q = .01 to .005 and .05."""
    old = torch.tensor([0.9, 0.9, 0.9, 0.9, 0.01, 0.01, 0.01, 1e-4, 1e-4], dtype=torch.float64)
    new = torch.tensor([0.70, 0.68, 1.05, 1.07, 0.0051, 0.049, 0.052, 0.99e-3, 1.01e-3], dtype=torch.float64)
    falls = torch.tensor([1, 1, 0, 0, 1, 0, 0, 0, 0], dtype=torch.bool)
    rollouts = make_rollouts([1] * 9, [0] * 9, steps=1)
    rollouts = replace(rollouts, logp_behaviour=old.log()[:, None, None])
    advantage = torch.where(falls, -1.0, 1.0).double()[:, None, None]
    c, _ = experimental_coefficients.dcpo(make_scored(rollouts, new.log()[:, None, None], advantage))
    kept = [True, False, True, False, True, True, False, True, False]
    assert (c.flatten() != 0).tolist() == kept
    free, _ = experimental_coefficients.dcpo(make_scored(rollouts, new.log()[:, None, None], advantage), most=100.0)
    assert (free.flatten() != 0).tolist() == [*kept[:8], True]
    bad = experimental_coefficients.dcpo(
        make_scored(rollouts, old.log()[:, None, None] + math.log(9.9), -torch.ones(9, 1, 1))
    )[0]
    far = experimental_coefficients.dcpo(
        make_scored(rollouts, old.log()[:, None, None] + math.log(10.1), -torch.ones(9, 1, 1))
    )[0]
    assert bad.flatten().tolist() == pytest.approx([-9.9] * 9) and not far.any(), "bad ones are let go beyond ten"


@pytest.mark.checks("coefficient/opd")
def test_on_policy_distillation_is_the_gradient_of_the_reverse_kl():
    """Over a vocabulary, each word as often as the student says it: E[-c grad log pi] = grad KL(pi || teacher)."""
    draws = torch.Generator().manual_seed(0)
    logits = torch.randn(6, generator=draws, dtype=torch.float64, requires_grad=True)
    told = torch.randn(6, generator=draws, dtype=torch.float64).log_softmax(-1)
    log_probabilities = logits.log_softmax(-1)
    rollouts = make_rollouts([1] * 6, [0] * 6, steps=1).with_extras(teacher_logp=told[:, None, None])
    rollouts = replace(rollouts, logp_behaviour=log_probabilities.detach()[:, None, None])
    scored = make_scored(rollouts, log_probabilities[:, None, None], torch.zeros(6, 1, 1, dtype=torch.float64))
    c, stats = coefficients.on_policy_distillation(scored, cap=50.0)
    loss = policy_loss(log_probabilities[:, None, None], c, log_probabilities.detach().exp()[:, None, None])
    (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (expected,) = torch.autograd.grad((log_probabilities.exp() * (log_probabilities - told)).sum(), logits)
    torch.testing.assert_close(gradient, expected, atol=1e-12, rtol=1e-10)
    assert float(stats["teacher_gap"]) == pytest.approx(float((log_probabilities - told).detach().mean()))


@pytest.mark.checks("coefficient/opd")
def test_on_policy_distillation_of_older_data_regresses_log_probabilities():
    """Three words, each as often as an older student said it: the gradient of half the mean squared difference."""
    logits = torch.tensor([0.0, 1.0, -1.0], dtype=torch.float64, requires_grad=True)
    acted, told = (torch.tensor(p, dtype=torch.float64).log() for p in ([0.2, 0.5, 0.3], [0.6, 0.1, 0.3]))
    log_probabilities = logits.log_softmax(-1)
    rollouts = make_rollouts([1] * 3, [0] * 3, steps=1).with_extras(teacher_logp=told[:, None, None])
    rollouts = replace(rollouts, logp_behaviour=acted[:, None, None])
    scored = make_scored(rollouts, log_probabilities[:, None, None], torch.zeros(3, 1, 1, dtype=torch.float64))
    c, _ = coefficients.on_policy_distillation(scored)
    loss = policy_loss(log_probabilities[:, None, None], c, acted.exp()[:, None, None])
    (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
    squared = (acted.exp() * (told - log_probabilities).square()).sum() / 2
    torch.testing.assert_close(gradient, torch.autograd.grad(squared, logits)[0], atol=1e-12, rtol=1e-10)


@pytest.mark.checks("coefficient/opd")
def test_on_policy_distillation_is_capped_and_may_learn_from_the_outcome_too():
    rollouts = make_rollouts([1, 1, 1], [0, 0, 0], steps=1)
    gap = torch.tensor([9.0, -7.0, 0.5], dtype=torch.float64)[:, None, None]
    rollouts = rollouts.with_extras(teacher_logp=rollouts.logp_behaviour + gap)
    scored = make_scored(rollouts, rollouts.logp_behaviour, torch.tensor([1.0, 2.0, -4.0]).double()[:, None, None])
    assert coefficients.on_policy_distillation(scored)[0].flatten().tolist() == pytest.approx([5.0, -5.0, 0.5])
    both = coefficients.on_policy_distillation(scored, reward=0.5)[0].flatten()
    assert both.tolist() == pytest.approx([5.5, -4.0, -1.5])


@pytest.mark.checks("coefficient/grpo_guard")
@pytest.mark.parametrize("reduction", list(LogpReduction))
@pytest.mark.parametrize("floor", [0.0, 0.3])
def test_the_shift_is_what_the_acting_policys_own_means_lose_in_log_probability(reduction, floor):
    """Also where the chunk begins after the first predicted step, latents are padded, or the episode ends inside."""
    draws = torch.Generator().manual_seed(0)
    config = DenoisingPolicyConfig(logp_reduction=reduction, min_logprob_std=floor, logp_clamp=None)
    part = ExecutedSlice(first=1, count=2, size=1)  # of 4 predicted steps and 2 elements
    old, change = (torch.randn(3, 2, 4, 2, generator=draws, dtype=torch.float64) for _ in range(2))
    mean = old + 0.2 * change
    std = 0.1 + 0.4 * torch.rand(1, 2, 1, 2, generator=draws, dtype=torch.float64)
    executed = torch.tensor([[True, True], [True, False], [True, True]])
    precision = logp_precision(config, Normal(mean, std), executed, part)
    before, after = (reduce_logp(config, Normal(each, std), old, executed, part)[0] for each in (old, mean))
    torch.testing.assert_close(0.5 * (precision * (mean - old).square()).sum((-2, -1)), before - after)

    rollouts = replace(make_rollouts([1, 1, 1], [0, 0, 0], steps=2), latents={"mean": old[:, None]})
    extras = {"mean": mean, "std": std.expand(mean.shape), "logp_precision": precision}
    scored = make_scored(
        rollouts,
        rollouts.logp_behaviour + (after - before)[:, None],
        torch.ones(3, 1, 2, dtype=torch.float64),
        (9.0, 9.0),
        extras={name: value[:, None] for name, value in extras.items()},
    )
    c, _ = coefficients.grpo_guard(scored)
    torch.testing.assert_close(c, std[:, None, :, 0, 0].expand(c.shape))  # r' is 1 there, and c is std r' A


@pytest.mark.checks("coefficient/grpo_guard")
def test_older_episodes_are_guarded_by_the_ratio_to_the_policy_that_acted():
    """Its means are the recorded ones: .2 from them at std .2 shifts by 1/2, whatever the proximal policy is."""
    rollouts = make_rollouts([1], [0], steps=1)
    old = torch.zeros(1, 1, 1, 2, 1, dtype=torch.float64)
    logp = rollouts.logp_behaviour + 0.5
    rollouts = replace(rollouts, latents={"mean": old}, logp_proximal=logp.clone())
    std = torch.full_like(old, 0.2)
    extras = {"mean": old + 0.2, "std": std, "logp_precision": 1 / std.square() / 2}  # the mean over two elements
    scored = make_scored(rollouts, logp, torch.ones(1, 1, 1, dtype=torch.float64), (9.0, 9.0), extras=extras)
    c, stats = coefficients.grpo_guard(scored)
    assert float(c) == pytest.approx(0.2 * math.exp(0.2 * (0.5 + 0.5)))
    assert float(stats["guarded_ratio_mean"]) == pytest.approx(math.exp(0.2))


@pytest.mark.checks("coefficient/mdpo")
def test_the_step_of_mirror_descent_falls_linearly_over_the_run():
    rollouts = make_rollouts([1], [0], steps=1)
    log_ratio = torch.full((1, 1, 1), 0.2, dtype=torch.float64)
    scored = make_scored(rollouts, rollouts.logp_behaviour + log_ratio, torch.full_like(log_ratio, 3.0))
    for share, step in ((0.0, 1.0), (0.25, 0.775), (1.0, 0.1)):
        c, stats = experimental_coefficients.mdpo(replace(scored, share=share), start=1.0, end=0.1)
        assert float(c) == pytest.approx(float(log_ratio.exp()) * (3.0 - 0.2 / step))
        assert float(stats["mirror_step"]) == pytest.approx(step)


@pytest.mark.checks("advantage/rank_grpo")
def test_ratios_of_actions_are_the_geometric_means_of_their_tokens():
    """The ratio of Rank-GRPO's unit; clipped, its gradient is that of the surrogate over units."""
    draws = torch.Generator().manual_seed(0)
    old, noise = (torch.randn(3, 4, generator=draws, dtype=torch.float64) for _ in range(2))
    logp = (old + 0.4 * noise).requires_grad_()
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0]], dtype=torch.bool)
    unit = torch.tensor([[1.0, -1.0], [0.5, 2.0], [-0.3, 0.0]], dtype=torch.float64)
    ratios = log_ratios(logp, old, mask, 20.0, RatioLevel.ACTION_MEAN, 2)
    geometric = torch.stack([((logp - old)[:, :2]).mean(1), ((logp - old)[:, 2:]).mean(1)], 1).exp()
    torch.testing.assert_close(ratios.log_ratio[:2].exp(), geometric[:2].detach().repeat_interleave(2, 1))
    surrogate = torch.min(geometric * unit, geometric.clamp(0.8, 1.2) * unit)
    (expected,) = torch.autograd.grad(-(2 * surrogate * mask[:, ::2]).sum(), logp)  # a unit's two tokens both carry it
    c = coefficients.ppo(ratios.log_ratio, unit.repeat_interleave(2, 1), 0.2, 0.2, ratios.clamped)
    (gradient,) = torch.autograd.grad(policy_loss(logp, c, mask.double()), logp)
    torch.testing.assert_close(gradient, expected, atol=1e-12, rtol=1e-10)


@pytest.mark.checks("coefficient/drpo")
def test_drpo_is_the_gradient_of_its_loss():
    """Two mixed groups and one without a success, with steps that have moved from the old policy."""
    group, returns = [0, 0, 0, 0, 1, 1, 1, 2, 2], [1.0, 1.0, -1.0, -1.0, 1.0, -1.0, -1.0, -1.0, -1.0]
    rollouts = make_rollouts([2, 1, 3, 1, 2, 2, 1, 1, 2], group, returns)
    noise = torch.randn(rollouts.mask.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logp = (rollouts.logp_behaviour + 0.3 * noise).requires_grad_()
    scored = make_scored(rollouts, logp, torch.zeros_like(noise))
    tau, decay, delta, beta = 2.0, 0.5, 0.01, 3.0
    steps = scored.mask.sum((1, 2))
    score = torch.where(scored.mask, logp, 0.0).sum((1, 2)) / steps
    weight = torch.exp((1 - rollouts.duration.sum(1) / 6.0) / decay).double()
    terms = []
    for number in (0, 1):
        good = [i for i, g in enumerate(group) if g == number and returns[i] > 0]
        bad = [i for i, g in enumerate(group) if g == number and returns[i] < 0]
        drawn = (weight[good] * score[good]).sum() / weight[good].sum()
        terms.append(drawn - tau * (score[bad] / tau).exp().mean().log())
    x = (logp - rollouts.logp_behaviour)[scored.mask]
    divergence = (x.exp() - x - 1).mean()
    loss = -sum(terms) / 3 + beta * (divergence.detach() - delta) * divergence
    (expected,) = torch.autograd.grad(loss, logp)
    c, _ = experimental_coefficients.drpo(scored, tau=tau, decay=decay, delta=delta, beta=beta)
    weights = scored.mask.double() / len(group)  # weight=constant length=1
    (gradient,) = torch.autograd.grad(policy_loss(logp, c, weights), logp)
    torch.testing.assert_close(gradient, expected, atol=1e-9, rtol=1e-6)


@pytest.mark.checks("coefficient/drpo")
def test_drpo_shares_by_length_among_successes_and_by_likelihood_among_failures():
    """Successes of 20 and 40 of 40 control steps; failures of mean log-probability -1 and -2, tau 10."""
    rollouts = make_rollouts([10, 20, 1, 1], [0] * 4, [1.0, 1.0, -1.0, -1.0], steps=1)
    logp = torch.tensor([0.0, 0.0, -1.0, -2.0], dtype=torch.float64)[:, None, None].expand(4, 20, 1)
    rollouts = replace(rollouts, logp_behaviour=logp.clone())
    c, _ = experimental_coefficients.drpo(make_scored(rollouts, logp, torch.zeros_like(logp)))
    shares = (c.sum((1, 2)) / 4).tolist()  # four episodes, one group
    assert shares == pytest.approx([0.99331, 0.00669, -0.52498, -0.47502], abs=1e-5)


@pytest.mark.checks("AEPO")
def test_steps_that_rose_beyond_the_range_keep_the_gradient_of_its_end():
    ratio, advantage = torch.tensor([1.5, 1.5, 0.7, 0.7, 1.1]).double(), torch.tensor([1.0, -1.0, 1.0, -1.0, 2.0])
    rollouts = make_rollouts([1] * 5, [0] * 5, steps=1)
    logp = rollouts.logp_behaviour + ratio.log()[:, None, None]
    scored = make_scored(rollouts, logp, advantage.double()[:, None, None])
    c, _ = coefficients.clipped(scored, keep_above=True)
    assert c.flatten().tolist() == pytest.approx([1.2, -1.5, 0.7, 0.0, 2.2])
    assert coefficients.clipped(scored)[0].flatten().tolist() == pytest.approx([0.0, -1.5, 0.7, 0.0, 2.2])


@pytest.mark.checks("coefficient/future_ratio")
def test_appo_credits_steps_whose_later_steps_became_likelier():
    for change, gain in (([0.1, 0.2, -0.05, 0.0], [2.2, 2.1625, 2.0, 2.0]), ([-0.1, 0.02, 0.0], [2.0, 2.0202, 2.0])):
        length = len(change)
        rollouts = make_rollouts([length], [0], steps=2)
        rollouts.mask[..., 1] = False  # steps that are not scored lie between and count for nothing
        moved = torch.tensor([change, [9.0] * length], dtype=torch.float64).T[None]
        scored = make_scored(rollouts, rollouts.logp_behaviour + moved, torch.ones(1, length, 2, dtype=torch.float64))
        c, _ = experimental_coefficients.future_ratio(scored)
        factor = (c / scored.ratio)[0, :, 0]
        assert factor.tolist() == pytest.approx(gain, abs=1e-4)


@pytest.mark.checks("coefficient/future_ratio")
def test_appo_ignores_later_steps_beyond_the_dual_clip():
    rollouts = make_rollouts([2], [0], steps=1)
    far = torch.tensor([0.0, math.log(3.1)], dtype=torch.float64)[None, :, None]
    scored = make_scored(rollouts, rollouts.logp_behaviour + far, torch.ones(1, 2, 1, dtype=torch.float64))
    assert experimental_coefficients.future_ratio(scored)[0].flatten().tolist() == pytest.approx([2.0, 0.0])


@pytest.mark.checks("coefficient/future_ratio", "APPO")
def test_appo_leaves_out_episodes_with_two_steps_beyond_the_dual_clip():
    """Of the authors' code: an episode of A < 0 with more than one step whose ratio is above 3."""
    rollouts = make_rollouts([3, 3, 3], [0, 0, 0], steps=1)
    ratio = torch.tensor([[3.1, 3.1, 1.0], [3.1, 2.9, 1.0], [3.1, 3.1, 1.0]], dtype=torch.float64)[..., None]
    advantage = torch.tensor([-1.0, -1.0, 1.0], dtype=torch.float64)[:, None, None].expand(3, 3, 1)
    scored = make_scored(rollouts, rollouts.logp_behaviour + ratio.log(), advantage)
    c, stats = experimental_coefficients.future_ratio(scored)
    assert c[0].flatten().tolist() == [0.0, 0.0, 0.0]
    # exp F of the step at 2.9 is above 1.2, of the last one 1
    assert c[1].flatten().tolist() == pytest.approx([0.0, -2.2 * 2.9, -2.0])
    assert c[2].flatten().tolist() == pytest.approx([0.0, 0.0, 2.0])
    assert float(stats["left_out"]) == pytest.approx(1 / 3)


@pytest.mark.checks("DART-GUI")
def test_dart_weighs_by_the_truncated_ratio_to_who_played():
    ratio = torch.tensor([0.7, 1.3], dtype=torch.float64)
    rollouts = make_rollouts([1, 1], [0, 0], steps=1)
    rollouts = replace(rollouts, logp_proximal=rollouts.logp_behaviour + ratio.log()[:, None, None])
    scored = make_scored(rollouts, rollouts.proximal, torch.ones(2, 1, 1, dtype=torch.float64))
    c, _ = coefficients.decoupled_ppo(scored, limit=1.0, dual_clip=10.0)
    assert c.flatten().tolist() == pytest.approx([0.7, 1.0])
    for factor, kept in ((9.9, -9.9), (10.1, 0.0)):
        scored = make_scored(rollouts, rollouts.proximal + math.log(factor), -torch.ones(2, 1, 1, dtype=torch.float64))
        c, _ = coefficients.decoupled_ppo(scored, limit=1.0, dual_clip=10.0)
        assert c.flatten().tolist() == pytest.approx([0.7 * kept, kept])
