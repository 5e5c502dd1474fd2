"""The definition of "cannot tell": the wrapper around the true simulator reproduces the simulator bitwise."""

import numpy as np
import pytest

from robopolicy.testing.world import check_world
from sims.registry import make_world
from worldmodels.env import Truncation
from worldmodels.oracle import wrap_oracle

ROWS, CHUNK = 6, 4


@pytest.mark.parametrize("task", ["push_cube", "push_t", "pick_place"])
def test_the_twin_repeats_the_simulator_bitwise(task):
    real, inside = make_world(task, ROWS, threads=1), make_world(task, ROWS, threads=1)
    twin = wrap_oracle(inside)
    seeds = np.arange(100, 100 + ROWS)
    expected, observation = real.reset(seeds=seeds), twin.reset(seeds=seeds)
    expert = real.task.expert()
    expert.reset()
    generator = np.random.default_rng(0)
    for decision in range(-(-real.spec.horizon // CHUNK) + 1):
        for key in expected:
            assert np.array_equal(expected[key], observation[key]), key
        base = expert.act(expected)[:, None].repeat(CHUNK, 1)
        actions = base + 0.3 * generator.standard_normal(base.shape)
        a, b = real.step(actions), twin.step(actions)
        assert np.array_equal(a.valid, b.valid)
        for name, reward in a.rewards.items():
            assert np.array_equal(reward, b.rewards[name]), name
        for flag in ("terminated", "truncated", "success"):
            assert np.array_equal(getattr(a, flag), getattr(b, flag)), (flag, decision)
        assert not b.horizon_end.any()
        for key in a.trace:
            assert np.array_equal(a.trace[key][a.valid], b.trace[key][a.valid]), key
        expected, observation = a.observation, b.observation
        rows = np.flatnonzero(a.ended)[:2]
        if len(rows):
            fresh = 1000 + 10 * decision + rows
            expected, observation = real.reset(rows, fresh), twin.reset(rows, fresh)
            expert.reset(rows)


def test_the_twin_passes_the_conformance_checks():
    check_world(lambda rows: wrap_oracle(make_world("push_cube", rows, threads=1)), renders=False)


def test_the_three_ends_stay_apart():
    twin = wrap_oracle(make_world("push_cube", 4, threads=1), truncation=Truncation(steps=7))
    twin.reset(seeds=np.arange(4))
    step = twin.step(np.zeros((4, 5, 2)))
    assert not step.ended.any()
    step = twin.step(np.zeros((4, 5, 2)))
    assert step.horizon_end.all() and not step.terminated.any() and not step.truncated.any()
    assert step.valid.sum(1).tolist() == [2] * 4
    whole = wrap_oracle(make_world("push_cube", 4, threads=1))
    whole.reset(seeds=np.arange(4))
    step = whole.step(np.zeros((4, whole.spec.horizon, 2)))
    assert step.truncated.all() and not step.terminated.any() and not step.horizon_end.any()
