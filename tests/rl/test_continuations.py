"""Episodes that continue others: what they share, where a tree search goes on, and where a teacher corrects."""

import numpy as np
import pytest
import torch
from made_rollouts import make_rollouts
from test_episode_player import StatePolicy

from robopolicy.core.errors import ConfigError
from robopolicy.core.spec import STATE
from robopolicy.rl.context import Context
from robopolicy.rl.episodes import EpisodePlayer, groups_of
from robopolicy.rl.experimental.continuations import Correct, Prefixes, TreeSearch, upper_bound, upper_confidence
from sims.registry import make_world

CONTEXT = Context(torch.Generator())


def test_added_episodes_begin_in_the_states_of_those_that_they_continue():
    """Row 4 continues row 0 from chunk 2, row 5 row 4 from chunk 3, row 6 row 5 from chunk 1, which row 0 played."""
    world = make_world("reach_planar", 3)
    player = EpisodePlayer(world, StatePolicy(world.spec, 0.5))
    asked = []

    def grow(rollouts):
        asked.append(len(rollouts.group))
        return [[(0, 2), (2, 1)], [(4, 3)], [(6, 1)], []][len(asked) - 1]

    rollouts = player.play(groups_of([5, 6], 2), torch.Generator().manual_seed(0), grow=grow)
    assert asked == [4, 6, 7, 8] and player.states is None and player.unfinished == 0
    assert rollouts.parent.tolist() == [-1] * 4 + [0, 2, 4, 0]
    assert rollouts.branch_decision.tolist() == [-1] * 4 + [2, 1, 3, 1]
    assert rollouts.group.tolist() == [0, 0, 1, 1, 0, 1, 0, 0]
    for row in range(4, 8):
        parent, chunk = int(rollouts.parent[row]), int(rollouts.branch_decision[row])
        for tensor in (rollouts.actions, rollouts.observation[STATE], rollouts.rewards["progress"]):
            assert torch.equal(tensor[row, :chunk], tensor[parent, :chunk])
        assert torch.equal(rollouts.observation[STATE][row, chunk], rollouts.observation[STATE][parent, chunk])
        assert not torch.equal(rollouts.actions[row, chunk], rollouts.actions[parent, chunk])
        assert not rollouts.mask[row, :chunk].any() and rollouts.mask[row, chunk].all()
        paid = rollouts.rewards["progress"][row].sum()
        last = int(rollouts.alive[row].sum()) - 1
        torch.testing.assert_close(rollouts.extras["episode_return"][row, last], paid, msg="the return goes on")
    plain = player.play(groups_of([5, 6], 2), torch.Generator().manual_seed(0))
    assert torch.equal(plain.actions, rollouts.actions[:4, : plain.shape[1]]), "what is played first does not change"


@pytest.mark.checks("allocator/tree_search", "MCTS-DPO")
def test_the_search_descends_by_the_upper_bound():
    assert upper_bound(0.4, 2, 0.3, 8, 1.5) == pytest.approx(0.8243, abs=1e-4)


def tree(success: list[float], **changes):
    """Rows 0 and 1 are roots, row 2 branches off row 0 at chunk 1, row 3 off row 2 at chunk 2; all have 4 chunks."""
    rollouts = make_rollouts(
        [4] * 4, [0] * 4, success, parent=[-1, -1, 0, 2], branch_decision=[-1, -1, 1, 2], **changes
    )
    for row, first in ((2, 1), (3, 2)):
        rollouts.mask[row, :first] = False
    rollouts.logp_behaviour[:] = -1.0
    return rollouts


