"""The potential that decides success: its pairs, its loss, its threshold, and what it learns of the point world."""

from dataclasses import replace

import point_world
import pytest
import torch

from robopolicy.core.randomness import Generators
from robopolicy.training.configuration import FitConfig
from robopolicy.training.fit import fit
from worldmodels import load_world_model, save_world_model
from worldmodels.configuration import EnsembleConfig
from worldmodels.data import recorded_transitions
from worldmodels.ensemble import EnsembleModel
from worldmodels.heads.goal import GoalPotential, episode_threshold, pairs_of

CONFIG = EnsembleConfig(members=2, width=32, depth=1, head_width=48, success="potential")


def test_pairs_are_of_one_episode_and_gain_what_lies_between():
    """A slow reference: the rewards of the steps, added one after another."""
    episodes = point_world.recorded(15)
    data = recorded_transitions(episodes)
    rows = torch.arange(len(data)).repeat(5)
    assert data.episode is not None
    pairs = pairs_of(data, rows, torch.Generator().manual_seed(0))
    assert torch.equal(pairs["success_first"], data.state[rows])
    distances = set()
    for row, second, gain in zip(rows.tolist(), pairs["success_second"], pairs["success_gain"], strict=True):
        total, later = 0.0, row
        while True:
            total += float(data.reward[later])
            if torch.equal(data.next_state[later], second):
                break
            later += 1
        assert data.episode[later] == data.episode[row] and float(gain) == pytest.approx(total, abs=1e-5)
        distances.add(later - row)
    assert 0 in distances and len(distances) > 5
    last = (episodes.starts + episodes.lengths - 1).tolist()
    assert torch.equal(pairs_of(data, torch.tensor(last), torch.Generator())["success_second"], data.next_state[last])


def test_the_scale_is_of_the_rewards_to_an_episodes_end():
    data = recorded_transitions(point_world.recorded(15))
    goal = GoalPotential(6, 8)
    goal.fit_scale(data)
    assert data.episode is not None
    ahead = [data.reward[row:][data.episode[row:] == data.episode[row]].sum() for row in range(len(data))]
    assert float(goal.scale) == pytest.approx(float(torch.stack(ahead).square().mean().sqrt()), rel=1e-4)


def test_the_loss_is_of_rises_and_of_zero_where_episodes_succeed():
    goal = GoalPotential(3, 8)
    goal.scale.fill_(2.0)
    states = torch.randn(4, 3, 3, generator=torch.Generator().manual_seed(1))
    success = torch.tensor([True, False, True])
    gain = torch.tensor([0.4, -0.2, 6.0])
    loss = goal.loss(states[0], states[1], gain, states[2], success)
    value = [goal(each).detach() for each in states]
    for row in range(3):
        errors = [value[1][row] - value[0][row] - gain[row] / 2, value[2][row] * success[row]]
        expected = sum(0.5 * error**2 if abs(error) < 1 else abs(error) - 0.5 for error in errors)
        assert float(loss[row].detach()) == pytest.approx(float(expected), abs=1e-5)
    assert torch.allclose(goal(states).detach(), torch.stack(value), atol=1e-6), "of any leading axes"


def test_as_many_episodes_exceed_the_threshold_as_succeeded():
    """Though single frames of failed episodes are higher than some that succeeded."""
    value = torch.tensor([0.0, 3.0, 1.0, 2.0, 0.5, 0.4, -1.0, 0.9])
    success = torch.tensor([False, True, False, True, False, False, False, False])
    episode = torch.tensor([4, 4, 5, 5, 7, 7, 9, 9])
    threshold = episode_threshold(value, success, episode)
    assert 0.9 <= float(threshold) < 2.0
    assert float(episode_threshold(value, torch.zeros(8, dtype=torch.bool), episode)) == torch.inf


@pytest.fixture(scope="module")
def learned():
    torch.set_num_threads(1)
    train, held = point_world.recorded().split(0.2, torch.Generator().manual_seed(0))
    model = EnsembleModel.build(CONFIG, point_world.SPEC, train, seed=0)
    generators = Generators(0)
    fit(model, model.batches(train, generators["batches"]), FitConfig(steps=400, learning_rate=3e-3), generators)
    model.calibrate(held)
    return model.eval(), held


@pytest.mark.long
def test_it_learns_how_far_the_goal_is(learned):
    """Rewards are progress to the goal, so its potential is 0.15 less the distance, or nearly so: 1 a unit."""
    model, held = learned
    data = recorded_transitions(held)
    distance = (data.next_state[:, 2:4] - data.next_state[:, :2]).norm(dim=-1)
    with torch.no_grad():
        value = model.heads.success_logit(data.next_state) * model.heads.goal.scale
    slope = torch.linalg.lstsq(torch.stack([distance, torch.ones_like(distance)], 1), value[:, None]).solution[0]
    assert float(slope) == pytest.approx(-1.0, abs=0.15)
    assert float(torch.corrcoef(torch.stack([value, distance]))[0, 1]) < -0.98


@pytest.mark.long
def test_recorded_episodes_succeed_as_often_as_they_did(learned):
    model, held = learned
    data = recorded_transitions(held)
    with torch.no_grad():
        flags = model.heads.succeeded(data.next_state)
        _, progress = model.heads.judge(torch.stack([data.state, data.next_state]), data.action[None])
    assert torch.equal(progress[0], flags), "single steps and whole paths are judged alike"
    seen = torch.stack([flags[data.episode == episode].any() for episode in range(len(held))])
    assert int(seen.sum()) == int(held.success.sum())
    assert float((seen == held.success).float().mean()) > 0.9


@pytest.mark.long
def test_it_is_saved_and_a_classifier_stays_the_default(learned, tmp_path):
    model, held = learned
    save_world_model(model, tmp_path / "model")
    loaded = load_world_model(tmp_path / "model")
    states = recorded_transitions(held).next_state[:50]
    assert isinstance(loaded, EnsembleModel)
    assert torch.equal(loaded.heads.success_logit(states), model.heads.success_logit(states))
    plain = EnsembleModel.build(replace(CONFIG, success="classifier"), point_world.SPEC, held, seed=0)
    assert plain.heads.goal is None and EnsembleConfig().success == "classifier"
    assert not any(name.startswith("heads.goal") for name in plain.state_dict())
