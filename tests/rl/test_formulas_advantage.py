"""Advantages by hand, by slow references, and against figures of the authors' published formulas."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from made_rollouts import make_rollouts

from robopolicy.core.errors import ConfigError, RobopolicyNote
from robopolicy.core.spec import STATE
from robopolicy.nn.normalizer import in_deviations
from robopolicy.rl.advantages import gae, group, step, tree
from robopolicy.rl.context import Context
from robopolicy.rl.experimental import advantages as experimental_advantages
from robopolicy.rl.experimental import rewards

CONTEXT = Context(torch.Generator(), discount=0.5)


def standardised(values: list[float]) -> np.ndarray:
    return (np.array(values) - np.mean(values)) / np.std(values)


def with_rewards(rollouts, table: list[list[list[float]]]):
    """The same rollouts, paid as in a table [B, T, C]."""
    return replace(rollouts, rewards={"reward": torch.tensor(table)})


@pytest.mark.checks("advantage/gae")
def test_gae_is_whitened_over_decisions_that_were_played():
    rollouts = make_rollouts([2, 1], [0, 1]).with_extras(advantage_gae=torch.tensor([[1.0, 4.0], [-2.0, 99.0]]))
    advantages = gae.gae_over_chunks(rollouts, CONTEXT)
    expected = standardised([1.0, 4.0, -2.0])
    assert advantages.flatten().tolist() == pytest.approx([*expected, 0.0], abs=1e-6)
    assert gae.gae_over_chunks(rollouts, CONTEXT, whiten=False).tolist() == [[1.0, 4.0], [-2.0, 0.0]]


@pytest.mark.checks("advantage/egae")
def test_truncated_windows_bootstrap_where_they_are_cut():
    """A window of three decisions: the first row is cut while its episode goes on, the second ends in it."""
    reward = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]], dtype=torch.float64)[..., None]
    values = torch.tensor([[0.5, 0.4, 0.2], [0.3, 0.6, 0.1]], dtype=torch.float64)
    cut = torch.tensor([[9.0, 9.0, 0.8], [9.0, 9.0, 0.7]], dtype=torch.float64)  # read in the last column alone
    ended = torch.tensor([[False, False, False], [True, False, False]])
    after = gae.next_values(values, cut, ended)
    estimate = gae.gae(reward, torch.ones_like(reward, dtype=torch.bool), values, after, ended, ended, 0.5, 0.5)
    # delta_t = r_t + .5 V(s_{t+1}) - V(s_t), the last with the value of the state at the cut; A_t sums (.25)^k delta.
    first = [0.5 * 0.4 - 0.5, 1 + 0.5 * 0.2 - 0.4, 0.5 * 0.8 - 0.2]
    second = [1.0 - 0.3, 0.5 * 0.1 - 0.6, 0.5 * 0.7 - 0.1]
    expected = [
        [first[0] + 0.25 * (first[1] + 0.25 * first[2]), first[1] + 0.25 * first[2], first[2]],
        [second[0], second[1] + 0.25 * second[2], second[2]],
    ]
    torch.testing.assert_close(estimate.advantages, torch.tensor(expected, dtype=torch.float64))
    rollouts = make_rollouts([3, 3], [0, 1]).with_extras(advantage_gae=estimate.advantages.float())
    assert experimental_advantages.egae(rollouts, CONTEXT).flatten().tolist() == pytest.approx(
        standardised([value for row in expected for value in row]), abs=1e-5
    )
    # The critic learns from what is known to the end alone: the second row's first decision.
    rollouts = replace(rollouts, terminated=ended)
    returns, known = gae.finished_returns(rollouts, reward.squeeze(-1), torch.full((2, 3), 0.5))
    assert known.tolist() == ended.tolist() and float(returns[1, 0]) == 1.0


BNPO = {
    "success": (
        [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]],
        [
            [0.210192, 0.210192, 0.210192, -0.630577],
            [0.733250, -0.244417, -0.244417, -0.244417],
            [0.387063, 0.387063, -0.387063, -0.387063],
            [0.210192, 0.210192, 0.210192, -0.630577],
        ],
    ),
    "reward": (
        [[0.5, 0.25, 0.0], [1.0, 0.5, 0.75], [0.5, 0.0, 0.25]],
        [[0.219508, 0.0, -0.219508], [0.246749, -0.246749, 0.0], [0.219508, -0.219508, 0.0]],
    ),
    "rates further apart than any Beta's": (
        [[1] * 9 + [0], [1] + [0] * 9],
        [[0.1] * 9 + [-0.9], [0.9] + [-0.1] * 9],
    ),
}


@pytest.mark.checks("advantage/bnpo")
@pytest.mark.parametrize("name", BNPO)
def test_bnpo_gives_the_figures_of_its_authors_formula(name: str):
    """Figures: the formula of github.com/changyi7231/BNPO at a9c51b9 (recipe/bnpo/src/bnpo_ray_trainer.py)."""
    rewards, published = BNPO[name]
    number = [index for index, group in enumerate(rewards) for _ in group]
    rollouts = make_rollouts([1] * len(number), number, [float(value) for row in rewards for value in row])
    advantages = experimental_advantages.bnpo(
        rollouts, CONTEXT, ranges={"reward": (0.0, 1.0)} if name == "reward" else None
    )[:, 0]
    assert advantages.tolist() == pytest.approx([value for row in published for value in row], abs=1e-5)


@pytest.mark.checks("advantage/bnpo")
def test_bnpo_normalises_each_of_several_rewards_by_itself():
    rewards, _ = BNPO["reward"]
    number = [0, 0, 0, 1, 1, 1, 2, 2, 2]
    flat = [value for row in rewards for value in row]
    rollouts = make_rollouts([2] * 9, number, flat)
    shift = torch.zeros(9, 2, 2)
    shift[:, 0, 0] = torch.tensor([10 - 4 * value for value in reversed(flat)])  # from 6 to 10, the other way round
    both = replace(rollouts, rewards={**rollouts.rewards, "time": shift})
    first = experimental_advantages.bnpo(both, CONTEXT, ranges={"reward": (0.0, 1.0)})
    second = experimental_advantages.bnpo(both, CONTEXT, ranges={"time": (6.0, 10.0)})
    advantages = experimental_advantages.bnpo(both, CONTEXT, ranges={"reward": (0.0, 1.0), "time": (6.0, 10.0)})
    torch.testing.assert_close(advantages, (first + second) / 2)
    alone = replace(rollouts, rewards={"reward": (shift - 6) / 4 * (shift > 0)})
    torch.testing.assert_close(second, experimental_advantages.bnpo(alone, CONTEXT, ranges={"reward": (0.0, 1.0)}))
    lonely = experimental_advantages.bnpo(rollouts.take(torch.arange(3)), CONTEXT, ranges={"reward": (0.0, 1.0)})
    assert lonely[:, 0].tolist() == pytest.approx([0.25, 0.0, -0.25])  # no Beta can be fitted to one group
    with pytest.raises(ConfigError, match=r"time.*6 to 10"):
        experimental_advantages.bnpo(both, CONTEXT, ranges={"time": (0.0, 1.0)})
    with pytest.raises(ConfigError, match=r"'rewards'.*Did you mean 'reward'"):
        experimental_advantages.bnpo(both, CONTEXT, ranges={"rewards": (0.0, 1.0)})


RISK = [-0.092155, -3.870493, -0.18431, -0.092155, -3.870493, -0.18431, -13.510114, -7.549772, -11.125977]


@pytest.mark.checks("advantage/risk_po")
def test_risk_po_gives_the_figures_of_its_authors_code():
    """Figures: core_algos.py of github.com/RTkenny/RiskPO, 65ec40c: bundles of 2, quantiles tracked at 1.2 and 1.8."""
    returns = [0.9, 0.1, 0.6, 0.8, 0.3, 1.0, 0.2, 0.7, 0.4]
    rollouts = make_rollouts([1] * 9, [0, 0, 0, 1, 1, 1, 2, 2, 2], returns, steps=1)
    advantages = experimental_advantages.risk_po(rollouts, replace(CONTEXT, memory={"risk_po": [1.2, 1.8]}), bundle=2)[
        :, 0
    ]
    assert advantages.tolist() == pytest.approx(RISK, abs=1e-4)
    # One sum a bundle has no spread to be divided by: (-.6 / .6 - 1.5 * .2 / .2) / 2.5.
    single = experimental_advantages.risk_po(
        make_rollouts([1], [0], [1.0]), replace(CONTEXT, memory={"risk_po": [1.2, 1.8]})
    )
    assert float(single[0, 0]) == pytest.approx(-1.0, abs=1e-4)


@pytest.mark.checks("advantage/gdpo")
def test_gdpo_equals_a_slow_reference():
    draws = np.random.default_rng(0)
    number = [0, 0, 0, 1, 1, 1, 1]
    paid = {name: draws.normal(scale=scale, size=7) for name, scale in (("place", 1.0), ("time", 100.0))}
    rollouts = make_rollouts([1] * 7, number, [0.0] * 7)
    terms = {name: torch.zeros(7, 1, 2) for name in paid}
    for name, value in paid.items():
        terms[name][:, 0, 0] = torch.tensor(value)
    total = np.zeros(7)
    for name, weight in (("place", 1.0), ("time", 0.5)):
        for key in (0, 1):
            members = [row for row in range(7) if number[row] == key]
            total[members] += weight * standardised([paid[name][row] for row in members])
    advantages = group.gdpo(replace(rollouts, rewards=terms), CONTEXT, weights={"time": 0.5})[:, 0]
    assert advantages.tolist() == pytest.approx(standardised(total.tolist()), abs=1e-4)
    with pytest.raises(ConfigError, match=r"weights: there is no reward 'tim'.*time"):
        group.gdpo(replace(rollouts, rewards=terms), CONTEXT, weights={"tim": 0.5})


@pytest.mark.checks("advantage/tree_po")
@pytest.mark.parametrize(
    ("by_size", "published"),
    [
        (False, [1.279177, -0.806438, 1.163309, -0.922305, -0.713744]),
        (True, [1.268943, -0.801862, 1.176907, -0.893897, -0.750092]),
    ],
)
def test_tree_po_gives_the_figures_of_its_authors_formula(by_size: bool, published: list[float]):
    """Figures: github.com/multimodal-art-projection/TreePO at f055523 (verl/trainer/ppo/core_algos.py)."""
    rollouts = make_rollouts(
        [3] * 5, [0] * 5, [1.0, 0.0, 1.0, 0.0, 0.0], parent=[-1, 0, -1, 2, 0], branch_decision=[-1, 2, -1, 2, 1]
    )
    advantages = tree.tree_po(rollouts, CONTEXT, by_size=by_size)
    assert advantages[:, 0].tolist() == pytest.approx(published, abs=1e-5)
    # What a leaf does alone after the last branch says nothing about it, however long it takes.
    longer = make_rollouts(
        [3, 9, 3, 3, 3], [0] * 5, [1.0, 0.0, 1.0, 0.0, 0.0], parent=[-1, 0, -1, 2, 0], branch_decision=[-1, 2, -1, 2, 1]
    )
    torch.testing.assert_close(tree.tree_po(longer, CONTEXT, by_size=by_size)[:, :3], advantages)


@pytest.mark.checks("advantage/fork")
def test_a_fork_adds_to_the_episodes_advantage():
    rollouts = make_rollouts(
        [3] * 4, [0] * 4, [1.0, 0.0, 1.0, 1.0], parent=[-1, 0, -1, 2], branch_decision=[-1, 1, -1, 2]
    )
    advantages = experimental_advantages.fork(rollouts, CONTEXT, trajectory=0.5, forks=2.0)
    episode = 0.5 * standardised([1.0, 0.0, 1.0, 1.0])
    # Means of the leaves below each node: .75 at the root, then .5 | 1 of the two episodes, then 1, 0 | 1, 1.
    rise = np.array([[0.5 - 0.75, 0.5, 0], [0.5 - 0.75, -0.5, 0], [1 - 0.75, 0, 0], [1 - 0.75, 0, 0]])
    torch.testing.assert_close(advantages, torch.tensor(episode[:, None] + 2 * rise).float(), atol=1e-5, rtol=0)


@pytest.mark.checks("advantage/fork")
def test_siblings_count_once_each_however_many_episodes_they_have():
    """A fork with a branch of three successes, which part later, and a branch of one failure."""
    rollouts = make_rollouts(
        [3] * 4, [0] * 4, [1.0, 1.0, 1.0, 0.0], parent=[-1, 0, 0, 0], branch_decision=[-1, 2, 2, 1]
    )
    advantages = experimental_advantages.fork(rollouts, CONTEXT, trajectory=0.0)
    assert advantages.tolist() == [[0, 0.5, 0]] * 3 + [[0, -0.5, 0]]


@pytest.mark.checks("advantage/gigpo")
def test_gigpo_gives_the_figures_of_its_authors_code_without_deviations_and_divides_both_terms_with_them():
    """Figures: gigpo/core_gigpo.py of verl-agent (mean_norm), in the copy github.com/xlan156/verl-agent at 8ca3a46."""
    rollouts = make_rollouts([3] * 4, [0] * 4, [1.0, 0.0, 4.0, 3.0], steps=1)
    rollouts = rollouts.with_extras(state_key=torch.tensor([[1, 2, 3], [1, 2, 3], [1, 1, 2], [4, 2, 1]]))
    advantages = step.gigpo(rollouts, CONTEXT, step_weight=0.5, scale=False)
    published = [[-1.4, -1.5, -0.75], [-2.43125, -2.625, -2.25], [1.69375, 2.06875, 3.375], [1.0, 0.75, 2.06875]]
    torch.testing.assert_close(advantages, torch.tensor(published), atol=1e-5, rtol=0)
    scaled = step.gigpo(rollouts, CONTEXT, step_weight=0.5)
    episode, third = standardised([1.0, 0.0, 4.0, 3.0]), standardised([1.0, 0.0])  # the last two are in state 3
    expected = [episode[0] + 0.5 * third[0], episode[1] + 0.5 * third[1]]
    assert scaled[:2, 2].tolist() == pytest.approx(expected, abs=1e-4)
    assert float(scaled[3, 0]) == pytest.approx(episode[3], abs=1e-4)  # alone in state 4


@pytest.mark.checks("advantage/hgpo")
@pytest.mark.parametrize(
    ("context_length", "alpha", "published"),
    [
        (2, 1.0, [[-0.608828, -0.626329, 0.718385], [-0.653377, -0.923429, -1.015341], [-0.296989, 1.453372, 0.0]]),
        (1, 2.0, [[-0.608828, -0.611473, 0.610072], [-0.653377, -0.904852, -1.021243], [-0.296989, 1.442181, 0.0]]),
    ],
)
def test_hgpo_gives_the_figures_of_its_authors_code(context_length: int, alpha: float, published: list[list[float]]):
    """Figures: recipe/hgpo/core_hgpo.py of verl-agent, in the copy github.com/xlan156/verl-agent at 8ca3a46."""
    rollouts = make_rollouts([3, 3, 2, 3, 3], [0] * 5, [1.0, 0.0, 2.0, 4.0, 3.0], steps=1)
    state = torch.tensor([[1, 2, 3], [1, 2, 3], [1, 2, 0], [4, 2, 1], [1, 1, 3]])
    advantages = experimental_advantages.hgpo(
        rollouts.with_extras(state_key=state), CONTEXT, context_length=context_length, alpha=alpha
    )
    others = [[0.0, 0.240965, 2.197721], [-0.519731, -0.118796, 1.336305]]
    torch.testing.assert_close(advantages, torch.tensor([*published, *others]), atol=2e-5, rtol=0)


@pytest.mark.checks("advantage/step_groups")
def test_step_groups_compare_what_followed_the_same_step():
    rollouts = make_rollouts([3, 2, 2, 1], [0, 0, 0, 1], steps=1)
    paid = [
        [[0.0, 1.0], [2.0, 0.0], [0.0, 4.0]],
        [[0.0, 0.0], [0.0, 8.0], [0.0, 0.0]],
        [[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]],
        [[5.0, 0.0], [0.0, 0.0], [0.0, 0.0]],
    ]
    advantages = step.step_groups(with_rewards(rollouts, paid), CONTEXT, episode_weight=0.3, step_weight=2.0)
    # Two control steps a decision: discount .25 from one to the next.
    first = standardised([1 + 0.25 * (2 + 0.25 * 4), 0.25 * 8, 2.0])
    second = standardised([2 + 0.25 * 4, 8.0, 0.0])
    episode = standardised([7.0, 8.0, 2.0])
    expected = torch.zeros(4, 3)
    expected[:3, 0] = torch.tensor(0.3 * episode + 2 * first)
    expected[:3, 1] = torch.tensor(0.3 * episode + 2 * second)
    expected[0, 2] = 0.3 * episode[0]  # nobody else has a third decision
    torch.testing.assert_close(advantages, expected, atol=1e-4, rtol=0)


@pytest.mark.checks("advantage/step_groups")
@pytest.mark.parametrize(
    ("agreement", "whole", "cut"),
    [([1, 0, 1, 1], [1.375, 0.75, 1.5, 1], [1, 0, 1.5, 1]), ([1, 1, 0, 0], [1.5, 1, 0, 0], [1.5, 1, 0, 0])],
)
def test_a_cut_return_ends_where_a_chunk_disagrees_with_the_demonstration(
    agreement: list[int], whole: list[float], cut: list[float]
):
    rollouts = with_rewards(make_rollouts([4], [0]), [[[0.0, float(each)] for each in agreement]])
    rollouts = replace(rollouts, valid=rollouts.valid & torch.tensor([False, True]))  # one control step a decision
    assert step.returns_to_go(rollouts, 0.5)[0].tolist() == whole
    assert step.returns_to_go(rollouts, 0.5, cut=True)[0].tolist() == cut
    uncut, cut_groups = (step.step_groups(rollouts, CONTEXT, cut=each) for each in (False, True))
    assert uncut.shape == cut_groups.shape == (1, 4)


@pytest.mark.checks("advantage/rank_grpo")
def test_rank_grpo_standardises_returns_to_go_of_decisions():
    rollouts = make_rollouts([2, 2, 2], [0, 0, 0], steps=1)
    paid = [[[0.0, 1.0], [2.0, 0.0]], [[0.0, 0.0], [0.0, 8.0]], [[1.0, 1.0], [0.0, 0.0]]]
    advantages = experimental_advantages.rank_grpo(with_rewards(rollouts, paid), CONTEXT)
    expected = np.stack([standardised([1 + 0.25 * 2, 0.25 * 8, 2.0]), standardised([2.0, 8.0, 0.0])], 1)
    torch.testing.assert_close(advantages, torch.tensor(expected).float(), atol=1e-4, rtol=0)


@pytest.mark.checks("advantage/rank_grpo")
def test_rank_grpo_gives_every_action_what_followed_it():
    """Three episodes of up to two decisions of two actions with two tokens each; the last ends after three actions."""
    rollouts = make_rollouts([2, 2, 2], [0, 0, 0], steps=4)
    valid = rollouts.valid.clone()
    valid[2, 1, 1] = False
    paid = [[[0.0, 1.0], [2.0, 0.0]], [[0.0, 0.0], [0.0, 8.0]], [[1.0, 1.0], [4.0, 99.0]]]
    rollouts = with_rewards(replace(rollouts, valid=valid), paid)
    advantages = experimental_advantages.rank_grpo(rollouts, CONTEXT, per_action=True)
    # Returns to go of the actions, discounted by .5 each.
    to_go = np.array([[1.0, 2.0, 2.0, 0.0], [1.0, 2.0, 4.0, 8.0], [2.5, 3.0, 4.0, np.nan]])
    expected = np.zeros((3, 4))
    for place in range(4):
        members = np.flatnonzero(np.isfinite(to_go[:, place]))
        expected[members, place] = standardised(to_go[members, place].tolist())
    tokens = torch.tensor(expected).float().reshape(3, 2, 2).repeat_interleave(2, -1)
    torch.testing.assert_close(advantages, tokens, atol=1e-4, rtol=0)
    with pytest.raises(ConfigError, match="3 steps with log-probabilities"):
        experimental_advantages.rank_grpo(make_rollouts([1, 1], [0, 0], steps=3), CONTEXT, per_action=True)


@pytest.mark.checks("advantage/salt")
def test_salt_merges_equal_steps_and_leaves_the_others():
    rollouts = make_rollouts([2, 2, 2, 2], [0, 0, 0, 1], [3.0, 1.0, -1.0, 5.0], steps=1)
    state = torch.tensor([[7, 1], [7, 2], [7, 1], [7, 1]])
    # First step: rows 0 and 1 do the same in the same state, row 2 something else; row 3 is of another start.
    # Second step: rows 0 and 2 do the same in the same state, row 1 does it elsewhere.
    taken = torch.tensor([[0.0, 5.0], [0.0, 5.0], [9.0, 5.0], [0.0, 5.0]])
    actions = taken[..., None, None].expand(4, 2, 2, 1).clone()
    actions[1, 0] += 0.1  # well within a quarter of the spread, which is 3.1: still the same action
    rollouts = replace(rollouts, actions=actions).with_extras(state_key=state)
    advantages = experimental_advantages.salt(rollouts, CONTEXT)
    episode = standardised([3.0, 1.0, -1.0])  # sqrt(3/2), 0, -sqrt(3/2)
    shared_first, shared_second = (episode[0] + episode[1]) / 2, (episode[0] + episode[2]) / 2
    expected = [[shared_first, shared_second], [shared_first, episode[1]], [episode[2], shared_second], [0.0, 0.0]]
    torch.testing.assert_close(advantages, torch.tensor(expected).float(), atol=1e-5, rtol=0)
    apart = experimental_advantages.salt(rollouts, CONTEXT, resolution=0.02)[:2, 0]
    torch.testing.assert_close(apart, torch.tensor(episode[:2]).float(), atol=1e-5, rtol=0)


@pytest.mark.checks("advantage/gigpo", "advantage/hgpo", "advantage/salt")
def test_continuous_states_are_compared_as_coarsely_as_it_takes_to_share_some():
    """Six episodes of one group in a plane."""
    rollouts = make_rollouts([5] * 6, [0] * 6, list(range(6)), steps=1)
    states = torch.randn(6, 5, 1, 2, generator=torch.Generator().manual_seed(0))
    rollouts = replace(rollouts, observation={STATE: states})
    keys = {size: step.state_keys(rollouts, size) for size in step.RESOLUTIONS}
    shares = [float(step._is_shared(each, rollouts)[:, 1:].float().mean()) for each in keys.values()]
    assert shares[0] < step.SHARED <= shares[-1], shares
    chosen = next(each for each, share in zip(keys.values(), shares, strict=True) if share >= step.SHARED)
    assert torch.equal(step.state_keys(rollouts), chosen)
    # A state that only one episode visits, however often, is not shared.
    own = replace(rollouts, observation={STATE: torch.arange(6.0)[:, None, None, None].expand(6, 5, 1, 1)})
    assert not step._is_shared(step.state_keys(own, 0.25), own).any()


@pytest.mark.checks("advantage/gigpo", "advantage/hgpo", "advantage/salt")
def test_rounding_errors_of_a_constant_field_make_no_other_states():
    rollouts = make_rollouts([4, 4], [0, 0], steps=1)
    states = torch.tensor([[0.0, 0.0, 1.0, 1.0]] * 2)[..., None, None].repeat(1, 1, 1, 2)
    states[..., 1] = 5.0 + 5e-7 * torch.arange(8.0).reshape(2, 4, 1)
    keys = step.state_keys(replace(rollouts, observation={STATE: states}), 0.25)
    assert torch.equal(keys, torch.tensor([[0, 0, 1, 1]] * 2))
    # A single decision has no deviation.
    single = make_rollouts([1], [0], [1.0], steps=1)
    assert not step.gigpo(single, CONTEXT).any()
    assert torch.equal(in_deviations(torch.full((1, 2), 3.0), torch.full((1, 2), 3.0)), torch.zeros(1, 2))


def test_states_that_nobody_shares_make_a_note():
    rollouts = make_rollouts([3] * 2, [0, 1], [0.0, 1.0])
    with pytest.warns(RobopolicyNote, match="hardly differs from GRPO"):
        step.gigpo(rollouts, CONTEXT)


@pytest.mark.checks("advantage/q_values")
def test_q_values_are_compared_with_the_state_and_standardised():
    q, v = torch.tensor([[3.0, 1.0], [0.5, 9.0]]), torch.tensor([[1.0, 2.0], [0.5, 1.0]])
    advantages = experimental_advantages.q_values(make_rollouts([2, 1], [0, 1]).with_extras(q=q, v=v), CONTEXT)
    expected = [*standardised([2.0, -1.0, 0.0]), 0.0]
    assert advantages.flatten().tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.checks("advantage/ngrpo")
def test_ngrpo_counts_virtual_episodes_in_mean_and_spread():
    returns = [0.75, 0.0, 0.25, 1.0, 0.5]
    rollouts = make_rollouts([1] * 5, [0, 0, 0, 1, 1], returns)
    advantages = group.ngrpo(rollouts, replace(CONTEXT, memory={}), best=2.0, virtual=2)[:, 0]
    first, second = np.array([0.75, 0.0, 0.25, 2.0, 2.0]), np.array([1.0, 0.5, 2.0, 2.0])
    scaled = [(values - values.mean()) / values.std(ddof=1) for values in (first, second)]
    assert advantages.tolist() == pytest.approx([*scaled[0][:3], *scaled[1][:2]], abs=1e-4)


SAS = [
    ([0.0, 1.0, 0.0, 0.0], [-0.5, 1.5, -0.5, -0.5]),
    ([1.0, 1.0, 1.0, 1.0], [0.363803, 0.363803, 0.363803, 0.363803]),
    ([2.0, 0.0, 1.0, 0.5], [1.531847, -1.041522, 0.245163, -0.357204]),
    ([0.0, 1.0, 1.0, 2.0], [-1.128165, 0.076718, 0.076718, 1.345987]),
]
"""Four visits of a start: returns, and what they are worth."""


@pytest.mark.checks("advantage/sas")
def test_sas_gives_the_figures_of_its_authors_code():
    """Figures: compute_dcpo_outcome_advantage of github.com/lime-RL/DCPO at 01787b0 (core_algos.py)."""
    context = replace(CONTEXT, memory={})
    for returns, published in SAS:
        rollouts = make_rollouts([1] * 4, [0] * 4, returns, steps=1)
        advantages = experimental_advantages.sas(rollouts.with_extras(start=torch.full((4, 1), 5)), context)[:, 0]
        assert advantages.tolist() == pytest.approx(published, abs=1e-5)


@pytest.mark.checks("advantage/process_steps")
def test_process_steps_add_rewards_standardised_over_the_group():
    rollouts = make_rollouts([2, 1, 1], [0, 0, 1], [1.0, 0.0, 1.0], steps=2)
    process = torch.tensor([[[1.0, 2.0], [0.5, 0.5]], [[-1.0, -1.0], [0.0, 0.0]], [[4.0, 4.0], [0.0, 0.0]]])
    advantages = experimental_advantages.process_steps(rollouts.with_extras(process=process), CONTEXT, alpha=0.5)
    steps = standardised([3.0, 1.0, -2.0])  # the group's three decisions; the other start has one, which is its mean
    expected = [[1 + 0.5 * steps[0], 1 + 0.5 * steps[1]], [-1 + 0.5 * steps[2], 0.0], [0.0, 0.0]]
    torch.testing.assert_close(advantages, torch.tensor(expected).float(), atol=1e-4, rtol=0)


@pytest.mark.checks("IGPO")
def test_igpo_tells_decisions_apart_by_what_they_add_to_the_chance_of_success():
    rollouts = make_rollouts([3, 3], [0, 0], [1.0, 0.0])
    values = torch.tensor([[0.2, 0.5, 0.9], [0.2, 0.1, 0.1]])
    paid = rewards.information_gain(rollouts.with_extras(v=values), CONTEXT)
    torch.testing.assert_close(paid.reward, torch.tensor([[0.3, 0.4, 1.0], [-0.1, 0.0, 0.0]]))
    options = {"episode_weight": 0.0, "scale": False, "padded": True, "discount": 1.0}
    to_go = step.returns_to_go(paid, 1.0)
    torch.testing.assert_close(to_go, torch.tensor([[1.7, 1.4, 1.0], [-0.1, 0.0, 0.0]]))
    # It telescopes: the outcome, and how the value moved from here to the last decision.
    torch.testing.assert_close(to_go, rollouts.row_return[:, None] + values[:, -1:] - values)
    advantages = step.step_groups(paid, CONTEXT, **options)
    torch.testing.assert_close(advantages, torch.tensor([[0.9, 0.7, 0.5], [-0.9, -0.7, -0.5]]))
    # A failure of one decision: what is over counts as 0 later on.
    short = make_rollouts([3, 1], [0, 0], [1.0, 0.0])
    paid = rewards.information_gain(short.with_extras(v=values), CONTEXT)
    advantages = step.step_groups(paid, CONTEXT, **options)
    torch.testing.assert_close(advantages, torch.tensor([[0.85, 0.7, 0.5], [-0.85, 0.0, 0.0]]))


@pytest.mark.checks("HAPO")
def test_hapo_counts_episodes_by_their_steps():
    rollouts = make_rollouts([3, 1], [0, 0], [1.0, 0.0], steps=1)
    advantages = group.grpo(rollouts, CONTEXT, by_steps=True)
    assert advantages[:, 0].tolist() == pytest.approx([0.5774, -1.7321], abs=1e-4)
    # Where that makes one of them extreme, the group is normalised as ever: 30 steps against 1 would be -5.48.
    rollouts = make_rollouts([30, 1], [0, 0], [1.0, 0.0], steps=1)
    assert group.grpo(rollouts, CONTEXT, by_steps=True)[:, 0].tolist() == pytest.approx([1.0, -1.0], abs=1e-4)