@pytest.mark.checks("allocator/tree_search", "MCTS-DPO")
def test_a_round_adds_an_episode_where_the_bound_leads():
    """At the root rows 0, 2, 3 pass the first child (n 3), row 1 the second (n 1); N = 4, p = 1/2, w = 1.5."""
    search = TreeSearch(rounds=1)
    # Q 1/3 and 1: .333 + .375 against 1 + .75: below row 1 its first state has one child
    assert search.continuations(tree([1.0, 1.0, 0.0, 0.0]), None, 0, CONTEXT) == [(1, 1)]
    # Q 1 and 0: 1.375 against .75: below row 0 the state before chunk 1 has both children, rows 0 (n 1) and 2, 3 (n 2);
    # .5 exploration p sqrt(3): 1 + .65 against 1 + .43: before chunk 2 of row 0
    assert search.continuations(tree([1.0, 0.0, 1.0, 1.0]), None, 0, CONTEXT) == [(0, 2)]
    # Q of row 0 alone 0: down to rows 2 and 3, which are both there before chunk 2: of equals the first
    assert search.continuations(tree([0.0, 0.0, 1.0, 1.0]), None, 0, CONTEXT) == [(2, 3)]
    assert search.continuations(tree([1.0, 1.0, 0.0, 0.0]), None, 1, CONTEXT) == [], "after the last round"


@pytest.mark.checks("allocator/tree_search", "rStar-Math")
def test_the_search_descends_by_upper_confidence_and_by_scores_of_chunks():
    """Q .5, -1, 1 with 4, 1 and 3 visits of 8: the third. Then Q of rows 0, 2, 3 is -1/3 at the root, of row 1 1."""
    bounds = [upper_confidence(value, visits, 8, 2.0) for value, visits in ((0.5, 4), (-1.0, 1), (1.0, 3))]
    assert bounds == pytest.approx([1.942, 1.8841, 2.6651], abs=1e-4)
    rollouts = tree([1.0, 1.0, 0.0, 0.0])
    search = TreeSearch(bound="uct", exploration=0.5, guided=3.0)
    later = Context(torch.Generator(), iteration=1, iterations=4)
    assert TreeSearch(bound="uct", exploration=0.5).continuations(rollouts, None, 0, later) == [(1, 1)]
    score = torch.zeros(4, 4)
    score[1, 0] = -1.0  # (3 * -1 + 1) / 4 + .589 = .089 against (3 * 1 - 1) / 6 + .340 = .673
    score[0, 0] = 1.0
    # below, before chunk 1: row 0, whose success counts 1, (3 * -1 + 1) / 4, and rows 2 and 3, (3 * 1 - 2) / 5
    score[0, 1], score[2, 1] = -1.0, 1.0
    assert search.continuations(rollouts, score, 0, later) == [(2, 3)]
    score[0, 1], score[2, 1] = 1.0, -1.0
    assert search.continuations(rollouts, score, 0, later) == [(0, 2)]
    assert search.continuations(rollouts, None, 0, CONTEXT) == [(1, 1)], "before the model has learned"
    with pytest.raises(ConfigError, match=r"models=\[step_preference\]"):
        search.continuations(rollouts, None, 0, later)


@pytest.mark.checks("allocator/tree_search")
def test_a_search_stays_within_its_depth_and_passes_what_is_full():
    """With depth 1 the state before chunk 1 of rows 0, 2, 3 is full, and below it nothing is added."""
    success = [1.0, 0.0, 1.0, 1.0]
    assert TreeSearch(depth=1).continuations(tree(success), None, 0, CONTEXT) == [(1, 1)]
    full = make_rollouts([1, 1], [0, 0], [1.0, 0.0])
    assert TreeSearch().continuations(full, None, 0, CONTEXT) == [], "episodes of one chunk have no inner state"


@pytest.mark.checks("iTool/iRFT")
def test_the_variant_searches_where_the_policy_fails():
    """Of two groups the first always succeeds from its root; episodes that the search added do not count."""
    rollouts = make_rollouts([3] * 5, [0, 0, 1, 1, 1], [1.0, 1.0, 1.0, 0.0, 1.0], parent=[-1] * 4 + [3])
    rollouts.branch_decision[4] = 1
    places = TreeSearch(rate=0.5).continuations(rollouts, None, 0, CONTEXT)
    assert [rollouts.group[row] for row, _ in places] == [1]
    assert len(TreeSearch().continuations(rollouts, None, 0, CONTEXT)) == 2


