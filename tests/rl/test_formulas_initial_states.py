"""Which starts are played and how often: beliefs, bandits and budgets by hand."""

import json
import math

import numpy as np
import pytest

from robopolicy.core.errors import ConfigError
from robopolicy.rl import initial_states
from robopolicy.rl.experimental import allocators, seen_starts
from robopolicy.rl.experimental import initial_states as experimental

START = np.array([3])


@pytest.mark.checks("sampler/mopps")
def test_mopps_beliefs_fade_towards_the_prior_before_what_is_new_is_added():
    sampler = initial_states.MoppsSampler(decay=0.5)
    sampler.observe(START, np.array([6.0]), np.array([8.0]), np.array([0.3]))
    assert [item.tolist() for item in sampler.beta(START)] == [[7.0], [3.0]]  # .5 * 1 + .5 * 1 + 6, and + 2
    sampler.observe(START, np.array([1.0]), np.array([8.0]), np.array([0.3]))
    assert [item.tolist() for item in sampler.beta(START)] == [[5.0], [9.0]]  # .5 * 7 + .5 + 1, .5 * 3 + .5 + 7
    assert sampler.predict(np.array([3, 0])).tolist() == pytest.approx([5 / 14, 0.5])


@pytest.mark.checks("sampler/mopps")
def test_mopps_takes_the_drawn_rates_nearest_to_its_target():
    sampler = initial_states.MoppsSampler(target=0.3)
    for number, won in enumerate([0.0, 300.0, 500.0, 1000.0, 260.0]):  # so many that what is drawn is what was seen
        sampler.observe(np.array([number]), np.array([won]), np.array([1000.0]), np.array([0.0]))
    assert sampler.propose(3, 5, np.random.default_rng(0)).tolist() == [1, 4, 2]
    # With few observations the posterior is drawn from: a Beta(3, 1) is nearer to .3 than a Beta(1, 1) this often.
    fresh = initial_states.MoppsSampler(target=0.3)
    fresh.observe(np.array([0]), np.array([2.0]), np.array([2.0]), np.array([0.0]))
    draws, check = np.random.default_rng(1), np.random.default_rng(2)
    chosen = np.mean([fresh.propose(1, 2, draws)[0] == 0 for _ in range(4000)])
    nearer = np.abs(check.beta(3, 1, 400_000) - 0.3) < np.abs(check.beta(1, 1, 400_000) - 0.3)
    assert float(chosen) == pytest.approx(float(nearer.mean()), abs=0.03)


@pytest.mark.checks("sampler/sec")
def test_sec_moves_values_towards_mean_sizes_of_advantages_and_draws_by_softmax():
    sampler = experimental.SecSampler(categories=3, rate=0.5, temperature=0.4)
    # Starts 0, 3, 6 are of category 0; 1 and 4 of category 1; category 2 is not played.
    played, size = np.array([0, 3, 6, 1, 4]), np.array([0.6, 0.9, 0.0, 0.2, 0.6])
    sampler.observe(played, np.zeros(5), np.full(5, 8.0), size)
    assert sampler.values.tolist() == pytest.approx([0.25, 0.2, 0.0])
    sampler.observe(np.array([1]), np.zeros(1), np.full(1, 8.0), np.array([1.0]))
    assert sampler.values.tolist() == pytest.approx([0.25, 0.6, 0.0])
    draws = np.random.default_rng(0)
    category = np.array([sampler.propose(1, 9, draws)[0] for _ in range(6000)]) % 3
    weight = np.array([math.exp(value / 0.4) for value in (0.25, 0.6, 0.0)])
    assert (np.bincount(category) / 6000).tolist() == pytest.approx((weight / weight.sum()).tolist(), abs=0.025)


