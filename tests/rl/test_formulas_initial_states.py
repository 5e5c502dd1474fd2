"""Which starts are played and how often: beliefs, bandits and budgets by hand."""

import math

import numpy as np
import pytest

from robopolicy.rl import initial_states
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


@pytest.mark.checks("allocator/uniform")
def test_uniform_plays_every_start_as_often():
    assert initial_states.Uniform().plan(np.array([0.0, 0.9]), 6) == [6, 6]
    assert initial_states.Uniform().extend(np.array([0.0, 0.9]), np.array([6, 6])) == [0, 0]
