"""One model in three roles: it acts like the data, knows what follows, and planning with it is better than not."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from point_world import GAIN, SPEC, recorded

from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import require_trainable
from robopolicy.core.randomness import Generators
from robopolicy.core.returns import returns_to_go
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE
from robopolicy.nn.configuration import EdmConfig
from robopolicy.policies import load_policy
from robopolicy.policies.configuration import JointConfig
from robopolicy.policies.joint import ACTION, FUTURE, VALUE, JointModel
from robopolicy.testing.policy import Level, check_policy
from robopolicy.training.configuration import FitConfig
from robopolicy.training.fit import fit

CONFIG = JointConfig(chunk=1, width=32, depth=2, heads=2, batch_size=128, edm=EdmConfig(sigma_data=1.0, steps=6))


@pytest.fixture(scope="module")
def learned():
    torch.set_num_threads(1)
    episodes = recorded(400)
    model = JointModel.build(CONFIG, SPEC, episodes, 0)
    generators = Generators(0)
    batches = model.batches(episodes, generators["batches"])
    fit(model, batches, FitConfig(steps=900, learning_rate=3e-3, warmup=20), generators)
    return model.eval(), episodes


def states(episodes, count=300):
    frames = torch.arange(count) + episodes.episode_of_step[:count]
    return torch.cat([episodes.observation[STATE][frames], episodes.observation[ENVIRONMENT_STATE][frames]], 1)


def draws(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.slow
def test_it_knows_what_follows_an_action(learned):
    model, episodes = learned
    state, action = states(episodes), episodes.actions[:300]
    future = model.draw({"state": state, ACTION: action}, draws())[FUTURE]
    error = (future[:, :2] - GAIN * action).square().mean().sqrt()
    other = (future[:, :2] - GAIN * action.roll(1, 0)).square().mean().sqrt()
    assert float(error) < 0.08 and float(other) > 1.5 * float(error)


@pytest.mark.slow
def test_it_acts_towards_the_goal_and_values_follow_returns(learned):
    model, episodes = learned
    state = states(episodes)
    action = model.draw({"state": state}, draws())[ACTION]
    offset = state[:, 4:6]
    towards = torch.nn.functional.cosine_similarity(action, offset)[offset.norm(dim=1) > 0.4]
    assert float(towards.mean()) > 0.35  # the data is noisy itself
    drawn = model.draw({"state": state, ACTION: episodes.actions[:300]}, draws())
    true = returns_to_go(episodes.reward, episodes, CONFIG.discount)[:300]
    assert float(torch.corrcoef(torch.stack([drawn[VALUE][:, 0], true]))[0, 1]) > 0.2


@pytest.mark.slow
def test_planning_takes_the_action_that_is_worth_most(learned):
    model, episodes = learned
    planner = model.planning(8)
    state = states(episodes, 200)
    _, scores = planner.plan(state, draws())
    assert scores.shape == (200, 8) and float(scores.std(1).mean()) > 0
    observation = {STATE: state[:, None, :2], ENVIRONMENT_STATE: state[:, None, 2:]}
    progress = []
    for actor in (model.planning(1), planner):
        decision = actor.act(observation, draws())
        after = state[:, :2] + GAIN * decision.actions[:, 0]
        progress.append(float((state[:, 4:6].norm(dim=1) - (state[:, 2:4] - after).norm(dim=1)).mean()))
    assert progress[1] > progress[0]


@pytest.mark.slow
def test_checkpoints_and_refusals(learned, tmp_path):
    model, episodes = learned
    model.save(tmp_path / "joint")
    again = load_policy(tmp_path / "joint")
    assert isinstance(again, JointModel)
    first, second = (each.draw({"state": states(episodes, 4)}, draws())[ACTION] for each in (model, again))
    assert np.array_equal(first.numpy(), second.numpy())
    assert check_policy(model, load_policy, level=Level.ACTS).level == Level.ACTS
    with pytest.raises(ConfigError, match="lacks log_prob"):
        require_trainable(model)
    with pytest.raises(ConfigError, match="reads vectors and no instructions"):
        JointModel(CONFIG, replace(SPEC, instructions=("left", "right")))
    with pytest.raises(ConfigError, match="policy_fraction"):
        JointConfig(policy_fraction=1.0)
