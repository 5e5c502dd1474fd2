"""Second attempts with help: who gets how many, which rows stay, and what is learned from them."""

import numpy as np
import pytest
import torch
from made_rollouts import make_rollouts, make_scored

from robopolicy.rl.advantages.group import grpo
from robopolicy.rl.coefficients import clipped
from robopolicy.rl.context import Context
from robopolicy.rl.experimental.retry import (
    RetryByDifficulty,
    RetryState,
    RetryWording,
    helped_bonus,
    helped_successes,
    icpo,
    plain_rows,
)
from robopolicy.training.demonstrations import reached_share

EARLY, LATE = (Context(torch.Generator(), iteration=iteration, iterations=10) for iteration in (2, 8))
RATE, SIZES = np.array([0.0, 0.25, 1.0]), np.array([8, 8, 8])


def planned(allocator, predicted=RATE):
    allocator.plan(predicted, 8)
    return allocator


def with_help(returns: list[float], helped: list[int], group: list[int] | None = None, **options):
    rollouts = make_rollouts([1] * len(returns), group or [0] * len(returns), returns, **options)
    return rollouts.with_extras(helped=torch.tensor(helped).bool()[:, None].expand(rollouts.shape))


@pytest.mark.checks("allocator/retry_wording", "allocator/retry_state", "allocator/retry_by_difficulty", "CLPO")
def test_who_gets_how_many_episodes_with_help():
    assert planned(RetryWording()).helped(RATE, SIZES, EARLY) == [8, 0, 0], "Guide-GRPO: where all failed"
    nurl = planned(RetryWording(count=7, after=0.5))
    assert nurl.helped(RATE, SIZES, EARLY) == [0, 0, 0] and nurl.helped(RATE, SIZES, LATE) == [7, 0, 0]
    assert planned(RetryState(per_failure=True, rate=1.0)).helped(RATE, SIZES, EARLY) == [8, 6, 0], "each failure again"
    clpo = planned(RetryByDifficulty())
    assert clpo.helped(RATE, SIZES, EARLY) == [8, 8, 0], "CLPO: hard and middling ones"
    assert clpo.depths(np.array([0.0, 0.3, 0.31, 0.7])) == [0.5, 0.5, 0.0, 0.0], "hard ones are eased, others vary"
    assert planned(RetryWording()).depths(RATE) == [0.0] * 3 and planned(RetryState()).depths(RATE) == [0.5] * 3
    assert planned(RetryWording(rate=1.0, count=1)).helped(RATE, SIZES, EARLY) == [1, 1, 1], "ICPO: one of each group"


@pytest.mark.checks("allocator/retry_state", "Agent-RLVR")
def test_a_failure_is_followed_along_the_demonstration():
    """States 0 to 3, with a deviation of 1.118: within half of that of 0 and 1, far from all, and back again."""
    demonstration = np.array([[0.0, 7.0], [1.0, 7.0], [2.0, 7.0], [3.0, 7.0]])
    assert reached_share(np.array([[0.1, 0.0], [1.5, 0.0]]), demonstration) == 0.5
    assert reached_share(np.array([[0.1, 0.0], [1.4, 9.0], [0.0, 0.0]]), demonstration) == 0.25
    assert reached_share(np.array([[-5.0, 0.0]]), demonstration) == 0.0
    assert reached_share(np.array([[1.4, 0.0]]), demonstration, within=0.1) == 0.0


@pytest.mark.checks("ADHint")
def test_harder_starts_get_a_larger_share_of_help():
    allocator = RetryState(mix=True)
    assert allocator.plan(np.array([0.25, 1.0, 0.0]), 8) == [3, 7, 2]  # w = .625, .1 and .8
    assert allocator.helped(RATE, np.array([3, 7, 2]), EARLY) == [5, 1, 6]


@pytest.mark.checks("selection/plain_rows", "NuRL")
def test_one_plain_failure_stays_beside_those_with_help():
    """G = 4: the plain ones all fail; of the helped ones, as many as make up the group, two of three succeed."""
    returns, helped = [0.0] * 4 + [1.0, 1.0, 0.0, 1.0], [0] * 4 + [1] * 4
    rollouts = with_help([*returns, 0.0, 1.0], [*helped, 0, 0], [0] * 8 + [1, 1])
    kept = plain_rows(rollouts, EARLY)
    assert kept.tolist() == [True, False, False, False, True, True, True, False, True, True]
    advantages = grpo(rollouts.take(kept.nonzero().squeeze(1)[:4]), EARLY)[:, 0]
    assert advantages.tolist() == pytest.approx([-1.0, 1.0, 1.0, -1.0], abs=1e-5)
    assert plain_rows(make_rollouts([1, 1], [0, 0]), EARLY).all(), "without help all stay"


