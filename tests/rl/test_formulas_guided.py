"""Distillation, preferences between siblings and pushes away from failures: hand tables, and autograd of the losses."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from made_rollouts import make_rollouts, make_scored
from torch import Tensor
from torch.nn import functional

from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import Scores
from robopolicy.rl.context import Context
from robopolicy.rl.experimental import distillation
from robopolicy.rl.experimental.coefficients import perception
from robopolicy.rl.experimental.preferences import away, siblings
from robopolicy.rl.objective import distribution_overlap, policy_loss

CONTEXT = Context(torch.Generator())


def steps(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None, None]


@pytest.mark.checks("coefficient/scope", "SCOPE-OPD")
def test_successes_weigh_by_the_students_perplexity_and_failures_by_the_teachers():
    """The example of the paper: perplexities of right answers by the student, of wrong ones by the teacher."""
    rollouts = make_rollouts([1] * 6, [0] * 6, [1, 1, 1, 0, 0, 0], steps=1)
    own = [-math.log(value) for value in (1.2, 2.6, 3.8, 2.0, 2.0, 2.0)]
    taught = [-math.log(value) for value in (2.0, 2.0, 2.0, 4.5, 2.9, 1.7)]
    rollouts = replace(rollouts, logp_behaviour=steps(own)).with_extras(teacher_logp=steps(taught))
    c, _ = distillation.scope(make_scored(rollouts, steps(own), torch.zeros(6, 1, 1)))
    weights = [0.1579, 0.3421, 0.5, 0.1924, 0.2985, 0.5092]
    gap = [1.0, 1.0, 1.0, *(t - s for t, s in zip(taught[3:], own[3:], strict=True))]
    assert c.flatten().tolist() == pytest.approx([3 * w * g for w, g in zip(weights, gap, strict=True)], abs=2e-4)


@pytest.mark.checks("coefficient/scope")
def test_its_coefficient_is_the_gradient_of_both_losses():
    draws = torch.Generator().manual_seed(0)
    rollouts = make_rollouts([2, 1, 2, 2], [0] * 4, [1, 0, 1, 0])
    shape = rollouts.mask.shape
    noise, taught = (0.3 * torch.randn(shape, generator=draws, dtype=torch.float64) for _ in range(2))
    rollouts = rollouts.with_extras(teacher_logp=rollouts.logp_behaviour + taught)
    logp = (rollouts.logp_behaviour + noise).requires_grad_()
    scored = make_scored(rollouts, logp.detach(), torch.zeros(shape))
    c, _ = distillation.scope(scored, tau=0.7)
    mask, won = scored.mask, rollouts.row_success
    count = mask.sum((1, 2))
    own = (-(rollouts.logp_behaviour * mask).sum((1, 2)) / count / 0.7)[won].softmax(0) * 2
    sure = ((rollouts.extras["teacher_logp"] * mask).sum((1, 2)) / count / 0.7)[~won].softmax(0) * 2
    weight = torch.zeros(4, dtype=torch.float64).masked_scatter(won, own).masked_scatter(~won, sure)[:, None, None]
    ratio = (logp - rollouts.logp_behaviour).exp()
    apart = ratio * (logp - rollouts.extras["teacher_logp"]).detach()
    loss = (weight * torch.where(won[:, None, None], -ratio, apart) * mask).sum()
    (expected,) = torch.autograd.grad(loss, logp)
    (gradient,) = torch.autograd.grad(policy_loss(logp, c, mask.double()), logp)
    torch.testing.assert_close(gradient, expected, atol=1e-9, rtol=1e-7)


S, T = (torch.tensor(p, dtype=torch.float64).log() for p in ([0.7, 0.2, 0.1], [0.4, 0.1, 0.5]))


@pytest.mark.checks("auxiliaries/distill", "Vision-OPD", "PW-OPSD")
@pytest.mark.parametrize(
    ("form", "top", "clip", "value"),
    [
        ("reverse", 0, None, 0.3694), ("forward", 0, None, 0.5116), ("jsd", 0, None, 0.1020),
        ("reverse", 1, None, 0.1838), ("forward", 1, None, 0.1920), ("jsd", 1, None, 0.0462),
        ("forward", 0, 0.05, -0.2432),
    ],
)  # fmt: skip
def test_divergences_of_tokens_by_hand(form: str, top: int, clip: float | None, value: float):
    """The student's likeliest token and the rest: (.7, .3) and (.4, .6)."""
    assert float(distillation.divergence(S, T, form, top, clip)) == pytest.approx(value, abs=1e-4)


