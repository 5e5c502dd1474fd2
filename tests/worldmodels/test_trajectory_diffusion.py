"""Whole trajectories: they obey the dynamics they were trained on, guidance moves actions alone, ends are respected."""

import pytest
import torch
from point_world import GAIN, SPEC, recorded

from robopolicy.core.errors import ConfigError, DataError
from robopolicy.core.randomness import Generators
from robopolicy.nn.configuration import EdmConfig
from robopolicy.training.configuration import FitConfig
from robopolicy.training.fit import fit_stages
from worldmodels.configuration import TrajectoryConfig
from worldmodels.trajectory_diffusion import TrajectoryDiffusion, guidance_weight, subsequence_starts

CONFIG = TrajectoryConfig(length=8, width=32, depth=2, edm=EdmConfig(sigma_data=1.0, steps=12))


@pytest.fixture(scope="module")
def learned():
    return trained(700)


@pytest.fixture(scope="module")
def begun():
    """A model that has hardly learned: for what holds of any weights."""
    return trained(20)


def trained(steps: int):
    torch.set_num_threads(1)
    episodes = recorded(400)
    model = TrajectoryDiffusion.build(CONFIG, SPEC, episodes, 0)
    generators = Generators(0)
    fit_stages(model, episodes, FitConfig(steps=steps, learning_rate=2e-3, warmup=min(20, steps // 2)), generators)
    model.calibrate(episodes)
    return model, episodes


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.slow
def test_generated_steps_obey_the_dynamics(learned):
    model, _ = learned
    data = model.transitions(model.generate(200, generator()))
    assert len(data) > 500
    error = (data.next_state - data.state)[:, :2] - GAIN * data.action
    assert float(error.square().mean().sqrt()) < 0.06
    assert float((GAIN * data.action).square().mean().sqrt()) > 0.1
    constant = (data.next_state - data.state)[:, 2:4]
    assert float(constant.abs().max()) < 1e-5
    offset = data.state[:, 2:4] - data.state[:, :2] - data.state[:, 4:6]
    assert float(offset.abs().max()) < 1e-3


@pytest.mark.slow
@pytest.mark.checks("Policy-Guided Diffusion")
def test_guidance_climbs_the_policy_and_keeps_the_dynamics(learned):
    model, _ = learned

    def target(state, action):
        return -0.5 * (action - 0.8).square().sum(-1)

    likelihood, errors = [], []
    for strength in (0.0, 0.3, 1.0):
        data = model.transitions(model.generate(200, generator(), target, strength))
        likelihood.append(float(target(data.state, data.action).mean()))
        errors.append(float(((data.next_state - data.state)[:, :2] - GAIN * data.action).square().mean().sqrt()))
    assert likelihood[0] < likelihood[1] < likelihood[2]
    assert errors[1] < 0.1


@pytest.mark.checks("Policy-Guided Diffusion")
def test_the_weight_of_the_guidance_is_that_of_the_paper():
    # By hand: 1 - s + 0.3 sin(pi s) with sin(pi / 6) = 0.5, sin(pi / 4) = 0.7071068, sin(pi / 2) = 1.
    table = {0.0: 1.0, 1 / 6: 5 / 6 + 0.15, 0.25: 0.96213203, 0.5: 0.8, 0.75: 0.46213203, 5 / 6: 1 / 6 + 0.15, 1.0: 0.0}
    row_weights = {share: float(guidance_weight(share)) for share in table}
    assert row_weights == pytest.approx(table, abs=1e-6)
    weights = [float(guidance_weight(step / 200)) for step in range(201)]
    assert weights == sorted(weights, reverse=True)  # it never rises: no peak in the middle


@pytest.mark.parametrize("steepness", [1.0, 1000.0])
@pytest.mark.checks("Policy-Guided Diffusion")
def test_the_push_is_as_long_as_its_weight_however_steep_the_policy(begun, steepness):
    model, _ = begun

    def target(state, action):
        return -0.5 * steepness * (action - 5.0).square().sum(-1)

    clean = torch.randn(3, CONFIG.length, len(model.mean), generator=generator())
    push = model._push(target, 2.0)
    for share, weight in ((0.0, 1.0), (0.5, 0.8), (0.75, 0.46213203)):
        shift = push(clean, share)
        assert shift.flatten(1).norm(dim=1).tolist() == pytest.approx(3 * [2.0 * weight], rel=1e-5)
        assert not bool(shift[..., : 2 * model.states].any())  # actions alone are pushed


@pytest.mark.slow
def test_nothing_follows_an_end(learned):
    model, episodes = learned
    goal = torch.tensor([0.5, 0.5]).expand(4, 2)
    place = torch.tensor([[0.1, 0.1], [0.3, 0.3], [0.5, 0.5], [0.5, 0.5]])
    steps = torch.cat([place, goal, goal - place, torch.ones(4, model.actions)], 1)[None]
    data = model.transitions(steps)
    assert len(data) == 2 and data.terminated.tolist() == [False, True]
    closer = 0.2 * 2**0.5
    assert data.reward.tolist() == pytest.approx([closer, closer + 1], abs=0.1)
    long = subsequence_starts(episodes, 10)
    left = (episodes.starts + episodes.lengths)[episodes.episode_of_step[long]] - long
    assert bool(((left >= 10) | episodes.terminated[episodes.episode_of_step[long]]).all())


def test_bad_settings_are_refused(begun):
    with pytest.raises(ConfigError, match="multiple"):
        TrajectoryConfig(length=9)
    episodes = recorded(5)
    with pytest.raises(DataError, match="shorter"):
        subsequence_starts(episodes.select(~episodes.terminated), 100)
