"""Planar tasks: experts succeed, rewards have the promised size, starts are random, quality can be graded."""

import itertools

import numpy as np
import pytest

from robopolicy.core.spec import ENVIRONMENT_STATE
from sims.experts import NOISE_LEVELS, NoisyController, noise_level
from sims.registry import load_task, make_world
from sims.tasks import push_cube_moving
from sims.tasks.push_cube import TO_GOAL

NAMES = ["push_cube", "push_t", "reach_planar"]
ALL = [*NAMES, "push_cube_moving"]


def play(name, episodes, noise="none", first_seed=0):
    """Return success [E] and return [E] of the (disturbed) expert."""
    world = make_world(name, episodes)
    controller = NoisyController(load_task(name).expert(), noise_level(noise), 0, world.spec.action)
    observation = world.reset(seeds=first_seed + np.arange(episodes))
    controller.reset()
    returns = np.zeros(episodes)
    while True:
        step = world.step(controller.act(observation)[:, None])
        observation = step.observation
        returns += step.reward.sum(axis=1)
        if step.ended.all():
            world.close()
            return step.success, returns


@pytest.mark.parametrize("name", ALL)
def test_the_expert_succeeds(name):
    success, returns = play(name, 64)
    assert success.mean() >= 0.95
    assert 1.0 < returns[success].mean() < 5.0


@pytest.mark.long
@pytest.mark.parametrize("name", ALL)
def test_noise_levels_grade_the_quality(name):
    rates = [play(name, 64, level)[0].mean() for level in NOISE_LEVELS]
    assert all(better >= worse - 0.05 for better, worse in itertools.pairwise(rates))
    assert rates[0] > rates[-2] + 0.3
    assert rates[-1] < 0.4


@pytest.mark.parametrize("name", ALL)
def test_starts_are_varied_and_unsolved(name):
    world = make_world(name, 256)
    observation = world.reset(seeds=np.arange(256))
    task = load_task(name)
    frame = {key: observation[key][:, -1] for key in task.observation}
    assert not task.succeeded(frame).any()
    for key in task.observation:
        assert len(np.unique(frame[key], axis=0)) == 256


@pytest.mark.parametrize("name", NAMES)
def test_standing_still_earns_nothing_and_names_cover_the_vectors(name):
    world = make_world(name, 32, terminate_on_success=False)
    world.reset(seeds=np.arange(32))
    step = world.step(np.zeros((32, 10, 2)))
    assert np.abs(step.reward.sum(axis=1)).max() < 0.05
    for field in world.spec.observation.values():
        assert len(field.names) == field.size
    assert len(world.spec.action.names) == world.spec.action.size
    assert world.spec.success
    assert world.spec.instructions[0]


def test_a_moving_goal_is_where_its_formula_says_whatever_the_chunks_and_in_pictures_too():
    fine, coarse = make_world("push_cube_moving", 3, history=2), make_world("push_cube_moving", 3, history=2)
    goals = push_cube_moving.FIELD.names.index("goal_x")
    first = fine.reset(seeds=[1, 2, 3])[ENVIRONMENT_STATE][:, -1]
    coarse.reset(seeds=[1, 2, 3])
    for _ in range(12):
        step = fine.step(np.zeros((3, 1, 2)))
    chunk = coarse.step(np.zeros((3, 12, 2)))
    for key, value in step.observation.items():
        np.testing.assert_array_equal(value, chunk.observation[key])
    last = step.observation[ENVIRONMENT_STATE][:, -1]
    parameters = fine.snapshot().arrays["goal"]
    center, angle, rate = parameters[:, :2], parameters[:, 2], parameters[:, 3]
    for states, time in ((first, 0.0), (last, 1.2)):
        now = angle + rate * time
        expected = center + push_cube_moving.RADIUS * np.stack([np.cos(now), np.sin(now)], -1)
        np.testing.assert_allclose(states[:, goals : goals + 2], expected, atol=1e-6)
        np.testing.assert_allclose(states[:, TO_GOAL], expected - states[:, 0:2], atol=1e-6)
        speed = np.linalg.norm(states[:, push_cube_moving.VELOCITY], axis=1)
        np.testing.assert_allclose(speed, np.abs(rate) * push_cube_moving.RADIUS, atol=1e-6)
        assert (push_cube_moving.SPEEDS[0] <= speed).all() and (speed <= push_cube_moving.SPEEDS[1]).all()
    # The velocity is the derivative of the position.
    goal_at = push_cube_moving.goal_at
    apart = (goal_at(parameters, np.full((3, 1), 1e-4)) - goal_at(parameters, np.zeros((3, 1))))[:, 0] / 1e-4
    np.testing.assert_allclose(apart[:, 0:2], first[:, push_cube_moving.VELOCITY], atol=1e-4)
    picture = fine.render([0])
    fine.restore(coarse.snapshot([0]), [0])
    np.testing.assert_array_equal(picture, fine.render([0]))
    fine.reset([0], seeds=[1])
    assert (picture != fine.render([0])).any()
