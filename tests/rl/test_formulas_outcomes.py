"""Rewards, advantages and credit that compare the episodes of a group or of a start, by hand."""

import math
from dataclasses import replace

import pytest
import torch
from made_rollouts import make_rollouts
from torch.distributions import Normal

from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import Scores
from robopolicy.rl.context import Context
from robopolicy.rl.experimental import credit, outcomes
from robopolicy.rl.experimental.advantages import opob
from robopolicy.rl.objective import score_norm

CONTEXT = Context(torch.Generator())


def per_row(values: list[float], rollouts) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None, None].expand(rollouts.mask.shape)


@pytest.mark.checks("credit/novelty", "XRPO")
def test_novelty_raises_good_episodes_that_are_unlikely_in_their_group():
    rollouts = make_rollouts([2, 2, 2], [0, 0, 0])
    rollouts = replace(rollouts, logp_behaviour=per_row([-1.0, -2.0, -1.5], rollouts))
    changed = credit.novelty(rollouts, per_row([1.0, 1.0, -2.0], rollouts), CONTEXT, weight=1.0, limit=1.0)
    # eta: e^.5, e^-.5, 1 of means -1, -2, -1.5
    assert changed[:, 0, 0].tolist() == pytest.approx([1.0, 2 - math.exp(-0.5), -2.0])
    # the paper's weight of 2.5 is limited to half the advantage where 2.5 (1 - eta) = .98 exceeds it
    papers = credit.novelty(rollouts, per_row([1.0, 1.0, -2.0], rollouts), CONTEXT)
    assert papers[:, 0, 0].tolist() == pytest.approx([1.0, 1.5, -2.0])
    capped = credit.novelty(rollouts, per_row([1.0, 0.2, 1.0], rollouts), CONTEXT, weight=2.0, limit=0.5)
    assert capped[:, 1, 1].tolist() == pytest.approx([1.0, 0.3, 1.0])


@pytest.mark.checks("credit/steadiness", "Q-Hawkeye")
@pytest.mark.parametrize(("apart", "share"), [(0.0, 0.0), (1.0, 0.25), (2.0, 1.0)])
def test_groups_that_begin_in_different_ways_learn_less(apart: float, share: float):
    """Chunks of two elements between -2 and 2, so Var_max = 4; a group of which half begin at +-apart."""
    rollouts = make_rollouts([2] * 4, [0, 0, 1, 1])
    actions = torch.zeros(4, 2, 2, 1)
    actions[0, 0], actions[1, 0] = apart, -apart
    actions[2, 1], actions[3, 1] = 2.0, -2.0  # later chunks give the range alone
    changed = credit.steadiness(replace(rollouts, actions=actions), per_row([3.0] * 4, rollouts), CONTEXT)
    assert changed[:, 1, 1].tolist() == pytest.approx([3 * math.exp(-0.2 * share)] * 2 + [3.0] * 2)


@pytest.mark.checks("advantage/opob", "VCPO")
def test_the_baseline_of_least_variance_weighs_returns_by_squared_ratios_and_gradients():
    rollouts = make_rollouts([1, 1, 1, 1, 1], [0, 0, 0, 1, 1], [1.0, 0.0, 0.0, 1.0, 0.0], steps=1)
    ratio = torch.tensor([1.0, 2.0, 1.0, 1.0, 1.0], dtype=torch.float64)[:, None, None]
    norm = torch.tensor([1.0, 1.0, 4.0, 0.0, 0.0], dtype=torch.float64)[:, None, None]
    rollouts = rollouts.with_extras(current_logp=rollouts.logp_behaviour + ratio.log(), score_norm=norm)
    advantages = opob(rollouts, CONTEXT, scale=False)[:, 0]
    # w^2 g^2 = 1, 4, 4: b = 1/9; the second group has no gradient, so its mean 1/2
    assert advantages.tolist() == pytest.approx([8 / 9, -1 / 9, -1 / 9, 0.5, -0.5])
    scaled = opob(rollouts, CONTEXT)[:3, 0]
    assert scaled.tolist() == pytest.approx([value / (math.sqrt(2) / 3) for value in (8 / 9, -1 / 9, -1 / 9)], rel=1e-4)


