"""Worlds in trials: the promises of a world, the scene that returns, and what the observation tells."""

import numpy as np
import pytest
from learning.doors_world import DOORS, DoorsWorld

from robopolicy.core.errors import ConfigError
from robopolicy.core.spec import STATE
from robopolicy.core.trials import TRIAL, with_trials_of
from robopolicy.testing.world import check_world
from sims.registry import make_world


def doors(rows=2, episodes=2, history=8):
    return with_trials_of({"trial_episodes": episodes}, DoorsWorld(rows, history))


def opened(*numbers):
    """Actions [B, 1, 1] that open these doors."""
    return 2 * np.array(numbers, float)[:, None, None] / (DOORS - 1) - 1


@pytest.mark.checks("ReLIC")
def test_a_trial_by_hand():
    """Row 0 finds the door at once, and in the second episode too; row 1 never does: 3 + 1 + 3 steps."""
    world = doors()
    first = world.reset(seeds=[3, 3])
    assert (first[TRIAL] == [0, 0, 1]).all() and first[STATE].shape == (2, 8, 1)
    right = int(world.world.right[0])
    wrong = (right + 1) % DOORS
    step = world.step(opened(right, wrong))
    assert step.reward[:, 0].tolist() == [1, 0] and not step.ended.any() and not step.success.any()
    step = world.step(opened(wrong, wrong))  # row 0: the scene begins again, whatever is done
    assert step.valid.all() and step.reward[0, 0] == 0
    assert step.observation[TRIAL][0, -1].tolist() == [0, 0, 1]
    assert int(world.world.right[0]) == right
    step = world.step(opened(right, wrong))
    assert step.success.tolist() == [True, False] and step.terminated.tolist() == [True, False]
    window = step.observation[TRIAL][0]
    assert window[-3:, 1].tolist() == [1, 0, 1] and window[:, 2].tolist() == [1] * 5 + [0, 1, 0]
    for _ in range(3):
        step = world.step(opened(right, wrong))
        assert not step.ended[1] and not step.valid[0, 0]
    step = world.step(opened(right, wrong))
    assert step.terminated.tolist() == [True, True] and step.success.tolist() == [True, False]
    assert world.spec.horizon == 7


def test_success_is_that_of_the_last_episode():
    world = doors(1)
    world.reset(seeds=[3])
    right = int(world.world.right[0])
    world.step(opened(right))
    world.step(opened(right))
    for _ in range(3):
        step = world.step(opened((right + 1) % DOORS))
    assert step.terminated[0] and not step.success[0]


def test_worlds_in_trials_keep_every_promise():
    check_world(lambda rows: make_world("reach_planar", rows, history=3, trial_episodes=2, horizon=2))
    check_world(lambda rows: make_world("reach_planar", rows, history=3, trial_episodes=2, latency_steps=1))


def test_wrong_numbers_and_cameras_are_refused():
    for number in (0, -1, 1.5, True, "two"):
        with pytest.raises(ConfigError, match="trial_episodes is"):
            doors(episodes=number)
    with pytest.raises(ConfigError, match="vectors"):
        make_world("reach_planar", 1, trial_episodes=2, cameras=("top",))
