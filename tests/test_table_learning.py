"""Tables of the benchmark of papers: values and bounds by hand, and PPO that learns."""

import math

import numpy as np
import pytest

from robopolicy.benchmarks.table_learning import (
    Table,
    advantages,
    covering_length,
    effective_horizon,
    random_table,
    steps_to_learn,
)


def lock(length: int) -> Table:
    """Action 0 goes on, action 1 back to the first state; only going on in the last state is rewarded."""
    transitions = np.zeros((length, 2, length))
    for state in range(length):
        transitions[state, 0, min(state + 1, length - 1)] = transitions[state, 1, 0] = 1.0
    rewards = np.zeros((length, 2))
    rewards[-1, 0] = 1.0
    return Table(transitions, rewards, np.eye(length)[0], length)


def test_values_and_bounds_of_a_lock_by_hand():
    """Random play opens 3 digits in 1 of 8 episodes and meets the last decision in 1 of 8.

    Gaps are smallest at the first decision: 1/4 of Q^1, 1/2 of Q^2, 1 of Q^3: the least of 1 + 4, 2 + 2 and 3 + 0 is 3.
    """
    table = lock(3)
    assert table.best_value() == 1.0 and table.value(table.random_policy()) == pytest.approx(1 / 8)
    assert table.value(np.broadcast_to([1.0, 0.0], (3, 3, 2))) == 1.0
    assert covering_length(table) == pytest.approx(math.log(8))
    assert effective_horizon(table) == pytest.approx(3 * math.log(2))


def test_advantages_by_hand():
    """Rewards 0 and 1, values .5 and .25: 1 - .25 = .75 last; 0 + .25 - .5 + .5 * .75 = .125 first."""
    result = advantages(np.array([[0.0], [1.0]]), np.array([[0.5], [0.25]]), trace=0.5)
    assert result[:, 0].tolist() == [0.125, 0.75]


def test_random_tables_have_something_to_learn_and_a_best_return_of_one():
    draws = np.random.default_rng(0)
    for table in (random_table(draws) for _ in range(40)):
        assert table.best_value() == pytest.approx(1.0) and table.value(table.random_policy()) < 0.999
        np.testing.assert_allclose(table.transitions.sum(-1), 1.0)


@pytest.mark.long
def test_a_longer_lock_needs_more():
    needs = [np.median([steps_to_learn(lock(length), seed) for seed in range(5)]) for length in (2, 4, 6)]
    assert 0 < needs[0] < needs[1] < needs[2]