@pytest.mark.checks("advantage/opob")
def test_the_baseline_has_the_least_variance_of_all():
    draws = torch.Generator().manual_seed(0)
    returns = torch.rand(6, generator=draws, dtype=torch.float64)
    change, norm = (torch.randn(6, generator=draws, dtype=torch.float64) for _ in range(2))
    rollouts = make_rollouts([1] * 6, [0] * 6, returns.tolist(), steps=1)
    logp = rollouts.logp_behaviour + change[:, None, None]
    rollouts = rollouts.with_extras(current_logp=logp, score_norm=norm.exp()[:, None, None])
    baseline = float((returns - opob(rollouts, CONTEXT, scale=False)[:, 0].double()).mean())

    def second_moment(b: float) -> float:
        return float(((change.exp() * (returns - b)).square() * norm.exp()).sum())

    assert second_moment(baseline) <= min(second_moment(baseline + d) for d in (-1e-3, 1e-3))


@pytest.mark.checks("advantage/opob")
def test_norms_of_scores_are_those_of_gradients_by_logits_and_by_means():
    logits = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log().requires_grad_()
    logp = logits.log_softmax(-1)
    scores = Scores(logp[:1, None], logp[:1, None], {"log_probabilities": logp[None, None]})
    (gradient,) = torch.autograd.grad(logp[0], logits)
    executed = torch.ones(1, 2, dtype=torch.bool)
    assert float(score_norm(scores, {}, executed).detach()) == pytest.approx(0.38) == float(gradient.square().sum())
    draws = torch.Generator().manual_seed(0)
    mean = torch.randn(1, 3, 4, 2, generator=draws, dtype=torch.float64).requires_grad_()
    chain, std = torch.randn(1, 4, 4, 2, generator=draws, dtype=torch.float64), torch.full((1, 3, 1, 1), 0.4)
    density = Normal(mean, 0.4).log_prob(chain[:, 1:])[:, :, :2].sum((2, 3))  # two of four predicted steps are played
    scores = Scores(density, density, {"mean": mean, "std": std.double()})
    (gradient,) = torch.autograd.grad(density.sum(), mean)
    expected = gradient.square().sum((2, 3)) / 4
    torch.testing.assert_close(score_norm(scores, {"chain": chain}, executed).detach(), expected)
    with pytest.raises(ConfigError, match="reads 'mean'"):
        score_norm(Scores(density, density, {}), {"chain": chain}, executed)
    # A chunk that begins with the second predicted step, its latents padded by an element.
    density = Normal(mean, 0.4).log_prob(chain[:, 1:])[:, :, 1:3, :1].sum((2, 3))
    precision = torch.zeros_like(mean.detach())
    precision[:, :, 1:3, :1] = 1 / 0.4**2
    scores = Scores(density, density, {"mean": mean, "std": std.double(), "logp_precision": precision})
    (gradient,) = torch.autograd.grad(density.sum(), mean)
    expected = gradient.square().sum((2, 3)) / 2
    torch.testing.assert_close(score_norm(scores, {"chain": chain}, executed).detach(), expected)


@pytest.mark.checks("rewards/within_budget", "PALU")
def test_a_budget_of_steps_follows_the_successes_of_a_start():
    """Decisions of 2 steps each: successes after 20, 30, 40, 50 of at most 60 steps, and a failure."""
    context = replace(CONTEXT, memory={})

    def visit(decisions: list[int], won: list[float]) -> list[float]:
        rollouts = make_rollouts(decisions, [0] * len(won), won)
        start = torch.full(rollouts.shape, 3)
        return outcomes.within_budget(rollouts.with_extras(start=start), context).row_return.tolist()

    assert visit([10, 15, 20, 25, 30], [1, 1, 1, 1, 0]) == [1, 1, 1, 1, 0]
    assert context.memory["within_budget"]["3"] == 60 - (50 - 35)
    assert visit([10, 22, 23, 30, 30], [1, 1, 1, 0, 0]) == [1, 1, 0, 0, 0], "46 steps are over 45"
    assert context.memory["within_budget"]["3"] == 60
    with pytest.raises(ConfigError, match=r"target=2 .* in \[0, 1\]"):
        outcomes.within_budget(make_rollouts([1], [0], [1.0]), context, target=2.0)