@pytest.mark.checks("sampler/sec", "sampler/group_dro")
def test_a_large_batch_has_the_shares_of_the_bandit_as_well():
    """8 states, 4 of each category, a batch of 4: each has category 0 with a chance of .9, so 3.6 of 4 (not 3.3)."""
    draws = np.random.default_rng(0)
    sampler = experimental.SecSampler(categories=2, temperature=1.0)
    sampler.values = np.array([math.log(9.0), 0.0])
    batches = np.array([sampler.propose(4, 8, draws) for _ in range(3000)])
    assert (batches % 2 == 0).sum(1).mean() == pytest.approx(3.6, abs=0.03)
    assert all(len(set(batch)) == 4 for batch in batches.tolist())
    assert sorted(sampler.propose(8, 8, draws).tolist()) == list(range(8))
    # Of six, at least two are of the other category: four are all there is.
    assert ((np.array([sampler.propose(6, 8, draws) for _ in range(50)]) % 2 == 0).sum(1) <= 4).all()

    robust = experimental.GroupDro(explore=0.0, sharpness=1.0)
    robust.bins = {number: 0 if number < 6 else 2 for number in range(8)}
    robust.scores = [0.0, -50.0, math.log(4.0)]
    batches = np.array([robust.propose(2, 8, draws) for _ in range(3000)])
    assert (batches >= 6).sum(1).mean() == pytest.approx(1.6, abs=0.03), "2 of the 8 states, with a chance of .8 each"


@pytest.mark.checks("sampler/sec")
def test_sec_counts_episodes_and_not_initial_states():
    sampler = experimental.SecSampler(categories=1, rate=1.0)
    sampler.observe(np.array([0, 1]), np.zeros(2), np.array([12.0, 4.0]), np.array([0.0, 0.8]))
    assert sampler.values.tolist() == pytest.approx([0.2])


@pytest.mark.checks("sampler/uniform")
def test_uniform_draws_every_start_alike_and_remembers_rates():
    sampler, draws = initial_states.UniformSampler(), np.random.default_rng(0)
    counts = np.bincount(np.concatenate([sampler.propose(2, 5, draws) for _ in range(3000)]), minlength=5)
    assert (counts / 3000).tolist() == pytest.approx([0.4] * 5, abs=0.03)
    assert sorted(sampler.propose(5, 5, draws).tolist()) == [0, 1, 2, 3, 4]
    for won in (3.0, 5.0):
        sampler.observe(START, np.array([won]), np.array([8.0]), np.array([0.0]))
    assert sampler.predict(START).tolist() == pytest.approx([9 / 18])  # nothing fades


@pytest.mark.checks("allocator/knapsack")
def test_the_value_of_a_group_is_the_chance_of_mixed_outcomes_times_the_gain():
    rate = np.array([0.5, 0.2, 0.0, 1.0])
    values = initial_states.signal_value(np.array([3, 2, 5, 5]), rate)
    # N = 3 at 1/2: mixed in 6 of 8 cases; N = 2 at 1/5: in 2 * .2 * .8. Gain p (1 - p)^2.
    assert values.tolist() == pytest.approx([0.75 * 0.5 * 0.25, 0.32 * 0.2 * 0.64, 0.0, 0.0])


@pytest.mark.checks("allocator/dars")
def test_dars_brings_hard_starts_to_the_signal_of_a_half():
    rate, sizes = np.array([0.25, 0.125, 0.5]), np.array([8, 16, 8])
    # N / 2 is the signal N * 2 a (1 - a) at a = 1/2: (4 - 8 * .375) / .375 = 2.67, (8 - 16 * .21875) / .21875 = 20.57.
    assert experimental.Dars(most=64).extend(rate, sizes) == [3, 21, 0]
    # Hardness-weighted: 2 (1 - a) N / 2, so (6 - 3) / .375 = 8 and (14 - 3.5) / .21875 = 48.
    assert experimental.Dars(weighted=True, most=64).extend(rate, sizes) == [8, 48, 0]
    assert experimental.Dars(weighted=True, most=40).extend(rate, sizes) == [8, 24, 0]
    # Where nothing succeeded a is half a success, .5 / 8: (4 - 8 * .1171875) / .1171875 = 26.1, rounded up as by the
    # authors (schedule_ET and schedule_HW of github.com/yangzhch6/DARS at 9b21b71), and (7.5 - .9375) / .1171875 = 56.
    assert experimental.Dars(most=64).extend(np.zeros(1), np.array([8])) == [27]
    assert experimental.Dars(weighted=True, most=80).extend(np.zeros(1), np.array([8])) == [56]
    assert experimental.Dars(most=64).extend(np.array([0.4]), np.array([8])) == [1]  # (4 - 3.84) / .48 = .33
    # For advantages divided by the deviation (grpo_use_std) S is 2 sqrt(a (1 - a)): (8 - 8 * .866) / .866 = 1.24 at 1/4
    # and (8 - 8 * .4841) / .4841 = 8.5 at half a success; weighted (12 - 6.93) / .866 = 5.9 and 22.98.
    rate, sizes = np.array([0.25, 0.0, 0.5]), np.full(3, 8)
    assert experimental.Dars(divided=True).extend(rate, sizes) == [2, 9, 0]
    assert experimental.Dars(divided=True, weighted=True).extend(rate, sizes) == [6, 23, 0]


