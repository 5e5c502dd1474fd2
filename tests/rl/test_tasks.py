"""Samplers go where the signal is and resume exactly; allocators keep their budget; selections keep what they say."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_rollouts import make_rollouts

from robopolicy.core.errors import ConfigError
from robopolicy.core.spec import STATE
from robopolicy.rl import initial_states
from robopolicy.rl.advantages import group
from robopolicy.rl.context import Context
from robopolicy.rl.controllers import LinearDecay, Vcpo
from robopolicy.rl.experimental import initial_states as experimental
from robopolicy.rl.experimental import selection as experimental_selection
from robopolicy.rl.experimental.controllers import KlTarget
from robopolicy.rl.experimental.initial_states import ReplaySampler, SecSampler
from robopolicy.rl.initial_states import MoppsSampler, UniformSampler
from robopolicy.rl.registry import Slot, mechanisms

CONTEXT = Context(torch.Generator().manual_seed(0))
SAMPLERS = [entry.name for entry in mechanisms(Slot.SAMPLER)]


def make(name: str):
    return next(entry.function for entry in mechanisms(Slot.SAMPLER) if entry.name == name)()


def simulate(sampler, rates: np.ndarray, rounds: int = 30, count: int = 8, seed: int = 0) -> np.ndarray:
    """Play groups of 8 on starts with these success rates; return how often each start was played late in the run."""
    draws, played = np.random.default_rng(seed), np.zeros(len(rates))
    for number in range(rounds):
        index = sampler.propose(count, len(rates), draws)
        won = draws.binomial(8, rates[index])
        share = won / 8
        sampler.observe(index, won.astype(float), np.full(len(index), 8.0), 2 * share * (1 - share))
        if number >= rounds // 2:
            played[index] += 1
    return played


@pytest.mark.parametrize("name", ["mopps", "vade"])
def test_thompson_samplers_concentrate_on_uncertain_starts(name):
    rates = np.repeat([0.0, 0.5, 1.0], 16)
    played = simulate(make(name), rates)
    assert played[16:32].sum() > 2 * (played.sum() - played[16:32].sum())
    uniform = simulate(UniformSampler(), rates)
    assert uniform[16:32].sum() < 0.5 * uniform.sum()


def test_a_bandit_prefers_categories_that_teach():
    rates = np.where(np.arange(48) % 4 == 2, 0.5, 0.0)
    played = simulate(SecSampler(temperature=0.1), rates)
    assert played[np.arange(48) % 4 == 2].sum() > 0.5 * played.sum()


@pytest.mark.checks("sampler/prompt_replay")
def test_replayed_starts_wait_and_are_not_used_for_ever():
    sampler = ReplaySampler(share=1.0, cooldown=2, limit=3)
    draws = np.random.default_rng(0)
    index_lists: list[list[int]] = []
    for _ in range(12):
        index = sampler.propose(4, 100, draws)
        index_lists.append(index.tolist())
        sampler.observe(index, np.full(4, 4.0), np.full(4, 8.0), np.ones(4))
    counts = np.bincount(np.concatenate(index_lists), minlength=100)
    assert counts.max() == 1 + 3, "once as new, and three times more"
    for start in np.flatnonzero(counts > 1):
        rounds = [number for number, chosen in enumerate(index_lists) if start in chosen]
        assert min(b - a for a, b in itertools.pairwise(rounds)) >= 2


@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers_propose_different_starts_and_resume_exactly(name):
    sampler, other = make(name), make(name)
    rates = np.linspace(0, 1, 20)
    simulate(sampler, rates, rounds=6)
    other.restore(json.loads(json.dumps(sampler.state())))
    first, second = (item.propose(8, 20, np.random.default_rng(3)) for item in (sampler, other))
    choice = 7 if name == "stages" else 20  # the easiest third
    assert len(set(first.tolist())) == len(first) == min(8, choice)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(sampler.predict(np.arange(20)), other.predict(np.arange(20)))
    assert len(set(sampler.propose(50, 20, np.random.default_rng(4)).tolist())) == choice


def test_beliefs_fade_with_time():
    forgetful, stubborn = MoppsSampler(decay=0.5), MoppsSampler(decay=1.0)
    for sampler in (forgetful, stubborn):
        for won in (0, 0, 0, 8):
            sampler.observe(np.array([0]), np.array([float(won)]), np.array([8.0]), np.array([1.0]))
    assert forgetful.predict(np.array([0]))[0] > stubborn.predict(np.array([0]))[0] + 0.2


@pytest.mark.checks("allocator/knapsack")
@settings(max_examples=40, deadline=None)
@given(
    rates=st.lists(st.floats(0.0, 1.0), min_size=2, max_size=4),
    low=st.integers(1, 2),
    room=st.integers(1, 4),
    share=st.floats(0, 1),
)
def test_the_knapsack_is_optimal(rates, low, room, share):
    rate, high = np.array(rates), low + room
    budget = round(len(rate) * (low + share * room))
    counts = initial_states.knapsack(rate, budget, low, high)
    assert counts.sum() == budget
    assert counts.min() >= low
    assert counts.max() <= high
    value = initial_states.signal_value(counts, rate).sum()
    for sizes in itertools.product(range(low, high + 1), repeat=len(rate)):
        if sum(sizes) == budget:
            assert value >= initial_states.signal_value(np.array(sizes), rate).sum() - 1e-12


@pytest.mark.checks("allocator/knapsack", "allocator/uniform")
def test_allocators():
    uncertain = initial_states.Knapsack(least=2, most=20).plan(np.array([0.01, 0.5, 0.99, 0.3]), 8)
    assert sum(uncertain) == 32
    assert uncertain[3] > uncertain[2]
    assert initial_states.Uniform().plan(np.zeros(3), 8) == [8, 8, 8]
    with pytest.raises(ValueError, match="cannot be divided"):
        initial_states.knapsack(np.array([0.5]), 9, 1, 8)


@pytest.mark.checks("allocator/dars")
def test_hard_starts_get_more_episodes():
    rate, sizes = np.array([0.25, 0.5, 0.9, 0.0]), np.full(4, 8)
    assert experimental.Dars(most=32).extend(rate, sizes) == [
        3,
        0,
        0,
        24,
    ]  # (4 - 8 * .375) / .375 = 2.67
    assert experimental.Dars(weighted=True, most=32).extend(rate, sizes)[0] == 8  # (6 - 3) / .375
    assert initial_states.Uniform().extend(rate, sizes) == [0] * 4


@pytest.mark.checks("selection/mixed_outcomes")
def test_dapo_keeps_groups_with_mixed_outcomes():
    rollouts = make_rollouts([1] * 6, [0, 0, 1, 1, 2, 2], [1.0, 1.0, 1.0, -1.0, -1.0, -1.0])
    assert group.keep_mixed(rollouts, CONTEXT).tolist() == [False, False, True, True, False, False]
    assert group.keep_mixed(rollouts.take(torch.tensor([0, 1])), CONTEXT).all()


@pytest.mark.checks("selection/roc")
def test_roc_keeps_the_shortest_successes_and_the_proportion():
    rollouts = make_rollouts([4, 1, 2, 3, 2, 2, 2, 2], [0] * 8, [1.0] * 4 + [-1.0] * 4)
    kept = experimental_selection.resample_on_correct(rollouts, CONTEXT, keep=0.5)
    assert kept[:4].tolist() == [False, True, True, False]
    assert int(kept[4:].sum()) == 2


@pytest.mark.checks("selection/roc")
@pytest.mark.parametrize(
    ("successes", "failures", "kept_counts"),
    [
        (1, 7, (1, 3)),
        (7, 1, (3, 1)),
        (6, 2, (2, 2)),
        (2, 6, (2, 2)),
        (4, 4, (2, 2)),
        (0, 8, (0, 4)),
        (8, 0, (4, 0)),
        (12, 4, (6, 2)),
        (1, 1, (1, 1)),
        (2, 0, (2, 0)),
    ],
)
def test_roc_keeps_as_many_episodes_as_asked_for_and_two_of_each_kind(
    successes: int, failures: int, kept_counts: tuple[int, int]
):
    size = successes + failures
    # Beside another group, whose counts must not matter.
    rollouts = make_rollouts(
        [2] * (size + 3), [0] * size + [1] * 3, [1.0] * successes + [-1.0] * failures + [1.0, -1.0, 1.0]
    )
    kept = experimental_selection.resample_on_correct(rollouts, CONTEXT, keep=0.5)
    assert (int(kept[:successes].sum()), int(kept[successes:size].sum())) == kept_counts


@pytest.mark.checks("selection/max_variance")
def test_the_most_different_returns_are_kept():
    rollouts = make_rollouts([1] * 6, [0, 0, 0, 0, 1, 1], [0.0, 1.0, 0.4, 0.5, 0.0, 1.0])
    assert experimental_selection.max_variance(rollouts, CONTEXT, keep=0.5).tolist() == [
        True,
        True,
        False,
        False,
        True,  # one of two would have no advantage
        True,
    ]


@pytest.mark.checks("controllers/vcpo")
def test_vcpo_scales_by_the_square_root_of_the_share_that_is_effective():
    assert Vcpo().step({"sequence_ess": 0.25}, CONTEXT) == {"lr_scale": 0.5}
    assert Vcpo().step({}, CONTEXT) == Vcpo().step({"sequence_ess": 1.1}, CONTEXT) == {"lr_scale": 1.0}
    assert Vcpo(least=0.1).step({"sequence_ess": 0.0}, CONTEXT) == {"lr_scale": 0.1}


@pytest.mark.checks("controllers/linear_decay")
@pytest.mark.parametrize(("iteration", "scale"), [(0, 1.0), (5, 0.6), (10, 0.2)])
def test_the_learning_rate_falls_linearly(iteration: int, scale: float):
    context = Context(torch.Generator(), iteration=iteration, iterations=10)
    assert LinearDecay(final=0.2).step({}, context)["lr_scale"] == pytest.approx(scale)


@pytest.mark.checks("controllers/kl_target")
def test_the_learning_rate_holds_the_kl_between_two_thirds_and_one_and_a_half_of_its_target():
    controller = KlTarget(target=0.03, factor=2.0, least=0.25, most=1.5)
    moved = [
        controller.step({"kl": value}, CONTEXT)["lr_scale"] for value in (0.046, 0.044, 0.021, 0.019, 0.019, 0.019)
    ]
    assert moved == [0.5, 0.5, 0.5, 1.0, 1.5, 1.5]
    other = KlTarget(target=0.03, factor=2.0, least=0.25, most=1.5)
    other.restore(controller.state())
    assert [other.step({"kl": 1.0}, CONTEXT)["lr_scale"] for _ in range(3)] == [0.75, 0.375, 0.25]
    assert other.step({}, CONTEXT) == {"lr_scale": 0.25}


@pytest.mark.checks("selection/distinct_pairs")
def test_pairs_that_hardly_differ_are_dropped_but_for_the_last_of_a_kind():
    """States of one start: 0 (a success), .1 and 2 (failures)."""
    rollouts = make_rollouts([1, 1, 1], [0, 0, 0], [1.0, -1.0, -1.0])
    state = torch.tensor([0.0, 0.1, 2.0])
    rollouts = replace(rollouts, observation={STATE: state[:, None, None, None]})
    spread = float(state.std(unbiased=False))
    distances = experimental_selection.episode_distances(rollouts)
    assert distances[0].tolist() == pytest.approx([0.0, 0.1 / spread, 2 / spread], abs=1e-4)
    assert experimental_selection.distinct_pairs(rollouts, CONTEXT, least=0.25).tolist() == [True, False, True]
    assert experimental_selection.distinct_pairs(rollouts, CONTEXT, least=0.05).all()
    assert experimental_selection.distinct_pairs(rollouts.take(torch.tensor([0, 1])), CONTEXT).all(), (
        "one of each stays"
    )


@pytest.mark.checks("selection/distinct_pairs")
def test_the_shorter_episode_stays_where_it_ended():
    rollouts = make_rollouts([3, 1], [0, 0], [1.0, -1.0])
    state = torch.tensor([[0.0, 1.0, 3.0], [0.0, 9.0, 9.0]])
    rollouts = replace(rollouts, observation={STATE: state[..., None, None]})
    spread = float(np.std([0.0, 1.0, 3.0, 0.0]))
    assert float(experimental_selection.episode_distances(rollouts)[0, 1]) == pytest.approx(4 / 3 / spread, abs=1e-4)
    with pytest.raises(ConfigError, match=r"distinct_pairs.*vector fields"):
        experimental_selection.distinct_pairs(replace(rollouts, observation={}), CONTEXT)