@pytest.mark.checks("rewards/spread_weights", "POW3R")
@pytest.mark.parametrize(
    ("deviations", "weights"), [((0.0, 0.5), (0.0, 3.0)), ((0.25, 0.5), (1.5, 1.5)), ((0, 0), (2, 1))]
)
def test_weight_goes_to_the_rewards_that_tell_episodes_apart(deviations, weights):
    rollouts = make_rollouts([1, 1], [0, 0], [0.0, 0.0])
    side = torch.tensor([1.0, -1.0])[:, None, None] * torch.tensor([0.0, 1.0])
    terms = {name: 1 + deviation * side for name, deviation in zip("ab", deviations, strict=True)}
    rollouts = replace(rollouts, rewards=terms)
    changed = outcomes.spread_weights(rollouts, CONTEXT, weights={"a": 2.0, "b": 1.0}).rewards
    for name, weight in zip("ab", weights, strict=True):
        torch.testing.assert_close(changed[name], weight * terms[name])
    alone = outcomes.spread_weights(rollouts, CONTEXT, weights={"a": 2.0}, categories={"a": "effort"}).rewards
    torch.testing.assert_close(alone["a"], 2 * terms["a"])
    with pytest.raises(ConfigError, match="no reward 'c'"):
        outcomes.spread_weights(rollouts, CONTEXT, categories={"c": "effort"})


@pytest.mark.checks("rewards/bent", "TempSamp-R1")
def test_returns_are_compressed_above_the_threshold_and_stretched_below():
    rollouts = make_rollouts([2, 1, 1, 2, 1], [0] * 5, [1.0, 0.8, 0.5, 0.2, 0.0])
    paid = outcomes.bent(rollouts, CONTEXT)
    assert paid.row_return.tolist() == pytest.approx([0.8018, 0.8, 0.5964, 0.3215, 0.0868], abs=5e-5)
    assert not paid.rewards["bent"][0, 0].any(), "paid at the end"


@pytest.mark.checks("rewards/verified_steps", "VSRM")
def test_changes_of_the_chance_of_success_are_spread_over_the_four_chunks_before_them():
    """By the authors' rule: accuracies .25 .25 .75 .75 1; none; a loss before a small change; .3 after 5 zeros."""
    change = torch.zeros(4, 6)
    change[0, [1, 3]], change[2, [1, 2]], change[3, 5] = torch.tensor([0.5, 0.25]), torch.tensor([-0.5, 0.05]), 0.3
    spread = outcomes.spread_back(change, 1e-5, 0.7, 4)
    expected = [
        [0.35, 0.5, 0.175, 0.25, 0.0, 0.0],
        [0.0] * 6,
        [-0.35, -0.5, 0.05, 0.0, 0.0, 0.0],
        [0.0, 0.3 * 0.2401, 0.3 * 0.343, 0.3 * 0.49, 0.21, 0.3],
    ]
    torch.testing.assert_close(spread, torch.tensor(expected))
    noisy = torch.tensor([[0.02, -0.03, 0.4, 0.02]])
    assert outcomes.spread_back(noisy, 0.1, 0.5, 4).tolist() == [pytest.approx([0.1, 0.2, 0.4, 0.02])]


@pytest.mark.checks("rewards/verified_steps")
def test_completions_are_the_episodes_that_branch_off():
    """Two of four leaves succeed; they share the branch at the second chunk, of which the first shares nothing."""
    rollouts = make_rollouts(
        [3, 3, 3, 3], [0] * 4, [0.0, 0.0, 1.0, 1.0], parent=[-1, 0, 0, 2], branch_decision=[-1, 2, 1, 2]
    )
    paid = outcomes.verified_steps(rollouts, CONTEXT).rewards["verified"]
    # p: 1/2 at the start and after the first chunk, then 0 or 1 by the branch
    assert paid[0].sum(-1).tolist() == pytest.approx([-0.35, -0.5, 0.0])
    assert paid[3].sum(-1).tolist() == pytest.approx([0.35, 0.5, 0.0])
    assert not paid[..., 0].any(), "at the last step of a chunk"


@pytest.mark.checks("rewards/verified_steps")
def test_values_may_stand_for_completions():
    rollouts = make_rollouts([2, 3], [0, 0], [1.0, 0.0])
    v = torch.tensor([[0.4, 0.9, 0.0], [0.5, 0.5, 0.2]])
    paid = outcomes.verified_steps(rollouts.with_extras(v=v), CONTEXT, by="values").rewards["verified"]
    assert paid[0].sum(-1).tolist() == pytest.approx([0.5, 0.1, 0.0])
    assert paid[1].sum(-1).tolist() == pytest.approx([-0.21, -0.3, -0.2])
    with pytest.raises(ConfigError, match="models=\\[q_ensemble\\]"):
        outcomes.verified_steps(rollouts, CONTEXT, by="values")
    with pytest.raises(ConfigError, match=r"verified_steps\.by=tries"):
        outcomes.verified_steps(rollouts, CONTEXT, by="tries")