@pytest.mark.checks("auxiliaries/distill")
def test_what_only_tokens_have_is_refused_for_gaussian_steps():
    mean, std = torch.zeros(1, 1, 2, 2), torch.ones(1, 1, 1, 1)
    for form, top, clip in (("jsd", 0, None), ("reverse", 3, None), ("forward", 0, 0.1)):
        with pytest.raises(ConfigError, match="steps are Gaussian"):
            distillation.squared_distance({"mean": mean, "std": std}, mean, form, top, clip)
    with pytest.raises(ConfigError, match=r"distill.divergence=forwards.*Did you mean 'forward'"):
        distillation.divergence(S, T, "forwards")


@pytest.mark.checks("auxiliaries/distill", "PW-OPSD")
def test_late_chunks_weigh_more():
    weights = distillation.late_weight((torch.arange(4) + 0.5) / 4, 0.25, 0.3, 0.1)
    assert weights.tolist() == pytest.approx([0.361, 0.7594, 0.972, 0.9976], abs=1e-4)


@pytest.mark.checks("credit/prune", "Prune-OPD")
def test_credit_falls_with_every_step_at_which_teacher_and_student_parted():
    overlap = torch.tensor([0.9, 0.1, 0.9, 0.2, 0.3])[None, :, None]
    rollouts = make_rollouts([5], [0], steps=1).with_extras(teacher_overlap=overlap)
    changed = distillation.prune(rollouts, torch.ones(1, 5, 1), CONTEXT, drop=0.25)
    assert changed.flatten().tolist() == pytest.approx([1.5, 1.25, 1.25, 1.0, 0.75])


@pytest.mark.checks("allocator/until_parting", "Prune-OPD")
def test_episodes_are_as_long_as_teacher_and_student_stay_together():
    """With drop .5 two bad steps end it: rows stay together for 1, 3 and 4 of 4 chunks."""
    overlap = torch.tensor([[0.1, 0.1, 0.9, 0.9], [0.1, 0.9, 0.9, 0.1], [0.9, 0.9, 0.9, 0.1]])
    rollouts = make_rollouts([4, 4, 4], [0] * 3, steps=1).with_extras(teacher_overlap=overlap[..., None])
    allocator = distillation.UntilParting(first=4, step=1, share=0.6, patience=2, drop=0.5)
    limits = []
    for _ in range(6):
        limits.append(allocator.limits(np.arange(2)))
        allocator.observe_rollouts(rollouts)
    # two of three reach 4 - 1 chunks; one of three 5 - 1, twice; then two of three again
    assert limits == [[4] * 2, [5] * 2, [5] * 2, [4] * 2, [5] * 2, [5] * 2]
    other = distillation.UntilParting()
    other.restore(allocator.state())
    assert other.limits(np.arange(1)) == [4] and other.misses == 0
    shortest = distillation.UntilParting(first=1, step=1, share=1.0, patience=1, drop=1.0)
    shortest.limit = 2
    for expected in (1, 2, 1):  # the first two rows part at once, but everybody reaches nothing
        shortest.observe_rollouts(rollouts)
        assert shortest.limits(np.arange(1)) == [expected]