@pytest.mark.checks("allocator/uniform")
def test_uniform_plays_every_start_as_often():
    assert initial_states.Uniform().plan(np.array([0.0, 0.9]), 6) == [6, 6]
    assert initial_states.Uniform().extend(np.array([0.0, 0.9]), np.array([6, 6])) == [0, 0]


def seen(sampler, rates: list[float], times: int = 1):
    """Return the sampler after it has seen 10 episodes of every start, `times` times."""
    for _ in range(times):
        count = len(rates)
        sampler.observe(np.arange(count), 10 * np.array(rates), np.full(count, 10.0), np.zeros(count))
    return sampler


@pytest.mark.checks("sampler/stages", "CRAFT-GUI")
def test_stages_go_from_easy_to_hard_starts():
    draws, sampler = np.random.default_rng(0), experimental.Stages(parts=3, rounds=2)
    assert sorted(sampler.propose(6, 6, draws).tolist()) == list(range(6)), "first the base policy is measured"
    seen(sampler, [0.9, 0.8, 0.5, 0.4, 0.1, 0.0])
    proposed = [sorted(sampler.propose(2, 6, draws).tolist()) for _ in range(7)]
    assert proposed == [[0, 1]] * 2 + [[2, 3]] * 2 + [[4, 5]] * 3, "the last stage lasts to the end"


@pytest.mark.checks("DRIVE")
def test_each_round_keeps_the_hardest_half_by_its_rates_so_far():
    draws, sampler = (
        np.random.default_rng(0),
        seen(experimental.Stages(rounds=1, keep=0.5), [0.9, 0.8, 0.5, 0.4, 0.1, 0]),
    )
    assert set(sampler.propose(2, 6, draws).tolist()) <= {3, 4, 5}
    assert sorted(sampler.order) == [3, 4, 5]
    seen(sampler, [0, 0, 0, 0, 0.9, 0.9], times=5)  # what has been learned is no longer hard
    assert 3 in sampler.propose(2, 6, draws).tolist() and len(sampler.order) == 2
    other = experimental.Stages(rounds=1, keep=0.5)
    other.restore(sampler.state())
    first, second = (item.propose(2, 6, np.random.default_rng(3)).tolist() for item in (sampler, other))
    assert first == second


@pytest.mark.checks("AceReason")
def test_one_domain_comes_after_the_other():
    draws, sampler = np.random.default_rng(0), experimental.Stages(parts=2, rounds=2, by="instruction")
    domains = [{number % 2 for number in sampler.propose(3, 8, draws).tolist()} for _ in range(5)]
    assert domains == [{0}, {0}, {1}, {1}, {1}]
    # Asked for six of a domain of four, it proposes these four and none of another domain.
    sampler = experimental.Stages(parts=2, rounds=2, by="instruction")
    batches = [sorted(sampler.propose(6, 8, draws).tolist()) for _ in range(3)]
    assert batches == [[0, 2, 4, 6], [0, 2, 4, 6], [1, 3, 5, 7]]
    with pytest.raises(ConfigError, match=r"stages\.by=domain is not known"):
        experimental.Stages(by="domain")


@pytest.mark.checks("sampler/group_dro")
def test_bins_that_lose_most_are_drawn_most():
    share = experimental.mixed_softmax(np.array([1.2, 0.8, 0.2]), 0.65, 0.01)
    assert share.tolist() == pytest.approx([0.4351, 0.3362, 0.2287], abs=1e-4)
    sampler = experimental.GroupDro(decay=0.5)
    # Two starts of 8 episodes lose 1, one of 8 loses 1/4: losses over shares of the batch, 1 / (2/3) and .25 / (1/3).
    index, episodes = np.array([0, 1, 2]), np.full(3, 8.0)
    sampler.bins = {0: 0, 1: 0, 2: 2}
    sampler.observe(index, np.array([0.0, 0.0, 6.0]), episodes, np.zeros(3))
    assert sampler.scores == [pytest.approx(1.5), None, pytest.approx(0.75)]
    sampler.observe(index[:1], np.array([4.0]), episodes[:1], np.zeros(1))
    assert sampler.scores[0] == pytest.approx(0.5 * 1.5 + 0.5 * 0.5)
    other = experimental.GroupDro(decay=0.5)
    other.restore(sampler.state())
    first, second = (item.propose(2, 6, np.random.default_rng(3)).tolist() for item in (sampler, other))
    assert first == second
    drawn = np.bincount([sampler.bin(int(sampler.propose(1, 3, np.random.default_rng(n))[0])) for n in range(3000)])
    # Bin 1 is empty: of the others, two starts of bin 0 share what one of bin 2 has alone.
    share = experimental.mixed_softmax(np.array([1.0, 0.0, 0.75]), 0.65, 0.01)[[0, 2]]
    assert float(drawn[0] / 3000) == pytest.approx(share[0] / share.sum(), abs=0.03)


