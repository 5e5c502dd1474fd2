"""The effective horizon: tables worked out by hand, and shallow Q-iteration on rollouts against them."""

import itertools
import math

import numpy as np
import pytest
import torch
from learning.lock_world import FIELDS, ChoicePolicy

from robopolicy.core.errors import ConfigError
from robopolicy.core.spec import STATE, Field, WorldSpec
from robopolicy.core.world import Step
from robopolicy.rl.effective_horizon import (
    Greedy,
    fixed,
    measured_horizon,
    network_regression,
    primitives,
    sampled,
    sqirl,
    tabular_horizons,
)

ACTION = Field((1,), low=-1.0, high=1.0)
BOTH = np.array([-1.0, 1.0])[:, None, None]
"""Two actions, [A, C, D]."""


def two_decisions():
    """Reward .6 for action 0 first, 1 for actions 1 and 1. States: start, after 0, after 1, end."""
    transitions, rewards = np.zeros((4, 2, 4)), np.zeros((4, 2))
    transitions[0, 0, 1] = transitions[0, 1, 2] = 1
    transitions[1:, :, 3] = 1
    rewards[0, 0], rewards[2, 1] = 0.6, 1.0
    return transitions, rewards, np.array([1.0, 0, 0, 0]), 2


def lock(length, slip=0.0):
    """Reward 1 for `length` right actions (always action 1); a right one fails with probability `slip`."""
    transitions, rewards = np.zeros((length + 2, 2, length + 2)), np.zeros((length + 2, 2))
    for place in range(length):
        transitions[place, 0, length + 1] = 1
        transitions[place, 1, place + 1], transitions[place, 1, length + 1] = 1 - slip, slip
    transitions[length:, :, length + 1] = 1
    rewards[length - 1, 1] = 1.0 - slip
    return transitions, rewards, np.eye(length + 2)[0], length


@pytest.mark.checks("SQIRL/effective-horizon")
def test_two_decisions_by_hand():
    """Q^1(start) = (.6, .5): greedy takes .6, which is not the best. Q^2(start) = (.6, 1): 2 + log2(1 / .4^2)."""
    one, two = tabular_horizons(*two_decisions())
    assert (one.optimal, one.horizon) == (False, math.inf) and one.gap == pytest.approx(0.1)
    assert two.optimal and two.gap == pytest.approx(0.4)
    assert two.horizon == pytest.approx(2 + math.log2(1 / 0.16)) == pytest.approx(4.6439, abs=1e-4)


@pytest.mark.checks("SQIRL/effective-horizon")
def test_a_combination_lock_by_hand():
    """Random play opens what is left of a lock of 3 with 1/4: Q^k has the gap 2^(k-3), so H = 1 + 4, 2 + 2, 3."""
    assert [each.horizon for each in tabular_horizons(*lock(3))] == pytest.approx([5, 4, 3])
    gaps = [each.gap for each in tabular_horizons(*lock(3, slip=0.5))]  # the last gap of 1 is halved three times
    assert gaps == pytest.approx([2**-5, 2**-4, 2**-3])


@pytest.mark.checks("SQIRL/effective-horizon")
@pytest.mark.parametrize("seed", range(4))
def test_random_tables_agree_with_a_slow_recursion(seed):
    random, steps = np.random.default_rng(seed), 3
    transitions = random.dirichlet(np.ones(2), size=(2, 2))
    rewards, start = random.random((2, 2)) / 3, np.array([1.0, 0])

    def value(k, step, state, action):
        """Q^k by the definition."""
        if step == steps - 1:
            return rewards[state, action]
        after = 0.0
        for following in range(2):
            each = [value(max(k - 1, 1), step + 1, following, other) for other in range(2)]
            after += transitions[state, action, following] * (np.mean(each) if k == 1 else max(each))
        return rewards[state, action] + after

    def earned(rule, step, state):
        """Return of the policy rule[step][state]."""
        if step == steps:
            return 0.0
        action = rule[step][state]
        after = sum(transitions[state, action, s] * earned(rule, step + 1, s) for s in range(2))
        return rewards[state, action] + after

    every = itertools.product(itertools.product(range(2), repeat=2), repeat=steps)
    best = max(earned(rule, 0, 0) for rule in every)
    for each in tabular_horizons(transitions, rewards, start, steps):
        table = [[[value(each.k, t, s, a) for a in range(2)] for s in range(2)] for t in range(steps)]
        assert each.optimal == (earned(np.argmax(table, -1), 0, 0) > best - 1e-9)
        reached = [(0, 0), *((t, s) for t in (1, 2) for s in range(2))]  # every state can follow
        assert each.gap == pytest.approx(min(abs(np.subtract(*table[t][s])) for t, s in reached))


