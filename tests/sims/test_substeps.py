"""Options of a world that change the timestep alone (substeps) or the time limit alone (horizon)."""

import numpy as np
import pytest

from robopolicy.core.errors import ConfigError
from sims.engine import MujocoWorld
from sims.registry import load_task, make_world


def test_substeps_change_the_timestep_and_not_the_rate_of_control():
    states = {}
    for substeps in (None, 10, 5, 80):
        world = MujocoWorld(load_task("push_t"), 3, substeps=substeps, terminate_on_success=False)
        world.reset(seeds=[0, 1, 2])
        world.step(np.tile([[[0.7, -0.3]]], (3, 4, 1)))
        states[substeps] = world.snapshot().arrays["state"]
        assert world.model.opt.timestep == pytest.approx(0.1 / (substeps or 10))
        np.testing.assert_allclose(states[substeps][:, 0], 0.4, rtol=1e-12)  # 4 control steps at 10 Hz
    assert np.array_equal(states[None], states[10])
    error = {substeps: np.abs(states[substeps] - states[80]).max() for substeps in (10, 5)}
    assert 0 < error[10] < error[5] < 0.1


def test_invalid_substeps_are_refused():
    with pytest.raises(ConfigError, match=r"substeps, horizon of at least 1, but got .*substeps=0"):
        make_world("push_t", 1, substeps=0)
    with pytest.raises(ConfigError, match=r"world.options.substeps is 2.5, which is not an integer or null"):
        make_world("push_t", 1, substeps=2.5)


def test_another_time_limit_truncates_there_and_changes_nothing_before():
    worlds = [make_world("push_t", 2, horizon=horizon, terminate_on_success=False) for horizon in (None, 5, 300)]
    assert [world.spec.horizon for world in worlds] == [120, 5, 300]
    actions = np.full((2, 5, 2), 0.3)
    for world in worlds:
        world.reset(seeds=np.array([1, 2]))
    steps = [world.step(actions) for world in worlds]
    assert [step.truncated.tolist() for step in steps] == [[False] * 2, [True] * 2, [False] * 2]
    for step in steps[1:]:
        np.testing.assert_array_equal(step.reward, steps[0].reward)
    with pytest.raises(ConfigError, match="horizon"):
        make_world("push_t", 2, horizon=0)