@pytest.mark.checks("selection/helped_successes", "ICPO")
def test_a_helped_failure_is_rejected_and_leaves_the_groups_baseline():
    """G = 4 + 2: the plain ones fail but one; with both helped ones the mean would be 2/6, without the failure 2/5."""
    rollouts = with_help([0.0, 0.0, 0.0, 1.0, 1.0, 0.0], [0, 0, 0, 0, 1, 1], [0] * 6)
    kept = helped_successes(rollouts, EARLY)
    assert kept.tolist() == [True] * 5 + [False]
    spread = (0.4 * 0.6) ** 0.5
    advantages = grpo(rollouts.take(kept.nonzero().squeeze(1)), EARLY)[:, 0]
    assert advantages.tolist() == pytest.approx([-0.4 / spread] * 3 + [0.6 / spread] * 2, abs=1e-4)
    assert helped_successes(make_rollouts([1, 1], [0, 0], [0.0, 1.0]), EARLY).all(), "without help all stay"


@pytest.mark.checks("Guide-GRPO")
def test_the_ratio_is_to_the_policy_with_help():
    """pi_old(helped) = .5, pi(plain) = .2: the ratio .4 learns a success and is clipped for a failure."""
    rollouts = with_help([1.0, 0.0], [1, 1], steps=1)
    rollouts.logp_behaviour[:] = np.log(0.5)
    logp = torch.full((2, 1, 1), np.log(0.2), dtype=torch.float64)
    c, _ = clipped(make_scored(rollouts, logp, torch.tensor([1.0, -1.0]).double()[:, None, None]))
    assert c.flatten().tolist() == pytest.approx([0.4, 0.0])


@pytest.mark.checks("coefficient/icpo")
def test_icpo_learns_most_from_unlikely_tokens_of_helped_episodes():
    probability, advantage = torch.tensor([0.5, 0.05, 0.9, 0.5]).double(), torch.tensor([1.0, 1.0, -1.0, 1.0]).double()
    rollouts = with_help([1.0] * 4, [1, 1, 1, 0], steps=1)
    logp = probability.log()[:, None, None].requires_grad_()
    rollouts.logp_behaviour[:] = logp.detach() - 0.1
    c, _ = icpo(make_scored(rollouts, logp, advantage[:, None, None]), gamma=0.1)
    assert c.flatten().tolist() == pytest.approx([0.1389, 0.2222, -0.09, float(np.exp(0.1))], abs=1e-4)
    u = logp[:3].exp()
    (expected,) = torch.autograd.grad((advantage[:3, None, None] * u / (u + 0.1)).sum(), logp)
    torch.testing.assert_close(c[:3], expected[:3])


@pytest.mark.checks("rewards/helped_bonus")
def test_successes_with_help_are_paid_more_at_first():
    rollouts = with_help([1.0, 1.0, 0.0], [1, 0, 1])
    for iteration, paid in ((0, 2.0), (100, 1.75), (400, 1.0), (500, 1.0)):
        context = Context(torch.Generator(), iteration=iteration, iterations=1000)
        assert helped_bonus(rollouts, context).row_return.tolist() == pytest.approx([paid, 1.0, 0.0])


@pytest.mark.checks("TriMPI/PolicyRollout")
def test_episodes_under_the_policys_text_share_the_baseline_of_those_without_it():
    """Plain 1 0 0 0, aware 1 1 1 0: mean .5, deviation .5; alone the plain ones would get 1.7321 and -.5774."""
    allocator = planned(RetryWording(rate=1.0, together=True, from_plain=True))
    assert allocator.helped(RATE, SIZES, EARLY) == [8, 8, 8] and allocator.forget, "every group, and without the text"
    rollouts = with_help([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0], [0] * 4 + [1] * 4)
    assert grpo(rollouts, EARLY)[:, 0].tolist() == pytest.approx([1, -1, -1, -1, 1, 1, 1, -1], abs=1e-5)
    alone = grpo(rollouts.take(torch.arange(4)), EARLY)[:, 0]
    assert alone.tolist() == pytest.approx([1.7321, *[-0.5774] * 3], abs=1e-4)
