"""Branches where a policy becomes uncertain: the papers' rules by hand, and trees that they grow."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from test_episode_player import StatePolicy, play

from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import Decision, Scores
from robopolicy.core.randomness import episode_seeds
from robopolicy.core.spec import STATE
from robopolicy.rl.branch_rules import Aepo, Arpo, Latr, has_fork, uncertainty
from robopolicy.rl.episodes import Branching, groups_of


@pytest.mark.checks("ARPO")
@pytest.mark.parametrize(("draw", "rise", "splits"), [(0.55, 0.3, True), (0.55, 0.2, False), (0.45, -0.3, False)])
def test_arpo_splits_where_entropy_has_risen(draw: float, rise: float, splits: bool):
    assert Arpo().splits([0.4, 0.9, 0.4 + rise], 0, draw) is splits
    assert Arpo().first_roots(16) == 8


@pytest.mark.checks("AEPO")
def test_aepo_shares_episodes_between_roots_and_branches_and_splits_less_in_a_row():
    rule = Aepo()
    assert 1 + rule.more_roots(16, [0.8, 0.2, 0.4]) == 10 and 1 + rule.more_roots(16, [0.3, 0.7, 0.9]) == 6
    assert rule.more_roots(16, [0.5]) == 7, "an episode of one chunk says nothing"
    # (draw + .2 rise) (1 - .05 in a row) against .5: .5 .475 | .49 | .51 .4845 | .5 | 0 for a negative one
    assert rule.splits([0.4, 0.7], 0, 0.44) and not rule.splits([0.4, 0.7], 1, 0.44)
    assert not rule.splits([0.4, 0.4], 0, 0.49)
    assert rule.splits([0.4, 0.7], 0, 0.45) and not rule.splits([0.4, 0.7], 1, 0.45)
    assert rule.splits([2.4, 0.4], 0, 0.9)
    assert not rule.splits([1.0, 0.0], 0, 0.1) and not rule.splits([0.4, 0.9], 20, 0.99)


@dataclass(frozen=True)
class Fixed(Arpo):
    """Splits at every chunk, or at none."""

    always: bool = True

    def splits(self, levels, in_a_row, draw) -> bool:
        return self.always


def grown(rule, sizes=(6, 4)):
    requests = groups_of(episode_seeds(0, "x", len(sizes)), list(sizes))
    return play(3, requests, noise=0.3, branching=Branching(rule=rule))


@pytest.mark.checks("ARPO")
def test_half_of_a_group_branches_off_the_other_half():
    rollouts, player = grown(Fixed())
    assert rollouts.group.tolist().count(0) == 6 and rollouts.group.tolist().count(1) == 4 and not player.unfinished
    for group, roots in ((0, 3), (1, 2)):
        assert int((rollouts.parent[rollouts.group == group] < 0).sum()) == roots
    for row in (rollouts.parent >= 0).nonzero().squeeze(1).tolist():
        parent, at = int(rollouts.parent[row]), int(rollouts.branch_decision[row])
        assert at >= 1 and rollouts.group[parent] == rollouts.group[row]
        torch.testing.assert_close(rollouts.actions[row, :at], rollouts.actions[parent, :at], rtol=0, atol=0)
        assert not rollouts.mask[row, :at].any() and rollouts.mask[row, at].any()
        assert torch.equal(rollouts.observation[STATE][row, at], rollouts.observation[STATE][parent, at])
        assert not torch.equal(rollouts.actions[row, at], rollouts.actions[parent, at])


@pytest.mark.checks("ARPO", "AEPO")
def test_what_has_not_branched_begins_at_the_initial_state():
    rollouts, _ = grown(Fixed(always=False))
    assert rollouts.group.tolist().count(0) == 6 and bool((rollouts.parent < 0).all())
    measured, _ = grown(replace(Aepo(), threshold=0.0))  # splits wherever it may
    first = measured.group.tolist().index(0)
    assert not (measured.parent == first).any(), "the first episode is measured alone"
    assert measured.group.tolist().count(0) == 6 and bool((measured.parent >= 0).any())


def test_a_rule_needs_complete_groups():
    requests = groups_of([1, 2], 2)
    with pytest.raises(ConfigError, match="set overprovision=0"):
        play(2, requests, branching=Branching(rule=Arpo()), groups=1)


@pytest.mark.checks("ARPO")
def test_uncertainty_is_entropy_of_tokens_and_spread_of_denoised_chunks():
    class Tokens:
        spec = type("Spec", (), {"categorical": True, "scored_steps": 30})

        def act(self, observation, generator, *, deterministic=False):
            raise AssertionError

        def log_prob(self, observation, latents) -> Scores:
            probabilities = torch.tensor([[0.5, 0.25, 0.25]]).expand(2, 30, 3).clone()
            probabilities[1, 20:] = torch.tensor([1.0, 0.0, 0.0])  # behind the tokens that count
            entropy = -(probabilities * probabilities.clamp(min=1e-9).log()).sum(-1)
            return Scores(entropy, entropy, {"log_probabilities": probabilities.log()})

        def reset(self, rows=None) -> None: ...

    decision = Decision(torch.zeros(2, 1, 1), {}, torch.zeros(2, 30), torch.ones(2, 30, dtype=torch.bool))
    levels = uncertainty(Tokens(), {}, decision, torch.Generator())  # type: ignore[arg-type]
    assert levels.tolist() == pytest.approx([1.5 * math.log(2) / math.log(3)] * 2)
    _, player = play(2, groups_of([1, 2], 1))
    policy: StatePolicy = player.policy  # type: ignore[assignment]
    observation, draws = {STATE: torch.zeros(2000, 1, 8)}, torch.Generator().manual_seed(0)
    observation[STATE] = torch.zeros(2000, 1, policy.spec.observation[STATE].shape[0])
    for noise in (0.0, 0.2):
        policy.noise = noise
        decision = policy.act(observation, draws)
        spread = uncertainty(policy, observation, decision, draws)
        # Of four draws: the deviation of a sample is a little below that of its population.
        assert float(np.mean(spread)) == pytest.approx(0.921 * noise, abs=2e-3)


@pytest.mark.checks("LATR")
def test_latr_splits_where_another_token_is_likely_and_near():
    probabilities = torch.tensor([[0.5, 0.3, 0.2], [0.6, 0.2, 0.2], [0.9, 0.08, 0.02], [0.35, 0.33, 0.32]])
    assert has_fork(probabilities.log()).tolist() == [True, False, False, True]
    rule = Latr()
    assert [rule.share_of_group(version) for version in (0, 99, 100, 250, 900)] == [1.0, 1.0, 0.75, 0.5, 0.25]
    assert rule.splits([0.0, 2.0], 0, 0.9) and not rule.splits([2.0, 0.0], 0, 0.1)


@dataclass(frozen=True)
class Looking(Fixed):
    """Splits at every chunk, and looks ahead."""

    lookahead: tuple[int, ...] = (2,)
    alike: float = 0.25
    part: float = 1.0

    def first_roots(self, size) -> int:
        return 1

    def share_of_group(self, version) -> float:
        return self.part


@pytest.mark.checks("LATR")
def test_branches_that_stay_like_their_parents_are_dropped():
    requests = groups_of(episode_seeds(0, "x", 1), 6)
    same, player = play(3, requests, noise=0.0, branching=Branching(rule=Looking()))
    lengths = same.alive.sum(1).tolist()
    assert len(same.group) == 6 and not player.unfinished
    # Without noise a branch repeats its parent: only those that ended within two chunks of the split are left.
    for row in (same.parent >= 0).nonzero().squeeze(1).tolist():
        assert lengths[row] - int(same.branch_decision[row]) <= 2
    apart, _ = play(3, requests, noise=3.0, branching=Branching(rule=replace(Looking(), alike=1e-6)))
    assert len(apart.group) == 6 and int((apart.parent >= 0).sum()) == 5, "none is so alike"
    assert bool((apart.alive & apart.mask.any(-1)).any(1).all())


@pytest.mark.checks("LATR")
def test_a_branch_alone_with_its_parent_is_compared_in_units_of_all_states_so_far():
    # In units of the two rows that run, any two states are two deviations apart.
    rollouts, _ = play(2, groups_of(episode_seeds(0, "x", 1), 6), noise=1e-3, branching=Branching(rule=Looking()))
    lengths = rollouts.alive.sum(1).tolist()
    assert len(rollouts.group) == 6
    for row in (rollouts.parent >= 0).nonzero().squeeze(1).tolist():
        assert lengths[row] - int(rollouts.branch_decision[row]) <= 2


@pytest.mark.checks("LATR")
@pytest.mark.parametrize(("part", "branches"), [(1.0, 7), (0.75, 5), (0.5, 3), (0.25, 1), (0.1, 0), (0.0, 0)])
def test_the_rest_of_a_group_is_no_part_of_its_tree(part: float, branches: int):
    rule = replace(Looking(), part=part, alike=0.0)
    rollouts, _ = play(8, groups_of(episode_seeds(0, "x", 2), 8), noise=0.5, branching=Branching(rule=rule))
    for group in (0, 1):
        rows = rollouts.group == group
        assert int(rows.sum()) == 8 and int((rollouts.parent[rows] >= 0).sum()) == branches
        # Whoever has branches, itself or through them, began as the tree's root.
        roots = {int(row) for row in rollouts.parent[rows] if row >= 0 and rollouts.parent[row] < 0}
        assert len(roots) == (1 if branches else 0)