@pytest.mark.checks("allocator/correct", "SCOPE-stepwise")
def test_a_teacher_goes_on_from_the_first_fall_of_the_value():
    """V .6 .6 .3 .2: the second decision led from .6 to .3. The success is not corrected."""
    rollouts = make_rollouts([4, 4, 4, 4], [0] * 4, [0.0, 1.0, 0.0, 0.0])
    values = torch.tensor([[0.6, 0.6, 0.3, 0.2], [0.6, 0.1, 0.1, 0.1], [0.5, 0.5, 0.5, 0.1], [0.1, 0.1, 0.1, 0.1]])
    assert Correct(share=1.0).continuations(rollouts, values, 0, CONTEXT) == [(0, 1), (2, 2)]
    assert Correct().continuations(rollouts, values, 0, CONTEXT) == [(2, 2)], "a quarter, the longest beginning first"
    assert Correct(share=0.2).continuations(rollouts, values, 0, CONTEXT) == []
    assert Correct(share=1.0, drop=0.35).continuations(rollouts, values, 0, CONTEXT) == [(2, 2)]
    assert Correct().continuations(rollouts, values, 1, CONTEXT) == [], "corrections are not corrected again"
    assert Correct().continuations(rollouts, None, 0, CONTEXT) == [], "before there are values"


@pytest.mark.checks("allocator/prefixes", "TRACE")
def test_one_budget_is_divided_between_initial_states_and_prefixes():
    """Row 0 failed, row 1 succeeded, each alone in its group; 4 episodes in all, half of them played.

    Chance that one more ends differently: failures V, successes 1 - V. A second from the same state adds V (1 - V).
    """
    rollouts = make_rollouts([3, 3], [0, 1], [0.0, 1.0])
    values = torch.tensor([[0.5, 0.8, 0.1], [0.9, 0.6, 0.95]])
    allocator = Prefixes(rounds=1)
    assert allocator.plan(np.array([0.5, 0.9]), 2) == [1, 1]
    assert allocator.continuations(rollouts, values, 0, CONTEXT) == [(0, 1), (0, 0)], ".8, then .5 before .4 and .16"
    assert allocator.continuations(rollouts, values, 1, CONTEXT) == [], "after the last round"
    allocator.budget = 6
    assert allocator.continuations(rollouts, values, 0, CONTEXT) == [(0, 1), (0, 0), (1, 1), (0, 0)], ".25 before .24"
    narrow = Prefixes(rounds=1, most=2)
    narrow.plan(np.array([0.5, 0.9]), 2)
    assert narrow.continuations(rollouts, values, 0, CONTEXT) == [(0, 1), (1, 1)], "one more for each initial state"
    assert allocator.continuations(rollouts, None, 0, CONTEXT)[0][1] == 0, "V 1/3 and 2/3: all are equal"
    halves = Prefixes(rounds=2)
    halves.plan(np.array([0.5, 0.9]), 2)
    assert halves.continuations(rollouts, values, 0, CONTEXT) == [(0, 1)]


@pytest.mark.checks("allocator/prefixes", "TRACE")
def test_states_with_both_outcomes_gain_nothing_more():
    """Row 2 branched off row 0 before chunk 1 and succeeded: chunks 0 and 1 have both outcomes, later ones do not."""
    rollouts = make_rollouts([3] * 3, [0] * 3, [0.0, 0.0, 1.0], parent=[-1, -1, 0], branch_decision=[-1, -1, 1])
    allocator = Prefixes(rounds=1)
    allocator.budget = 4
    values = torch.tensor([[1.0, 1.0, 0.2], [0.0, 0.3, 0.0], [0.0, 0.0, 0.6]])
    assert allocator.continuations(rollouts, values, 0, CONTEXT) == [(2, 2)], ".4 before .3 and .2"
    values[2, 2] = 0.9
    assert allocator.continuations(rollouts, values, 0, CONTEXT) == [(1, 1)]