class TableWorld:
    """Plays a Markov decision process given by a table; the state is one-hot."""

    def __init__(self, batch_size, transitions, rewards, start, steps):
        self.batch_size, self.transitions, self.rewards, self.length = batch_size, transitions, rewards, steps
        self.spec = WorldSpec("table", {STATE: Field((len(start),))}, ACTION, 10.0, steps)
        self.state, self.time = np.zeros(batch_size, int), np.zeros(batch_size, int)

    def reset(self, rows=None, seeds=None, options=None):
        rows = np.arange(self.batch_size) if rows is None else np.asarray(rows)
        self.state[rows], self.time[rows] = 0, 0
        return self.observe()

    def observe(self):
        return {STATE: np.eye(len(self.rewards), dtype=np.float32)[self.state][:, None]}

    def step(self, actions):
        action = (actions[:, 0, 0] > 0).astype(int)
        valid = self.time < self.length
        reward = np.where(valid, self.rewards[self.state, action], 0.0)
        self.state = np.where(valid, self.transitions[self.state, action].argmax(-1), self.state)
        self.time = self.time + valid
        over = self.time >= self.length
        return Step(
            self.observe(), {}, {"reward": reward[:, None]}, valid[:, None], np.zeros_like(over), over, reward == 1
        )

    def close(self):
        pass


def averages(seen):
    """Return a `Regress` that averages targets by decision, state and action, and notes what it was given."""

    def regress(data, targets, before):
        seen.append((data, targets))
        columns = data.step, data.observation[STATE][:, 0].argmax(-1), data.chunk[:, 0]
        keys = list(zip(*(column.tolist() for column in columns), strict=True))
        table = {}
        for key, target in zip(keys, targets.tolist(), strict=True):
            table.setdefault(key, []).append(target)

        def values(observation, step, chunks):
            states = observation[STATE][:, 0].argmax(-1).tolist()
            rows = [
                [np.mean(table.get((t, s, c), [0.0])) for c in row]
                for t, s, row in zip(step.tolist(), states, chunks[..., 0].tolist(), strict=True)
            ]
            return torch.tensor(rows, dtype=torch.float64)

        return values

    return regress


@pytest.mark.checks("SQIRL/effective-horizon")
def test_rollouts_give_the_values_of_the_table_and_greedy_play_their_returns():
    seen = []
    world = TableWorld(64, *two_decisions())
    one = sqirl(world, fixed(BOTH), averages(seen), k=1, rollouts=640, episodes=20)
    assert one.returns == pytest.approx(0.6) and not one.success.any()
    data, outcomes = seen[0]
    first = data.step == 0
    for chunk, value in ((-1.0, 0.6), (1.0, 0.5)):
        assert float(outcomes[first & (data.chunk[:, 0] == chunk)].mean()) == pytest.approx(value, abs=0.06)
    two = sqirl(world, fixed(BOTH), averages([]), k=2, rollouts=64, episodes=20)
    assert two.returns == pytest.approx(1.0) and two.success.all()
    assert two.horizon == measured_horizon(2, 64, 2) == 8
    assert 0.3 < two.random_returns.mean() < 0.8 and two.steps == 2 * 64 * 2


def test_only_decisions_that_random_ones_follow_are_fitted():
    seen = []
    sqirl(TableWorld(8, *lock(3)), fixed(BOTH), averages(seen), k=1, rollouts=16, episodes=8)
    counts = [[int((data.step == step).sum()) for step in range(3)] for data, _ in seen]
    assert counts == [[16, 16, 16], [16, 32, 32], [16, 32, 48]]
    assert all((data.ended == (data.step == 2)).all() for data, _ in seen)


@pytest.mark.long
def test_the_network_learns_what_the_table_knows():
    world = TableWorld(64, *two_decisions())
    regress = network_regression(world.spec, 2)
    assert sqirl(world, fixed(BOTH), regress, k=1, rollouts=256, episodes=20).returns == pytest.approx(0.6)
    assert sqirl(world, fixed(BOTH), regress, k=2, rollouts=256, episodes=20).returns == pytest.approx(1.0)


def test_primitives_are_all_combinations_or_one_dimension_at_a_time():
    assert primitives(ACTION, 4)[:, :, 0].tolist() == [[-1.0] * 4, [0.0] * 4, [1.0] * 4]
    assert primitives(Field((2,), low=0.0, high=1.0), 1).shape == (9, 1, 2)
    many = primitives(Field((4,), low=-1.0, high=1.0), 2)
    assert many.shape == (9, 2, 4) and (np.abs(many).sum(-1) <= 1).all() and len(np.unique(many, axis=0)) == 9
    with pytest.raises(ConfigError, match="no bounds"):
        primitives(Field((2,)), 1)


def test_a_policy_s_samples_take_the_place_of_fixed_actions():
    policy = ChoicePolicy()
    propose = sampled(policy, 16, torch.Generator().manual_seed(0))
    states = np.repeat(np.random.default_rng(0).normal(size=(2, 1, FIELDS[STATE].size)).astype(np.float32), 200, 0)
    chunks = propose({STATE: states})
    assert chunks.shape == (400, 16, 1, 1)
    with torch.no_grad():
        chances = policy._scores({STATE: torch.tensor(states)}).exp().numpy()[[0, -1]]
    for half, chance in zip((chunks[:200], chunks[200:]), chances, strict=True):
        assert [(np.round(half) == option).mean() for option in (-1, 0, 1)] == pytest.approx(list(chance), abs=0.04)


def test_ties_are_broken_at_random():
    actor = Greedy(fixed(BOTH), np.random.default_rng(0))
    actor.values.append(lambda observation, step, chunks: torch.zeros(chunks.shape[:2]))
    actions, _ = actor.choose({STATE: np.zeros((400, 1, 4), np.float32)})
    assert 0.4 < (actions > 0).mean() < 0.6
