"""Group advantages: hand tables, ragged groups, and what must not matter (order of rows, padding)."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_rollouts import make_rollouts, make_scored

from robopolicy.core.rollouts import Rollouts, concatenate
from robopolicy.core.segments import Segments
from robopolicy.rl.advantages import group as group_advantages
from robopolicy.rl.advantages import tree
from robopolicy.rl.algorithm import build_algorithm
from robopolicy.rl.configuration import AlgorithmConfig
from robopolicy.rl.context import Context
from robopolicy.rl.registry import Slot, mechanisms

CONTEXT = Context(torch.Generator(), discount=0.9, iteration=3, iterations=10)
NAMES = [entry.name for entry in mechanisms(Slot.ADVANTAGE) if entry.name not in ("gae", "risk_po")]
"""All that compare episodes and decisions; risk_po sums the j-th episodes of groups, so there the order is meant."""


def advantage_of(name: str, rollouts: Rollouts, **options) -> torch.Tensor:
    function = next(entry.function for entry in mechanisms(Slot.ADVANTAGE) if entry.name == name)
    estimate = function(rollouts, replace(CONTEXT, memory={}), **options)
    return estimate[0] if isinstance(estimate, tuple) else estimate


def annotated(rollouts: Rollouts, seed: int) -> Rollouts:
    """Add what models and a critic would have said."""
    draws = torch.Generator().manual_seed(seed)
    names = {"q": (), "v": (), "preference": (), "advantage_gae": (), "flow_return": ()}
    per_step = ("process", "flow_value", "teacher_logp", "current_logp", "score_norm")
    names |= dict.fromkeys(per_step, rollouts.mask.shape[-1:]) | {"budget": (2,)}
    drawn = {name: torch.randn((*rollouts.shape, *trailing), generator=draws) for name, trailing in names.items()}
    alive = rollouts.alive
    start = rollouts.group[:, None].expand(rollouts.shape)
    return rollouts.with_extras(
        start=start,
        **{name: value * alive.reshape(*alive.shape, *[1] * (value.dim() - 2)) for name, value in drawn.items()},
    )


def first(advantage: torch.Tensor) -> list[float]:
    return advantage[:, 0].tolist()


RAGGED = {"lengths": [2, 1, 3, 2, 2], "group": [7, 7, 7, 2, 2], "returns": [1.0, 0.0, 0.5, 2.0, 0.0]}


@pytest.mark.checks("advantage/dr_grpo", "advantage/grpo", "advantage/rloo", "advantage/reinforce_pp")
def test_yardsticks_by_hand():
    rollouts = make_rollouts(**RAGGED)
    std = np.std([1, 0, 0.5])
    assert first(advantage_of("dr_grpo", rollouts)) == pytest.approx([0.5, -0.5, 0.0, 1.0, -1.0])
    assert first(advantage_of("grpo", rollouts)) == pytest.approx([0.5 / std, -0.5 / std, 0.0, 1.0, -1.0], abs=1e-4)
    assert first(advantage_of("rloo", rollouts)) == pytest.approx([0.75, -0.75, 0.0, 2.0, -2.0])
    scale = np.std([0.5, -0.5, 0, 1, -1])
    assert first(advantage_of("reinforce_pp", rollouts)) == pytest.approx(
        [value / scale for value in (0.5, -0.5, 0, 1, -1)], abs=1e-5
    )


@pytest.mark.checks("advantage/mc_grpo")
def test_the_median_episode_of_an_odd_group_is_left_out():
    rollouts = make_rollouts([1] * 5, [0, 0, 0, 1, 1], [3.0, 0.0, 1.0, 2.0, 0.0])
    advantage, keep = group_advantages.mc_grpo(rollouts, CONTEXT, epsilon=0.0)
    assert keep.tolist() == [True, True, False, True, True]
    assert first(advantage) == pytest.approx([2.0, -1.0, 0.0, 1.0, -1.0])
    close = make_rollouts([1] * 3, [0] * 3, [0.0, 0.01, 3.0])
    assert first(advantage_of("mc_grpo", close, limit=3.0)) == pytest.approx([-1 / 1.1, 0.0, 3.0], abs=1e-4)


@pytest.mark.checks("advantage/ngrpo")
def test_a_group_of_failures_is_pushed_away_by_a_virtual_success():
    rollouts = make_rollouts([1] * 4, [0, 0, 1, 1], [0.0, 0.0, 1.0, 0.0])
    assert first(advantage_of("grpo", rollouts))[:2] == pytest.approx([0.0, 0.0])
    guided = first(advantage_of("ngrpo", rollouts, best=1.0))
    spread = np.std([0, 0, 1], ddof=1)
    assert guided[:2] == pytest.approx([-1 / 3 / spread] * 2, abs=1e-4)


@pytest.mark.checks("advantage/grpo")
def test_deviations_are_the_populations_or_the_samples():
    rollouts = make_rollouts([1] * 6, [0, 0, 0, 0, 1, 1], [1.0, 0.0, 0.0, 0.0, 1.0, 0.0])
    assert first(advantage_of("grpo", rollouts)) == pytest.approx([3**0.5, *[-(3**-0.5)] * 3, 1.0, -1.0], abs=1e-4)
    assert first(advantage_of("grpo", rollouts, unbiased=True)) == pytest.approx(
        [1.5, -0.5, -0.5, -0.5, 0.5**0.5, -(0.5**0.5)], abs=1e-4
    )


@pytest.mark.checks("advantage/w_reinforce")
def test_signs_and_weights_of_w_reinforce():
    rollouts = make_rollouts([1, 1], [0, 0], [1.0, -1.0])
    assert first(advantage_of("w_reinforce", rollouts)) == pytest.approx([0.1, -1.0])
    assert first(advantage_of("w_reinforce", rollouts, positive=0.0)) == [0.0, -1.0]
    assert first(advantage_of("w_reinforce", rollouts, positive=1.0, negative=0.0)) == [1.0, 0.0]


@pytest.mark.checks("PSR/NSR")
@pytest.mark.parametrize(("width", "expected"), [(0.2, 1.1), (0.05, 0.0)])
def test_the_preset_of_w_reinforce_clips_at_the_width_that_is_set(width: float, expected: float):
    rollouts = make_rollouts([1], [0], [1.0], steps=1)
    ratio = torch.full((1, 1, 1), 1.1, dtype=torch.float64)
    scored = make_scored(rollouts, rollouts.logp_behaviour + ratio.log(), torch.ones_like(ratio), clip=(width, width))
    c, _ = build_algorithm(AlgorithmConfig(algorithm="w_reinforce")).coefficient(scored)
    assert c.flatten().tolist() == pytest.approx([expected])


def test_a_small_reward_is_not_drowned_by_a_large_one():
    rollouts = make_rollouts([1] * 4, [0, 0, 1, 1], [0.0, 0.0, 0.0, 0.0])
    large, small = torch.zeros_like(rollouts.valid, dtype=torch.float32), torch.zeros(4, 1, 2)
    large[:, 0, 0] = torch.tensor([1000.0, 0.0, 1000.0, 0.0])
    small[:, 0, 0] = torch.tensor([0.0, 0.01, 0.01, 0.0])
    rollouts = replace(rollouts, rewards={"large": large, "small": small})
    advantages = first(advantage_of("gdpo", rollouts))
    assert advantages[0] == pytest.approx(advantages[1], abs=1e-3)
    assert advantages[2] > 1
    assert advantages[3] < -1


@pytest.mark.checks("advantage/gigpo")
def test_steps_in_the_same_state_are_compared_with_one_another():
    rollouts = make_rollouts([2, 2, 2], [0, 0, 0], [1.0, 0.0, 0.5])
    keys = torch.tensor([[5, 1], [5, 2], [6, 2]])
    rollouts = rollouts.with_extras(state_key=keys)
    episode = first(advantage_of("dr_grpo", rollouts))
    advantages = advantage_of("gigpo", rollouts, step_weight=1.0, scale=False)
    steps = advantages - torch.tensor(episode)[:, None]
    # start state 5: returns to go 0.81 and 0 (discount 0.9 ** 2 control steps); state 2: 0 and 0.5
    assert steps[0].tolist() == pytest.approx([0.405, 0.0], abs=1e-5)
    assert steps[1].tolist() == pytest.approx([-0.405, -0.25], abs=1e-5)
    assert steps[2].tolist() == pytest.approx([0.0, 0.25], abs=1e-5)


@pytest.mark.checks("advantage/hgpo")
def test_longer_shared_histories_weigh_more():
    rollouts = make_rollouts([2, 2, 2, 2], [0] * 4, [1.0, 0.0, 1.0, 0.0])
    keys = torch.tensor([[1, 9], [1, 9], [2, 9], [3, 9]])
    advantages = advantage_of("hgpo", rollouts.with_extras(state_key=keys), context_length=1, alpha=1.0)
    # last decision of the first row: all four share state 9 (A = +1), two share 1 -> 9 as well (A = +1)
    assert float(advantages[0, 1]) == pytest.approx(1.0, abs=1e-4)
    # the first decision of the third row is alone at every level
    assert float(advantages[2, 0]) == 0.0


TREE = {
    "lengths": [3, 3, 3, 3],
    "group": [0, 0, 0, 0],
    "returns": [1.0, 0.0, 1.0, 0.0],
    "parent": [-1, 0, -1, 2],
    "branch_decision": [-1, 1, -1, 2],
}


def test_owners_of_shared_decisions():
    assert tree.owners(make_rollouts(**TREE)).tolist() == [[0, 0, 0], [0, 1, 1], [2, 2, 2], [2, 2, 3]]


@pytest.mark.checks("advantage/tree_po")
def test_subtree_means_give_tree_advantages():
    rollouts = make_rollouts(**TREE)
    values, _ = tree.subtree_values(rollouts)
    assert values.tolist() == [[0.5, 1, 1], [0.5, 0, 0], [0.5, 0.5, 1], [0.5, 0.5, 0]]
    # Against the group and, while they share their path, against one another: half above, half below everywhere.
    assert first(advantage_of("tree_po", rollouts)) == pytest.approx([1.0, -1.0, 1.0, -1.0], abs=1e-5)


@pytest.mark.checks("advantage/branch_grpo")
def test_nodes_are_standardised_by_depth_and_shared_ones_counted_once():
    advantages = advantage_of("branch_grpo", make_rollouts(**TREE))
    assert advantages[:, 0].tolist() == [0.0] * 4  # both nodes are worth 0.5: no spread
    depth = np.array([1.0, 0.0, 0.5])
    scaled = (depth - depth.mean()) / depth.std()
    assert advantages[:, 1].tolist() == pytest.approx([scaled[0], scaled[1], scaled[2], scaled[2]], abs=1e-5)
    assert advantages[:, 2].tolist() == pytest.approx([1.0, -1.0, 1.0, -1.0], abs=1e-5)


@pytest.mark.checks("advantage/fork")
def test_a_fork_is_judged_against_its_siblings():
    advantages = advantage_of("fork", make_rollouts(**TREE), trajectory=0.0)
    assert advantages.tolist() == [[0, 0.5, 0], [0, -0.5, 0], [0, 0, 0.5], [0, 0, -0.5]]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), sizes=st.lists(st.integers(2, 4), min_size=2, max_size=3))
def test_neither_order_nor_padding_matters(name: str, seed: int, sizes: list[int]):
    draws = np.random.default_rng(seed)
    group = [number for number, size in enumerate(sizes) for _ in range(size)]
    rollouts = annotated(make_rollouts(draws.integers(1, 4, len(group)).tolist(), group, seed=seed), seed)
    expected = advantage_of(name, rollouts)
    assert bool(expected.isfinite().all())
    assert not expected[~rollouts.alive].any()
    order = torch.as_tensor(draws.permutation(len(group)))
    torch.testing.assert_close(advantage_of(name, rollouts.take(order)), expected[order], atol=1e-5, rtol=1e-4)
    longer = annotated(make_rollouts([6], [0], [0.0]), seed)
    padded = concatenate([rollouts, longer]).take(torch.arange(len(group)))
    advantages = advantage_of(name, padded)
    torch.testing.assert_close(advantages[:, : expected.shape[1]], expected, atol=1e-5, rtol=1e-4)
    assert not advantages[:, expected.shape[1] :].any()


def test_groups_of_parts_stay_apart_unless_they_are_shared():
    """Shards number their groups from 0 each: joined, an episode is compared with those of its own shard alone."""
    shards = [make_rollouts([1, 1], [0, 0], [1.0, 0.0], seed=0), make_rollouts([1, 1], [0, 0], [5.0, 3.0], seed=1)]
    joined = concatenate(shards)
    assert joined.group.tolist() == [0, 0, 1, 1]
    assert first(advantage_of("rloo", joined)) == pytest.approx([1, -1, 2, -2])
    assert concatenate(shards, same_groups=True).group.tolist() == [0, 0, 0, 0]
    own = [make_rollouts([1, 1, 1], group) for group in ([4, 4, 6], [7, 7, 9], [0, 1, 1])]
    assert concatenate(own).group.tolist() == [4, 4, 6, 7, 7, 9, 10, 11, 11]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 20))
def test_segments_equal_slow_references(seed: int, count: int):
    draws = np.random.default_rng(seed)
    values, keys, mask = draws.normal(size=count), draws.integers(0, 4, count), draws.random(count) < 0.7
    segments = Segments.of(torch.tensor(keys))
    tensor, chosen = torch.tensor(values), torch.tensor(mask)
    for number, key in enumerate(np.unique(keys)):
        member = values[(keys == key) & mask]
        assert int(segments.size(chosen)[number]) == len(member)
        references = {
            "sum": np.sum(member),
            "mean": np.mean(member) if len(member) else 0.0,
            "std": np.std(member) if len(member) else 0.0,
            "median": np.median(member) if len(member) else 0.0,
            "maximum": np.max(member) if len(member) else 0.0,
            "minimum": np.min(member) if len(member) else 0.0,
        }
        for name, reference in references.items():
            assert float(getattr(segments, name)(tensor, chosen)[number]) == pytest.approx(reference, abs=1e-9), name
        if len(member):
            assert float(segments.quantile(tensor, 0.3, chosen)[number]) == pytest.approx(np.quantile(member, 0.3))
    assert sorted(segments.rank(tensor)[torch.tensor(keys == keys[0])].tolist()) == list(range((keys == keys[0]).sum()))
