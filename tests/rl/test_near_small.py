"""Mechanisms that lacked a small piece: choice rules of hints, schedules along the run, replay, by slow references."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from made_rollouts import make_rollouts

from robopolicy.core.rollouts import Rollouts
from robopolicy.rl.context import Context
from robopolicy.rl.experimental import selection
from robopolicy.rl.experimental.controllers import ImitationMix
from robopolicy.rl.experimental.initial_states import AdaptiveHint, Guide, Pivot
from robopolicy.rl.experimental.replay import Aggregate


def at(share: float, **settings) -> Context:
    """The circumstances when this share of a run is done."""
    return Context(torch.Generator().manual_seed(0), iteration=round(100 * share), iterations=100, **settings)


def batch(returns: list[float], seed: int = 0) -> Rollouts:
    """Episodes of one group, made by policy number `seed`, with their returns minus the mean as advantage."""
    rollouts = make_rollouts([2] * len(returns), [0] * len(returns), returns, seed=seed)
    advantage = (rollouts.row_return - rollouts.row_return.mean())[:, None, None].expand(rollouts.mask.shape)
    version = torch.full(rollouts.shape, seed)
    return replace(rollouts, policy_version=version).with_extras(advantage=advantage.clone())


def iteration(number: int, **settings) -> Context:
    return Context(torch.Generator().manual_seed(number), iteration=number, **settings)


def asked(hint, starts: list[int], context: Context | None = None, seed: int = 0) -> list[float]:
    start_array = np.array(starts)
    return hint.depth(start_array, np.zeros(len(start_array)), context or at(0.0), np.random.default_rng(seed)).tolist()


def seen(hint, starts: list[int], depth: list[float], rate: list[float]) -> None:
    hint.observe(np.array(starts), np.array(depth), np.array(rate))


def again(hint, **options):
    """The same hint out of a checkpoint."""
    other = type(hint)(**options)
    other.restore(json.loads(json.dumps(hint.state())))
    return other


@pytest.mark.checks("hint/guide", "Guide-GRPO")
def test_guide_helps_after_an_unhelped_group_that_failed_altogether_and_then_tries_alone():
    guide = Guide(share=0.5)
    assert asked(guide, [0, 1, 2]) == [0.0, 0.0, 0.0]
    seen(guide, [0, 1, 2], [0.0, 0.0, 0.0], [0.0, 0.125, 1.0])
    assert asked(guide, [0, 1, 2]) == [0.5, 0.0, 0.0]
    assert asked(again(guide), [0, 1, 2]) == [0.5, 0.0, 0.0]
    seen(guide, [0], [3 / 7], [1.0])  # as deep as seven recorded states allow
    assert asked(guide, [0]) == [0.0]
    seen(guide, [0], [0.0], [0.0])  # still fails alone, whatever help has shown before
    assert asked(guide, [0]) == [0.5]
    seen(guide, [0], [3 / 7], [0.0])
    assert asked(guide, [0]) == [0.0]


@pytest.mark.checks("hint/ad_hint", "ADHint")
def test_adaptive_hints_grow_with_difficulty_and_fade_along_the_run():
    hint = AdaptiveHint(most=0.8, fades=0.5)
    uniform = np.random.default_rng(3).uniform(size=3)
    assert asked(hint, [0, 1, 2], seed=3) == pytest.approx((0.8 * uniform).tolist())
    seen(hint, [0, 1, 2], [0.0, 0.5, 0.5], [0.25, 0.5, 1.0])
    difficulty = 1 - np.array([0.25, 0.25, 0.5])
    assert asked(hint, [0, 1, 2], seed=3) == pytest.approx((0.8 * difficulty * uniform).tolist())
    seen(hint, [0], [0.0], [0.75])
    assert asked(hint, [0], seed=3) == pytest.approx([0.8 * 0.5 * uniform[0]])
    assert asked(again(hint, fades=0.5), [0], at(0.25), seed=3) == pytest.approx([0.8 * 0.5 * uniform[0] * 0.5])
    assert asked(hint, [0, 1, 2], at(0.5)) == [0.0, 0.0, 0.0]


@pytest.mark.checks("hint/pivot", "PivotRL")
def test_pivots_are_states_of_mixed_outcome_that_are_not_easy():
    pivot = Pivot(most=0.4, easy=0.8)
    tried = [asked(pivot, [7], seed=number)[0] for number in range(5)]
    assert sorted(tried) == [0.0, 0.1, 0.2, 0.3, 0.4]
    assert asked(pivot, [8])[0] in tried  # another start is another demonstration
    for share, rate in zip([0.0, 0.1, 0.2, 0.3, 0.4], [0.0, 0.25, 0.75, 0.875, 1.0], strict=True):
        seen(pivot, [7], [share], [rate])
    drawn = {asked(pivot, [7], seed=number)[0] for number in range(40)}
    assert drawn == {0.1, 0.2}
    seen(pivot, [7, 7], [0.1, 0.2], [1.0, 1.0])  # the newest group counts: nothing is uncertain any more
    assert {asked(pivot, [7], seed=number)[0] for number in range(60)} == {0.0, 0.1, 0.2, 0.3, 0.4}
    assert asked(again(pivot, most=0.4, easy=0.8), [7], seed=5) == asked(pivot, [7], seed=5)


@pytest.mark.checks("hint/pivot", "PivotRL")
def test_pivots_may_be_found_once_with_the_first_policy():
    pivot = Pivot(most=0.1, once=True)
    for rates in ([0.0, 0.5], [0.5, 1.0]):
        seen(pivot, [7, 7], [0.0, 0.1], rates)
    asked(pivot, [7]), asked(pivot, [7])
    assert {asked(pivot, [7], seed=number)[0] for number in range(20)} == {0.1}


def test_a_tenth_is_known_by_the_state_that_a_demonstration_of_any_length_begins_it_in():
    for length, tenth in itertools.product(range(10, 40), range(10)):
        place = min(int(tenth / 10 * length), length - 1)
        pivot = Pivot()
        seen(pivot, [0], [float(torch.tensor(place / length))], [0.5])
        assert list(pivot.rates) == [(0, tenth)]


def slow_max_variance(returns: list[float], count: int) -> float:
    """The largest variance that any subset of so many returns has."""
    return max(float(np.var(some)) for some in itertools.combinations(returns, count))


@pytest.mark.checks("selection/max_variance", "D3S")
def test_the_kept_subset_has_the_largest_variance_of_all_subsets():
    draws = np.random.default_rng(0)
    for _ in range(20):
        size = int(draws.integers(2, 9))
        returns = [round(float(value), 2) for value in draws.normal(size=2 * size)]
        group = [0] * size + [1] * size
        keep = float(draws.uniform(0.2, 1.0))
        rollouts = make_rollouts([1] * 2 * size, group, returns)
        kept = selection.max_variance(rollouts, at(0.0), keep=keep).tolist()
        count = max(2, round(keep * size))  # one alone has no advantage
        for place in (slice(0, size), slice(size, 2 * size)):
            chosen = [value for value, stays in zip(returns[place], kept[place], strict=True) if stays]
            assert len(chosen) == count
            assert float(np.var(chosen)) == pytest.approx(slow_max_variance(returns[place], count), abs=1e-6)


@pytest.mark.checks("selection/max_variance", "D3S")
def test_the_kept_subset_has_the_largest_variance_of_advantages_too():
    returns = [0.0, 0.1, 0.2, 0.9, 1.0, 1.1, 2.0, 5.0]
    rollouts = make_rollouts([1] * 8, [0] * 8, returns)
    kept = selection.max_variance(rollouts, at(0.0), keep=0.5).numpy()
    advantage = (np.array(returns) - np.mean(returns)) / np.std(returns)
    best = max(itertools.combinations(range(8), 4), key=lambda rows: float(np.var(advantage[list(rows)])))
    assert np.flatnonzero(kept).tolist() == list(best)


@pytest.mark.checks("selection/max_variance", "D3S")
def test_the_kept_share_grows_to_all_along_the_run():
    rollouts = make_rollouts([1] * 10, [0] * 10, [float(value) for value in range(10)])
    settings = {"keep": 0.2, "final": 1.0}
    counts = [int(selection.max_variance(rollouts, at(share), **settings).sum()) for share in (0.0, 0.25, 0.5, 0.99)]
    assert counts == [2, 4, 6, 10]
    still = [int(selection.max_variance(rollouts, at(share), keep=0.2).sum()) for share in (0.0, 0.99)]
    assert still == [2, 2]


@pytest.mark.checks("controllers/imitation_mix", "DataMind")
def test_imitation_gives_way_to_reinforcement_along_a_cosine():
    mix = ImitationMix(first=0.9, last=0.05, until=0.5)
    # 0.05 + 0.85 (1 + cos(pi t)) / 2 with t = 0, 1/3, 1/2, 2/3, 1 and beyond
    for done, expected in ((0.0, 0.9), (1 / 6, 0.6875), (0.25, 0.475), (1 / 3, 0.2625), (0.5, 0.05), (0.9, 0.05)):
        knobs = mix.step({}, Context(torch.Generator(), iteration=round(done * 600), iterations=600))
        assert knobs == pytest.approx({"experts_scale": expected, "rl_scale": 1 - expected})


@pytest.mark.long
@pytest.mark.checks("replay/aggregate", "DAgger-LM")
def test_aggregation_keeps_a_uniform_sample_of_all_rows_that_came():
    counts = torch.zeros(6)
    for seed in range(200):
        aggregate = Aggregate(capacity=8, share=1.0)
        for number in range(6):
            context = Context(torch.Generator().manual_seed(10 * seed + number), iteration=number)
            aggregate.mix(batch([1.0, 0.0, 0.9, 0.1], seed=number), context)
        kept = [iteration for iteration, part in aggregate.kept for _ in range(len(part.group))]
        assert len(kept) == 8
        counts += torch.bincount(torch.tensor(kept), minlength=6)
    # each iteration has 4 of 24 rows: 8 / 6 are kept of it on average, with a standard error below .06
    assert (counts / 200 - 8 / 6).abs().max() < 0.25


@pytest.mark.checks("replay/aggregate", "DAgger-LM")
def test_aggregated_rows_come_back_for_auxiliary_losses_alone():
    aggregate = Aggregate(share=0.5)
    first, second = batch([1.0, 0.0, 0.9, 0.1], seed=1), batch([0.6, 0.2, 0.4, 0.8], seed=2)
    assert len(aggregate.mix(first, iteration(0)).group) == 4
    other = Aggregate(share=0.5)
    other.restore(aggregate.tree())
    mixed, again = (each.mix(second, iteration(1)) for each in (aggregate, other))
    assert torch.equal(mixed.actions, again.actions)
    assert mixed.policy_version[:, 0].tolist() == [2, 2, 2, 2, 1, 1]
    assert mixed.group[4:].min() > second.group.max()
    assert torch.equal(mixed.extras["advantage"][4:], torch.zeros_like(mixed.extras["advantage"][4:]))
    torch.testing.assert_close(mixed.extras["advantage"][:4], second.extras["advantage"])
    came = {tuple(row) for row in first.actions.flatten(1).tolist()}
    assert {tuple(row) for row in mixed.actions[4:].flatten(1).tolist()} <= came
