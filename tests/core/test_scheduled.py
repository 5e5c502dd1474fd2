"""A world that asks for a formula at scheduled times: rewards, ends and what is read, by hand on a line."""

import numpy as np
import pytest

from robopolicy.benchmarks.small_worlds import LineWorld
from robopolicy.core.errors import ConfigError
from robopolicy.core.scheduled import SCHEDULE, ScheduledWorld, SchedulesByValue, with_schedules_of, without_schedules
from robopolicy.core.spec import STATE
from robopolicy.core.subgoals import START

THERE_AND_BACK = "F[2,4](x >= 2) & F[5,8](x <= 0)"


def played(text, times, moves, horizon=10):
    """Return rewards by name [C], success, the control steps, and the world after the moves of one episode."""
    world = ScheduledWorld(LineWorld(1, horizon), text)
    world.reset(seeds=[0])
    world.times[:] = times
    world._distance = world._far({STATE: np.zeros((1, 1, 1))})
    step = world.step(np.array(moves, float)[None, :, None])
    count = int(step.valid.sum())
    return {name: each[0, :count].tolist() for name, each in step.rewards.items()}, bool(step.success[0]), count, step


@pytest.mark.checks("TGPO-STL")
def test_rewards_by_hand():
    rewards, success, count, step = played(THERE_AND_BACK, [3, 6], [1, 1, 0.5, -1, -1, -1, -1, -1])
    # 2 away; met at 3; then from .5 beyond 0 ... the second is 2.5 away at 3, and met at 6.
    assert rewards["approach"] == pytest.approx([1, 1, 0, 1, 1, 0.5])
    assert rewards["goals"] == [0, 0, 1, 0, 0, 1] and rewards["violations"] == [0] * 6
    assert success and count == 6 and bool(step.terminated[0])


@pytest.mark.checks("TGPO-STL")
def test_a_missed_sub_goal_ends_the_episode():
    rewards, success, count, _ = played(THERE_AND_BACK, [2, 6], [1, 0.5, 1, -1])
    assert rewards["goals"] == [0, -1] and not success and count == 2
    # It must be met when it is due: having been there before does not count.
    rewards, success, count, _ = played(THERE_AND_BACK, [4, 6], [1, 1, -1, 0.5])
    assert rewards["goals"] == [0, 0, 0, -1] and not success


@pytest.mark.checks("TGPO-STL")
def test_a_violated_invariant_costs_and_prevents_success():
    text = "F[2,4](x >= 2) & G[0,5](x < 2.5)"
    rewards, success, count, _ = played(text, [3], [1, 1, 1, 0, 0])
    assert rewards["violations"] == pytest.approx([0, 0, -0.1, -0.1, -0.1])
    assert rewards["goals"] == [0, 0, 1, 0, 0] and not success and count == 5
    _, success, count, _ = played(text, [3], [1, 1, 0.25, 0, 0])
    assert success and count == 5  # success once the invariant's interval is over
    rewards, success, _, _ = played("(x < 1.5) U[2,4] (x >= 2)", [3], [1, 0, 1])
    assert success and rewards["violations"] == [0, 0, 0]
    rewards, success, _, _ = played("(x < 1.5) U[2,4] (x >= 2)", [3], [1, 1, 0])
    assert not success and rewards["violations"] == pytest.approx([0, -0.1, 0])


@pytest.mark.checks("TGPO-STL")
def test_success_implies_the_formula_on_random_walks():
    text = "F[1,4](x > 0.5) & F[2,6](x < 0.2) & G[0,6](abs(x) < 2)"
    world = ScheduledWorld(LineWorld(400, 8), text)
    world.reset(seeds=np.arange(400))
    moves = np.random.default_rng(0).uniform(-1, 1, size=(400, 8, 1))
    step = world.step(moves)
    x = np.concatenate([np.zeros((400, 1)), moves[..., 0].cumsum(axis=1)], axis=1)
    robustness = world.specification.robustness({STATE: x[..., None]}, np.full(400, 9))
    assert 5 < step.success.sum() < 200 and (robustness[step.success] >= 0).all()


def test_what_is_read_by_hand():
    world = ScheduledWorld(LineWorld(1, 10, history=2), THERE_AND_BACK)
    world.reset(seeds=[0])
    world.times[:] = [3, 6]
    step = world.step(np.array([[[1.0], [1.0]]]))
    # Pursued: the first; due in 1 of 10 steps; both open, due in 1 and 4.
    np.testing.assert_allclose(step.observation[SCHEDULE][0, -1], [1, 0, 0, 0.1, 1, 1, 0.1, 0.4], atol=1e-6)
    step = world.step(np.array([[[0.0], [-1.0]]]))
    np.testing.assert_allclose(step.observation[SCHEDULE][0, -1], [0, 1, 0, 0.2, 0, 1, 0, 0.2], atol=1e-6)
    np.testing.assert_allclose(step.observation[SCHEDULE][0, -2], [0, 1, 0, 0.3, 0, 1, 0, 0.3], atol=1e-6)
    assert world.spec.observation[SCHEDULE].size == 8 and world.spec.rewards == ("approach", "goals", "violations")


@pytest.mark.checks("TGPO-STL")
def test_schedules_are_those_that_are_valued():
    """A critic that likes late times: the best of 64 while being judged, more of them while learning."""
    world = ScheduledWorld(LineWorld(500, 30), "F[1,20](x > 1)")
    assert isinstance(world, SchedulesByValue)
    world.reset(seeds=np.arange(500))
    uniform = world.times.copy()
    world.reset(seeds=np.arange(500))
    np.testing.assert_array_equal(world.times, uniform)
    late = lambda observation: 3 * observation[SCHEDULE][:, -1, -1]  # noqa: E731
    world.choose_by(late, best=False)
    world.reset(seeds=np.arange(500))
    stays = (world.times == uniform).mean()
    assert uniform.mean() + 3 < world.times.mean() < 20 and 0.2 <= stays < 0.4
    world.choose_by(late, best=True)
    world.reset(seeds=np.arange(500))
    assert world.times.mean() > 19
    # Rows are independent of the others.
    some = world.times[3:7].copy()
    world.reset(rows=[3, 4, 5, 6], seeds=[3, 4, 5, 6])
    np.testing.assert_array_equal(world.times[3:7], some)
    plain = ScheduledWorld(LineWorld(500, 30), "F[1,20](x > 1)", by_value=False)
    plain.choose_by(late, best=True)
    plain.reset(seeds=np.arange(500))
    np.testing.assert_array_equal(plain.times, uniform)


def test_options_make_it_and_wrong_ones_are_refused():
    options = {"stl": THERE_AND_BACK, "schedules": "uniform", "style": 1}
    assert without_schedules(options) == {"style": 1, "terminate_on_success": False}
    assert without_schedules({"style": 1}) == {"style": 1}
    line = LineWorld(1)
    assert with_schedules_of({}, line) is line
    assert (with_schedules_of(options, line).times == 0).all() and START == -1
    with pytest.raises(ConfigError, match="critic, uniform or the folder"):
        with_schedules_of({**options, "schedules": "random"}, line)
    with pytest.raises(ConfigError, match=r"set world\.options\.stl"):
        with_schedules_of({"schedules": "uniform"}, line)
    with pytest.raises(ConfigError, match="no element 'y'"):
        with_schedules_of({"stl": "F[1,2](y > 1)"}, line)
