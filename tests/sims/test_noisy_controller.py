"""Disturbed experts: repeatable, bounded, with the stated share of random steps."""

from types import SimpleNamespace

import numpy as np
import pytest

from robopolicy.core.errors import ConfigError
from robopolicy.core.spec import Field
from sims.experts import Noise, NoisyController, noise_level

ACTION = Field((2,), low=(-1.0, -3.0), high=(1.0, 3.0))


class Still:
    def __init__(self):
        self.resets = []

    def reset(self, rows=None):
        self.resets.append(rows)

    def act(self, observation):
        return np.zeros((len(observation["x"]), 2))


def run(noise, seed=0, steps=400, batch=50):
    controller = NoisyController(Still(), noise, seed, ACTION)
    return np.stack([controller.act({"x": np.zeros(batch)}) for _ in range(steps)])


def test_the_same_seed_repeats_the_same_disturbance():
    noise = Noise(gaussian=0.2, random=0.3)
    assert np.array_equal(run(noise, 1), run(noise, 1))
    assert not np.array_equal(run(noise, 1), run(noise, 2))


def test_without_noise_the_actions_are_the_experts():
    assert not run(Noise()).any()


@pytest.mark.parametrize("high", [np.inf, (0.5, np.inf)])
def test_without_noise_actions_need_no_range(high):
    actions = np.array([[7.0, -9.0], [0.25, 1e6]])
    expert = SimpleNamespace(reset=lambda rows: None, act=lambda observation: actions)
    acted = NoisyController(expert, Noise(), 0, Field((2,), high=high)).act({})
    assert np.array_equal(acted, actions)  # what is beyond the range is the world's to clip, or to execute


def test_gaussian_noise_has_the_stated_spread_and_stays_in_range():
    actions = run(0.1)
    assert np.allclose(actions.std(axis=(0, 1)), [0.1, 0.3], rtol=0.03)
    wide = run(3.0)
    assert np.abs(wide[..., 0]).max() == 1.0
    assert np.abs(wide[..., 1]).max() == 3.0


def test_random_spells_are_held_and_take_the_stated_share():
    actions = run(Noise(random=0.4, hold=5))[100:]
    busy = actions[..., 0] != 0
    assert busy.mean() == pytest.approx(0.4, abs=0.03)
    same = (actions[1:] == actions[:-1]).all(axis=-1) & busy[1:]
    assert same.sum() / busy[1:].sum() == pytest.approx(0.8, abs=0.03)


def test_reset_ends_spells_and_reaches_the_expert():
    expert = Still()
    controller = NoisyController(expert, Noise(random=0.999, hold=1000), 0, ACTION)
    for _ in range(200):
        held = controller.act({"x": np.zeros(4)})
    assert held.any(axis=1).all()
    controller.reset([1])
    assert expert.resets == [[1]]
    after = controller.act({"x": np.zeros(4)})
    assert np.array_equal(after[[0, 2, 3]], held[[0, 2, 3]])
    assert not np.array_equal(after[1], held[1])


def test_wrong_settings_are_explained():
    for noise in (0.1, Noise(random=0.1)):
        with pytest.raises(ConfigError, match=r"finite bounds.*noise=\[none\]"):
            NoisyController(Still(), noise, 0, Field((2,)))
    with pytest.raises(ConfigError, match="random"):
        Noise(random=1.0)
    with pytest.raises(ConfigError, match="Did you mean 'medium'"):
        noise_level("medum")