@pytest.mark.checks("credit/prune")
def test_overlap_is_of_likely_tokens_or_by_the_distance_of_means():
    student, teacher = torch.arange(12.0), torch.arange(12.0)
    teacher[[0, 11]] = teacher[[11, 0]]  # the three likeliest of 12: two in common
    one, other = (Scores(x[None, :1], x[None, :1], {"log_probabilities": x[None, None]}) for x in (student, teacher))
    assert float(distribution_overlap(one, other, torch.ones(1, 1, dtype=torch.bool))) == pytest.approx(2 / 3)
    mean = torch.zeros(1, 1, 3, 2)
    far = mean.clone()
    far[:, :, 0], far[:, :, 2] = 0.6, 9.0  # of three predicted steps two are played
    std = torch.full((1, 1, 1, 1), 0.3)
    one, other = (Scores(mean[..., 0, 0], mean[..., 0, 0], {"mean": each, "std": std}) for each in (mean, far))
    agreement = distribution_overlap(one, other, torch.ones(1, 2, dtype=torch.bool))
    assert float(agreement) == pytest.approx(math.exp(-0.5 * 4 / 2))
    one.extras["logp_precision"] = torch.tensor([0.0, 1.0, 1.0]).reshape(1, 1, 3, 1).expand(mean.shape)  # the last two
    assert float(distribution_overlap(one, other, torch.ones(1, 2, dtype=torch.bool))) == pytest.approx(
        math.exp(-0.5 * 900 / 2), abs=1e-9
    )


@pytest.mark.checks("advantage/teacher_gap")
def test_the_gap_to_the_teacher_is_the_first_steps_coefficient_of_distillation():
    rollouts = make_rollouts([2, 1], [0, 1])
    gap = torch.tensor([9.0, -0.5], dtype=torch.float64)[:, None, None].expand(rollouts.mask.shape)
    rollouts = rollouts.with_extras(teacher_logp=rollouts.logp_behaviour + gap)
    advantage = distillation.teacher_gap(rollouts, CONTEXT)
    assert advantage[rollouts.mask].tolist() == pytest.approx([5.0] * 4 + [-0.5] * 2)
    assert not advantage[~rollouts.mask].any()


@pytest.mark.checks("coefficient/siblings", "TP-LLaMA")
def test_siblings_are_preferred_by_what_they_lead_to():
    """The second row branches off at the second decision and succeeds; D = .3 against -.2."""
    rollouts = make_rollouts([3, 3], [0, 0], [0.0, 1.0], steps=2, parent=[-1, 0], branch_decision=[-1, 1])
    rollouts.mask[1, 0] = False  # played by its parent
    move = torch.zeros(2, 3, 2, dtype=torch.float64)
    move[0, 1], move[1, 1], move[0, 0], move[1, 2] = -0.1, 0.15, 9.0, 9.0
    rollouts = rollouts.with_extras(reference_logp=rollouts.logp_behaviour)
    scored = make_scored(rollouts, rollouts.logp_behaviour + move, torch.zeros(2, 3, 2))
    c, stats = siblings(scored, beta=1.0)
    loss = -functional.logsigmoid(torch.tensor(0.5))
    assert float(loss) == pytest.approx(0.4741, abs=1e-4) and float(stats["pairs"]) == 1
    expected = torch.zeros(2, 3, 2, dtype=torch.float64)
    expected[0, 1], expected[1, 1] = -2 * 0.3775, 2 * 0.3775  # times the number of episodes, as in pair_mean
    torch.testing.assert_close(c, expected, atol=2e-4, rtol=1e-4)
    alike = replace(rollouts, success=torch.zeros_like(rollouts.success))
    assert not siblings(make_scored(alike, scored.logp, torch.zeros(2, 3, 2)))[0].any()
    inside = replace(rollouts, branch_sampling_step=torch.tensor([0, 1]))
    with pytest.raises(ConfigError, match="branch_sampling_step=null"):
        siblings(make_scored(inside, scored.logp, torch.zeros(2, 3, 2)))