@pytest.mark.checks("sampler/group_dro")
def test_a_start_leaves_its_bin_only_well_beyond_the_edge():
    edges = (0.4, 0.75)
    for rate, old, new in ((0.42, 0, 0), (0.44, 0, 1), (0.38, 1, 1), (0.36, 1, 0), (0.9, 0, 2), (0.42, None, 1)):
        assert experimental.bin_of_rate(rate, edges, 0.03, old) == new, (rate, old)


@pytest.mark.checks("allocator/shadow_price")
def test_sizes_in_the_limit_are_in_proportion_to_the_deviation_of_outcomes():
    predicted = np.array([0.5] * 5 + [0.1] * 3 + [0.5 - math.sqrt(0.24)] * 2)  # variances .25, .09, .01
    sizes = experimental.ShadowPrice(closed_form=True).plan(predicted, 8)
    assert sum(sizes) == 80
    assert [np.mean(sizes[:5]), np.mean(sizes[5:8]), np.mean(sizes[8:])] == pytest.approx([11.11, 6.67, 2.22], abs=0.4)
    # What is raised to the least of 2 is taken from the others: 12 is what there is, without spread too.
    for rates, expected in (([0.0, 1.0, 0.5], [2, 2, 8]), ([0.02, 0.5, 0.5], [2, 5, 5]), ([0.0, 1.0, 0.0], [4, 4, 4])):
        assert experimental.ShadowPrice(closed_form=True).plan(np.array(rates), 4) == expected


@pytest.mark.checks("allocator/shadow_price")
def test_of_the_arms_that_meet_the_budget_the_likeliest_are_played():
    arms, counts = np.array([4, 8, 12]), np.array([1, 1])
    value = np.log(np.array([[0.2, 0.3, 0.5], [0.45, 0.3, 0.25]]))
    # (4, 12), (8, 8) and (12, 4) meet 16: .05, .09 and .225.
    assert arms[experimental.cheapest_arms(value, arms, counts, 16)].tolist() == [12, 4]
    assert arms[experimental.cheapest_arms(value, arms, counts, 50)].tolist() == [12, 12], "else the nearest"
    # Two groups of the first bin and one of the second: (4, 12) and (8, 4) meet 20, .05 and .135.
    assert arms[experimental.cheapest_arms(value, arms, np.array([2, 1]), 20)].tolist() == [8, 4]


@pytest.mark.checks("allocator/shadow_price")
def test_arms_gain_their_loss_minus_the_price_of_what_they_play_beyond_the_mean():
    allocator = experimental.ShadowPrice(least=2, most=3.0, edges=(0.5,), rate=0.05)
    sizes = allocator.plan(np.array([0.2, 0.2, 0.8]), 4)
    assert sum(sizes) == 12 and sizes[0] == sizes[1]
    allocator.price = 0.1
    allocator.extend(np.array([0.0, 0.5, 1.0]), np.array(sizes))
    gains = allocator.gains[np.arange(2), np.array([sizes[0], sizes[2]]) - 2]
    assert gains.tolist() == pytest.approx([0.75 - 0.1 * (sizes[0] - 4), 0.0 - 0.1 * (sizes[2] - 4)])
    assert allocator.price == pytest.approx(0.1)  # the budget was met
    allocator.extend(np.zeros(3), np.array(sizes) + 2)
    assert allocator.price == pytest.approx(0.1 + 0.05 * 2)
    other = experimental.ShadowPrice(least=2, most=3.0, edges=(0.5,))
    other.restore(allocator.state())
    assert other.plan(np.array([0.2, 0.2, 0.8]), 4) == allocator.plan(np.array([0.2, 0.2, 0.8]), 4)


