"""Planar tasks: experts succeed, rewards have the promised size, starts are random, quality can be graded."""

import itertools

import numpy as np
import pytest

from sims.experts import NOISE_LEVELS, NoisyController, noise_level
from sims.registry import load_task, make_world

NAMES = ["push_cube", "push_t", "reach_planar"]


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


@pytest.mark.parametrize("name", NAMES)
def test_the_expert_succeeds(name):
    success, returns = play(name, 64)
    assert success.mean() >= 0.95
    assert 1.0 < returns[success].mean() < 5.0


@pytest.mark.parametrize("name", NAMES)
def test_noise_levels_grade_the_quality(name):
    rates = [play(name, 64, level)[0].mean() for level in NOISE_LEVELS]
    assert all(better >= worse - 0.05 for better, worse in itertools.pairwise(rates))
    assert rates[0] > rates[-2] + 0.3
    assert rates[-1] < 0.4


@pytest.mark.parametrize("name", NAMES)
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