@pytest.mark.checks("coefficient/siblings")
@pytest.mark.parametrize("seed", range(3))
def test_sibling_pairs_equal_a_slow_reference(seed: int):
    """Two trees: rows 1 and 2 branch off row 0, at decisions 1 and 2, row 3 off row 1 at decision 2; and two roots."""
    rollouts = make_rollouts(
        [4, 4, 3, 4, 2, 3], [0, 0, 0, 0, 1, 1], [0.0, 0.0, 1.0, 1.0, 1.0, 0.0],
        seed=seed, parent=[-1, 0, 0, 1, -1, -1], branch_decision=[-1, 1, 2, 2, -1, -1],
    )  # fmt: skip
    for row, first in ((1, 1), (2, 2), (3, 2)):
        rollouts.mask[row, :first] = False
    noise = torch.randn(rollouts.mask.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rollouts = rollouts.with_extras(reference_logp=rollouts.logp_behaviour)
    logp = (rollouts.logp_behaviour + noise).requires_grad_()
    change = ((logp - rollouts.logp_behaviour) * rollouts.mask).sum(-1)
    # (good, bad): at decision 1 rows 1 (with 3 below it) and 0 (with 2 below it) both lead to a success
    pairs = [((2, 2), (0, 2)), ((3, 2), (1, 2)), ((4, 0), (5, 0))]
    terms = [-functional.logsigmoid(0.3 * (change[good] - change[bad])) for good, bad in pairs]
    (expected,) = torch.autograd.grad(6 * torch.stack(terms).mean(), logp)
    c, _ = siblings(make_scored(rollouts, logp.detach(), torch.zeros_like(noise)), beta=0.3)
    (gradient,) = torch.autograd.grad(policy_loss(logp, c, rollouts.mask.double()), logp)
    torch.testing.assert_close(gradient, expected, atol=1e-9, rtol=1e-7)


@pytest.mark.checks("coefficient/siblings", "MCTS-DPO")
def test_the_best_and_the_worst_sibling_are_paired_and_visits_smooth_their_label():
    """Six episodes pass the first chunk of row 0, two that of row 6: s = .25; m = 2, beta = .1: L = .6481, dL/dm -.02.

    Below row 0 the chunks of rows 1 to 5 branch off at the second chunk, of which row 1 succeeds most and row 0 least.
    """
    returns = [0.1, 1.0, 0.9, 0.9, 0.9, 0.9, 0.0, 0.2]
    parent, branch = [-1, 0, 0, 0, 0, 0, -1, 6], [-1, 1, 1, 1, 1, 1, -1, 2]
    rollouts = make_rollouts([3] * 8, [0] * 8, returns, steps=1, parent=parent, branch_decision=branch)
    for row, first in enumerate(branch):
        rollouts.mask[row, : max(first, 0)] = False
    change = torch.zeros(8, 3, 1, dtype=torch.float64)
    change[0, 0], change[6, 0] = 1.5, -0.5
    rollouts = rollouts.with_extras(reference_logp=rollouts.logp_behaviour)
    logp = (rollouts.logp_behaviour + change).requires_grad_()
    c, stats = siblings(make_scored(rollouts, logp.detach(), torch.zeros(8, 3, 1)), pairs="values", smooth=True)
    assert float(stats["pairs"]) == 3, "at the root, before chunk 1 of row 0, and before chunk 2 of row 6"
    difference = (logp - rollouts.logp_behaviour)[..., 0]
    terms = []
    for good, bad, doubt in (((0, 0), (6, 0), 0.25), ((1, 1), (0, 1), 0.5), ((7, 2), (6, 2), 0.5)):
        margin = 0.1 * (difference[good] - difference[bad])
        loss = -(1 - doubt) * functional.logsigmoid(margin) - doubt * functional.logsigmoid(-margin)
        terms.append(loss)
    assert float(terms[0].detach()) == pytest.approx(0.6481, abs=1e-4)
    assert c[0, 0, 0] * 3 / 8 == pytest.approx(0.0200, abs=1e-4), "minus dL/dm"
    (expected,) = torch.autograd.grad(8 * torch.stack(terms).mean(), logp)
    (gradient,) = torch.autograd.grad(policy_loss(logp, c, rollouts.mask.double()), logp)
    torch.testing.assert_close(gradient, expected, atol=1e-9, rtol=1e-7)
    with pytest.raises(ConfigError, match=r"siblings.pairs=value is not known"):
        siblings(make_scored(rollouts, logp.detach(), torch.zeros(8, 3, 1)), pairs="value")


@pytest.mark.checks("selection/best_teacher_rollout", "BRTS")
def test_the_best_teacher_rollout_is_right_and_near_the_student():
    """(right, .3), (right, .5), (wrong, .9): the second; (wrong, .2), (wrong, .4): the second; no teacher's: all."""
    rollouts = make_rollouts([2, 1, 2, 1, 1, 2, 1, 1], [0, 0, 0, 0, 1, 1, 1, 2], [0, 1, 1, 0, 1, 0, 0, 0], steps=2)
    overlap = torch.tensor([0.9, 0.3, 0.5, 0.9, 0.1, 0.2, 0.4, 0.9])[:, None, None].expand(rollouts.mask.shape).clone()
    overlap[1, 1] = 9.0  # padding counts nowhere
    helped = torch.tensor([0, 1, 1, 1, 0, 1, 1, 0]).bool()[:, None].expand(rollouts.shape)
    rollouts = rollouts.with_extras(teacher_overlap=overlap, helped=helped)
    kept = distillation.best_teacher_rollout(rollouts, CONTEXT)
    assert kept.tolist() == [True, False, True, False, True, False, True, True]


@pytest.mark.checks("coefficient/away", "SEAgent")
def test_failures_are_pushed_away_less_and_less():
    rollouts = make_rollouts([1] * 4, [0] * 4, [0.0, 0.0, 0.0, 1.0], steps=1)
    rollouts = rollouts.with_extras(reference_logp=rollouts.logp_behaviour - steps([0.0, 1.0, -2.0, 0.0]))
    scored = make_scored(rollouts, rollouts.logp_behaviour, steps([-1.0, -1.0, -1.0, 3.0]))
    c, _ = away(scored)
    assert c.flatten().tolist() == pytest.approx([-0.1, -0.1462, -0.0238, 3.0], abs=1e-4)


@pytest.mark.checks("coefficient/perception", "Q-Hawkeye")
def test_what_does_not_need_the_image_is_moved_away_from_the_blind_policy():
    rollouts = make_rollouts([1, 1, 1], [0, 0, 0], steps=1)
    x = steps([-1.0, 0.4, 3.0])  # k3: .3679, .0918, 16.1, over the cap
    rollouts = rollouts.with_extras(blackout_logp=rollouts.logp_behaviour + x)
    logp = rollouts.logp_behaviour.clone().requires_grad_()
    scored = make_scored(rollouts, logp.detach(), steps([1.0, -2.0, 0.5]))
    distance = (rollouts.extras["blackout_logp"] - logp).exp() - 1 - (rollouts.extras["blackout_logp"] - logp)
    assert float(distance[0].detach()) == pytest.approx(0.3679, abs=1e-4)
    for share, strength in ((0.0, 0.2), (0.16665, 0.1), (0.9, 0.0)):
        c, _ = perception(replace(scored, share=share), gamma=0.2, eta=0.05)
        loss = -(scored.advantage * logp + strength * distance.clamp(max=10.0) + 0.05 * logp).sum()
        (expected,) = torch.autograd.grad(loss, logp, retain_graph=True)
        torch.testing.assert_close(-c, expected, atol=1e-9, rtol=1e-7)