@pytest.mark.checks("allocator/knapsack")
def test_what_never_succeeded_gets_what_the_others_do_not_need():
    """By the authors' sampling_budget_by_knapsack: beyond 2 each, ln .1 / ln .5 = 3.3 at 1/2 and ln .1 / ln .75 = 8.004
    at 1/4 are enough, 11 in whole episodes; the best 15 of these two are 6 and 9, and 13 of 24 are left over.
    """
    allocator = initial_states.Knapsack(least=2, most=16, surplus=True)
    assert allocator.plan(np.array([0.5, 0.25, 0.0, 1.0]), 8) == [6, 9, 15, 2]
    assert initial_states.Knapsack(least=2, most=16).plan(np.array([0.5, 0.25, 0.0, 1.0]), 8) == [12, 16, 2, 2]
    assert allocator.plan(np.array([np.nan, 0.0, 1.0]), 8) == [8, 14, 2], "new ones get the usual size"
    assert allocator.plan(np.array([0.5, 1.0]), 8) == [5, 11], "with nothing to try, those that always succeed take it"
    assert allocator.plan(np.array([1.0, 1.0]), 8) == [8, 8], "where all succeed, all alike"
    assert allocator.plan(np.array([0.9, 0.9, 0.0]), 4) == [5, 5, 2], (
        "rare failures (21.8 are enough) take all there is"
    )
    assert allocator.plan(np.array([0.0, 1.0, 1.0]), 8) == [16, 2, 2], "but nothing takes more than `most`"
    surer = initial_states.Knapsack(least=2, most=16, surplus=True, confidence=0.99)
    assert surer.plan(np.array([0.5, 0.25, 0.0, 1.0]), 8) == [10, 16, 4, 2], "6 and 16 are enough"
    sampler = initial_states.MoppsSampler(decay=0.5)
    for won in (0.0, 0.0):
        sampler.observe(np.arange(3), np.array([won, 8.0, 4.0]), np.full(3, 8.0), np.zeros(3))
    assert sampler.observed(np.arange(4)).tolist() == pytest.approx([0.0, 1.0, 0.5, np.nan], nan_ok=True)


@pytest.mark.checks("allocator/dart")
def test_what_succeeds_gets_fewer_and_shorter_episodes():
    allocator = experimental.Dart(margin=2, recent=3)
    assert allocator.plan(np.array([0.0, 0.5, 1.0]), 8) == [8, 4, 2]
    index, success = np.array([5, 5, 7, 5, 5]), np.array([True, False, False, True, True])
    allocator.observe_lengths(index, np.array([9, 30, 4, 3, 4]), success)
    assert allocator.limits(np.array([5, 7])) == [11, 0]
    allocator.observe_lengths(index[:1], np.array([5]), success[:1])
    other = experimental.Dart(margin=2, recent=3)
    other.restore(allocator.state())
    assert other.limits(np.array([5, 7])) == [7, 0], "the longest of the newest three"


@pytest.mark.checks("sampler/vade", "VADE")
def test_vades_gain_may_be_the_variance_of_an_outcome_drawn_or_expected():
    sampler = experimental.VadeSampler(gain="expected_variance", visited=1.0, decay=1.0)
    for number, (won, lost) in enumerate([(2.0, 0.0), (1.0, 1.0), (9.0, 0.0)]):  # Beta(3, 1), Beta(2, 2), Beta(10, 1)
        sampler.observe(np.array([number]), np.array([won]), np.array([won + lost]), np.zeros(1))
    assert sampler.gains(3, np.random.default_rng(0)).tolist() == pytest.approx([0.15, 0.2, 10 / 132], abs=1e-8)
    drawn = experimental.VadeSampler(gain="variance")
    rates = experimental.VadeSampler().sampled_rates(50, np.random.default_rng(0))
    assert drawn.gains(50, np.random.default_rng(0)).tolist() == pytest.approx((rates * (1 - rates)).tolist())
    with pytest.raises(ConfigError, match=r"vade\.gain=entropy"):
        experimental.VadeSampler(gain="entropy")


