"""APPO: where branches begin, how roots and branches share their credit, and the policy before the last update."""

import math

import pytest
import torch
from made_rollouts import make_rollouts

from robopolicy.core.errors import ConfigError
from robopolicy.rl.algorithm import build_algorithm
from robopolicy.rl.configuration import AlgorithmConfig
from robopolicy.rl.context import Context
from robopolicy.rl.experimental.procedures import (
    Procedures,
    branching_scores,
    later_gains,
    procedure_scale,
    procedures,
)

CONTEXT = Context(torch.Generator())


@pytest.mark.checks("models/past_policy", "APPO")
def test_what_is_uncertain_and_likelier_afterwards_is_branched_at():
    """z(H) -1 -.333 1.667 -.333, z(V) -.447 .447 1.342 -1.342; a fifth chunk, which was not played, does not count."""
    uncertainty = torch.tensor([[0.2, 0.4, 1.0, 0.4, 9.0]])
    gain = torch.tensor([[1.0, 1.1, 1.2, 0.9, 9.0]])
    played = torch.tensor([[True, True, True, True, False]])
    torch.testing.assert_close(
        branching_scores(uncertainty, gain, played), torch.tensor([[0.0, 0.0, 2.236, 0.0, 0.0]]), atol=1e-3, rtol=0
    )
    alike = branching_scores(uncertainty, torch.ones(1, 5), played)
    assert not alike.any(), "without an update nothing became likelier"


@pytest.mark.checks("models/past_policy", "APPO")
def test_gains_are_of_all_later_steps():
    """Steps .1 .2 | -.05 0, half-life 64: exp F 1.2826 at the first chunk, as in the coefficient, .9512 at the next."""
    change = torch.tensor([[[0.1, 0.2], [-0.05, 0.0]]])
    mask = torch.ones(1, 2, 2, dtype=torch.bool)
    torch.testing.assert_close(
        later_gains(change, mask, 64.0, 0.5), torch.tensor([[1.2826, 0.9512]]), atol=1e-4, rtol=0
    )
    assert later_gains(change, mask, 64.0, 0.2)[0, 0] == pytest.approx(1.2), "within the bound"
    mask[0, 0, 1] = False  # not sampled: it neither counts nor discounts
    assert later_gains(change, mask, 1.0, 0.5)[0, 0] == pytest.approx(math.exp(0.1 - 0.05 / 2))


@pytest.mark.checks("allocator/procedures", "APPO")
def test_half_of_a_group_branches_off_after_the_best_chunks_of_the_other_half():
    allocator = Procedures()
    assert allocator.plan([0.5, 0.5], 4) == [2, 2]
    rollouts = make_rollouts([4, 3, 4, 4], [0, 0, 1, 1])
    scores = torch.zeros(4, 4)
    scores[0, 1], scores[1, 0], scores[0, 0], scores[1, 2] = 2.0, 3.0, 1.0, 9.0  # the last ends its episode
    scores[3, 2] = 0.5
    places = allocator.continuations(rollouts, scores, 0, CONTEXT)
    assert places == [(1, 1), (0, 2), (3, 3), (2, 0)], "of the second group one begins at the initial state"
    assert allocator.continuations(rollouts, scores, 1, CONTEXT) == []
    assert allocator.continuations(rollouts, None, 0, CONTEXT) == [(0, 0), (0, 0), (2, 0), (2, 0)]


def grown():
    """Row 3 branches off row 0 before chunk 2, row 4 before chunk 1, row 5 off row 1 before chunk 1; row 6 begins anew.

    Returns: roots 1, 0, 0, 1, branches 1, 0, 1.
    """
    rollouts = make_rollouts(
        [4, 3, 4, 4, 4, 3, 2], [0] * 7, [1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0],
        parent=[-1, -1, -1, 0, 0, 1, 0], branch_decision=[-1, -1, -1, 2, 1, 1, 0],
    )  # fmt: skip
    for row, first in ((3, 2), (4, 1), (5, 1)):
        rollouts.mask[row, :first] = False
    return rollouts


@pytest.mark.checks("advantage/procedures", "APPO")
def test_roots_and_branches_are_normalised_apart_and_shared_chunks_get_both():
    """Roots 1 0 0 1: A 1 -1 -1 1. Branches 1 0 1: mean 2/3, deviation .4714: A .7071 -1.4142 .7071."""
    advantage, keep = procedures(grown(), CONTEXT)
    assert keep.tolist() == [True, True, True, False, False, False, True]
    first = 1 + (0.7071 - 1.4142) / 2  # before both splits
    expected = [[first, 1.7071, 1, 1], [-0.2929, -1, -1, 0], [-1, -1, -1, -1], [1, 1, 0, 0]]
    torch.testing.assert_close(advantage[keep], torch.tensor(expected), atol=1e-3, rtol=0)
    prepared = build_algorithm(AlgorithmConfig("grpo", advantage="procedures")).prepare(grown(), CONTEXT)
    torch.testing.assert_close(prepared.extras["advantage"][..., 0], torch.tensor(expected), atol=1e-3, rtol=0)
    assert prepared.group.tolist() == [0] * 4 and prepared.mask.any(-1).sum(1).tolist() == [4, 3, 4, 2]


@pytest.mark.checks("rewards/procedure_scale", "APPO")
def test_rewards_before_a_split_are_scaled_by_its_score():
    """Row 0 split after chunks 1 (score 2, the best) and 0 (1): chunk 0 (1 + .9 + 1 + .5) / 2, chunk 1 (2 + 1) / 2."""
    rollouts = grown()
    score = torch.zeros(7, 4)
    score[0, 1], score[0, 0], score[1, 0] = 2.0, 1.0, 0.5
    for reward in rollouts.rewards.values():
        reward[:] = 1.0
    scaled = procedure_scale(rollouts.with_extras(branching_score=score), CONTEXT).rewards["reward"][..., 0]
    torch.testing.assert_close(scaled[0], torch.tensor([1.7, 1.5, 1.0, 1.0]))
    torch.testing.assert_close(scaled[1], torch.tensor([1.25, 1.0, 1.0, 1.0]))
    assert (scaled[2:] == 1).all(), "branches and roots without any stay"
    plain = rollouts.with_extras(branching_score=torch.zeros(7, 4))
    assert procedure_scale(plain, CONTEXT) is plain


@pytest.mark.parametrize("share", [0.0, 1.5])
def test_no_more_than_a_group_can_be_roots(share):
    with pytest.raises(ConfigError, match="above 0 and at most 1"):
        Procedures(share=share)