@pytest.mark.checks("allocator/mixed", "TRACE")
def test_episodes_go_where_one_more_makes_mixed_outcomes_likelier():
    size = np.arange(1, 6)
    assert allocators.chance_of_mixed(0.5, size).tolist() == pytest.approx([0, 0.5, 0.75, 0.875, 0.9375])
    assert allocators.chance_of_mixed(0.9, size).tolist() == pytest.approx([0, 0.18, 0.27, 0.3438, 0.4095], abs=1e-4)
    assert allocators.Mixed().plan(np.array([0.5, 0.9, 0.02]), 3) == [4, 4, 1]
    assert allocators.Mixed(most=3).plan(np.array([0.5, 0.9, 0.02]), 3) == [3, 3, 3]
    outcome, value = np.array([0, 0, 1, 1]), np.array([0.5, 0.1, 0.9, 0.5])
    assert allocators.chance_of_other(outcome, value, 2).tolist() == pytest.approx([0.75, 0.19, 0.19, 0.75])


@pytest.mark.checks("allocator/interval", "XRPO")
def test_episodes_go_where_the_interval_of_the_success_rate_shrinks_most():
    rate, four = np.array([0.5, 0.25, 1.0]), np.full(3, 4)
    now, then = (allocators.half_width(rate, four, count, 0.05) for count in (four, four + 1))
    assert now.tolist() == pytest.approx([0.9187, 0.7956, 0.0], abs=1e-4)
    assert (now - then).tolist() == pytest.approx([0.2018, 0.1748, 0.0], abs=1e-4)
    interval = allocators.Interval(first=4, rounds=2, bonus=0.1)
    assert (interval.gain(rate, four, four) - now + then).tolist() == pytest.approx([0.0801] * 3, abs=1e-4)
    assert interval.plan(np.zeros(3), 8) == [4, 4, 4]
    first = interval.extend(rate, four)
    assert sum(first) == 6 and first[0] >= first[1] > first[2]
    second = interval.extend(rate, four + np.array(first))
    assert sum(second) == 6 and interval.extend(rate, four + np.array(first) + np.array(second)) == [0, 0, 0]


@pytest.mark.checks("sampler/value", "V0")
def test_the_kernel_shares_results_among_starts_that_look_alike():
    points, successes, episodes = np.array([[0.0], [1.0]]), np.array([3.0, 1.0]), np.array([4.0, 4.0])
    rates = seen_starts.kernel_rates(points, successes, episodes, np.array([[0.0], [99.0]]), 1.0)
    assert rates.tolist() == pytest.approx([0.553, 0.5], abs=1e-3)  # (.5 + 3 + .6065) / (1 + 4 + 2.4261); the prior


@pytest.mark.checks("sampler/value", "PCL")
@pytest.mark.parametrize("predictor", ["network", "kernel"])
def test_starts_that_never_came_are_chosen_by_what_they_look_like(predictor: str):
    """Success depends on the first of two numbers: 1/2 is met at 0. The second number is irrelevant."""
    looks = np.random.default_rng(0).uniform(-1, 1, (64, 2))
    sampler, draws = seen_starts.ValueSampler(predictor=predictor, bandwidth=0.3), np.random.default_rng(1)
    sampler.look = lambda index: looks[index]
    assert len(set(sampler.propose(16, 48, draws).tolist())) == 16
    for _ in range(3):
        index = draws.permutation(48)[:16]
        sampler.observe(index, np.round(8 / (1 + np.exp(-6 * looks[index, 0]))), np.full(16, 8.0), np.zeros(16))
    sampler.seen |= dict(zip(range(48, 64), looks[48:].tolist(), strict=True))
    order = np.argsort(sampler.predict(np.arange(48, 64)))
    assert np.corrcoef(looks[48:, 0][order], np.arange(16))[0, 1] > 0.85
    chosen = sampler.propose(2, 64, np.random.default_rng(2))
    candidates = np.random.default_rng(2).permutation(64)[:8]
    distance = np.abs(sampler.predict(candidates) - 0.5)
    assert chosen.tolist() == candidates[np.argsort(distance, kind="stable")[:2]].tolist()
    other = seen_starts.ValueSampler(predictor=predictor, bandwidth=0.3)
    other.restore(json.loads(json.dumps(sampler.state())))
    np.testing.assert_allclose(other.predict(candidates), sampler.predict(candidates))
    with pytest.raises(ConfigError, match=r"value\.predictor=table"):
        seen_starts.ValueSampler(predictor="table")
