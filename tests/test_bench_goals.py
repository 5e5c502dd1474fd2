"""`bench goals`: the loss of LeWM by hand, windows, plans, starts and goals; a missing package is one sentence."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from robopolicy.benchmarks import goals, lewm
from robopolicy.cli import main
from robopolicy.core.errors import ConfigError
from robopolicy.core.spec import ENVIRONMENT_STATE
from robopolicy.data.record import record
from sims.registry import make_expert, make_world
from worldmodels.checkpoint import save_world_model
from worldmodels.configuration import EnsembleConfig, LatentEnsembleConfig
from worldmodels.latent_ensemble import LatentEnsembleModel


class Counting(nn.Module):
    """A stand-in with their interface: a frame's embedding is its mean colour, and an action block moves it."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def encode(self, info):
        info["emb"] = self.scale * info["pixels"].mean((-2, -1))
        info["act_emb"] = info["action"].sum(-1, keepdim=True).expand(-1, -1, 3)
        return info

    def predict(self, embedding, action):
        return embedding + action


class Summed(nn.Module):
    """A stand-in for SIGReg that asserts its layout, [frames, N, D]."""

    def forward(self, embedding):
        assert embedding.shape == (4, 2, 3)
        return embedding.sum()


def test_the_loss_is_the_error_of_the_next_embeddings_and_the_guard_on_all():
    generator = torch.Generator().manual_seed(0)
    pixels, action = torch.randn(2, 4, 3, 8, 8, generator=generator), torch.randn(2, 3, 10, generator=generator)
    learner = lewm.Learner(Counting(), Summed(), "observation.images.top", 2)
    losses = learner.loss({"pixels": pixels, "action": action}, generator)
    colour = pixels.mean((-2, -1))
    for row in range(2):
        error = torch.zeros(())
        for frame in range(3):
            error += (colour[row, frame] + action[row, frame].sum() - colour[row, frame + 1]).square().mean() / 3
        torch.testing.assert_close(losses["predicted"][row], error)
    torch.testing.assert_close(losses["sigreg"], 0.09 * colour.sum().expand(2))


@pytest.mark.long
def test_the_loss_is_that_of_their_classes():
    pytest.importorskip("stable_worldmodel")
    from stable_worldmodel.wm import SIGReg

    torch.manual_seed(0)
    model = lewm.build(lewm.TINY, 16, 2).eval()  # without dropout and statistics of the batch
    pixels, action = torch.randn(8, 4, 3, 16, 16), torch.randn(8, 3, 10)
    learner = lewm.Learner(model, SIGReg(lewm.KNOTS, lewm.DIRECTIONS), "", 8)
    losses = learner.loss({"pixels": pixels, "action": action}, torch.Generator().manual_seed(5))
    frames = [model.projector(model.encoder(pixels[:, number]).last_hidden_state[:, 0]) for number in range(4)]
    embedding = torch.stack(frames, 1)
    predicted = model.predict(embedding[:, :3], model.action_encoder(action))
    torch.testing.assert_close(losses["predicted"].mean(), (predicted - embedding[:, 1:]).pow(2).mean())
    torch.manual_seed(int(torch.randint(2**31, (), generator=torch.Generator().manual_seed(5))))
    torch.testing.assert_close(losses["sigreg"][0], 0.09 * learner.sigreg(embedding.transpose(0, 1)))


@pytest.fixture(scope="module")
def played():
    world = make_world("push_cube", 6, cameras=("top",), image_size=16)
    expert = make_expert("push_cube", world.spec)
    assert expert is not None
    return record(world, expert, np.arange(6))


def test_windows_have_the_actions_between_their_frames(played):
    starts = lewm.window_starts(played)
    assert len(starts) == sum(max(0, length - 14) for length in played.lengths.tolist())
    learner = lewm.Learner(Counting(), Summed(), "observation.images.top", 32)
    batch = next(learner.batches(played, torch.Generator().manual_seed(3)))
    assert batch["pixels"].shape == (32, 4, 3, 16, 16) and batch["action"].shape == (32, 3, 10)
    rows = starts[torch.randint(len(starts), (32,), generator=torch.Generator().manual_seed(3))]
    mean, std = lewm.action_statistics(played)
    for row, step in enumerate(rows.tolist()):
        frame = step + int(played.episode_of_step[step])
        expected = lewm.pixels_of(played.observation["observation.images.top"][frame + 10])
        torch.testing.assert_close(batch["pixels"][row, 2], expected)
        torch.testing.assert_close(
            batch["action"][row, 1].reshape(5, 2) * std + mean, played.actions[step + 5 : step + 10]
        )


@pytest.mark.long
def test_their_model_learns_resumes_and_plans(played, tmp_path):
    pytest.importorskip("stable_worldmodel")
    model, seconds = lewm.trained(played, "top", lewm.TINY, 0, tmp_path)
    again, same = lewm.trained(played, "top", lewm.TINY, 0, tmp_path)
    assert seconds == same > 0
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
    pictures = played.observation["observation.images.top"][:3].numpy()
    bounds = -np.ones(2), np.ones(2)
    planner = lewm.Planner(
        model, lewm.TINY, "observation.images.top", lewm.action_statistics(played), bounds, pictures, 0
    )
    actions, planned = planner.act({"observation.images.top": pictures[:, None]}, np.array([True, False, True]))
    assert actions.shape == (3, 25, 2) and planned == 2
    assert (np.abs(actions) <= 1).all() and not actions[1].any() and actions[0].any()


@pytest.mark.parametrize("place", [None, goals.PLACES["push_cube"]])
def test_ours_plans_towards_features_or_places(played, tmp_path, place):
    world = make_world("push_cube", 3, cameras=("top",), image_size=16)
    small = EnsembleConfig(members=2, width=16, head_width=16)
    config = LatentEnsembleConfig(features=4, channels=(8, 8, 8), ensemble=small)
    save_world_model(LatentEnsembleModel.build(config, world.spec, played, 0), tmp_path / "model")
    pictures = played.observation[goals.PICTURE][:3].numpy()
    ours = goals.Ours(tmp_path / "model", pictures, 0, place)
    observation = world.reset(seeds=np.arange(3))
    actions, planned = ours.act(observation, np.ones(3, bool))
    assert actions.shape == (3, 2, 2) and planned == 3
    (target,) = ours.policy.goal.targets.values()
    if place is None:
        assert target.shape == (3, 4) and target.isfinite().all()
    else:
        assert target[:, place].isfinite().all() and int(target.isfinite().sum()) == 3 * 2
    world.close()


def test_a_missing_package_names_the_extra(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "stable_worldmodel", None)
    with pytest.raises(ConfigError, match=r"pip install 'robopolicy\[lewm\]'"):
        lewm.require_package()
    assert main(["bench", "goals", "bench.only=[lewm]", "bench.tasks=[push_cube]", f"run.root={tmp_path}"]) == 2
    assert "pip install 'robopolicy[lewm]'" in capsys.readouterr().err


def test_a_task_without_tolerances_is_refused(tmp_path, capsys):
    assert main(["bench", "goals", "bench.tasks=[pick_place]", f"run.root={tmp_path}"]) == 2
    assert "set bench.tasks=[push_cube,push_t]" in capsys.readouterr().err


def test_a_block_is_reached_within_position_and_angle():
    def block(x, yaw):
        state = np.zeros(13)
        state[[0, 2, 3]] = x, np.cos(yaw), np.sin(yaw)
        return state

    goal = block(0.1, np.pi - 0.05)
    assert goals.block_reached(block(0.115, -np.pi + 0.1), goal)  # .15 rad across the seam
    assert not goals.block_reached(block(0.125, np.pi - 0.05), goal)
    assert not goals.block_reached(block(0.1, np.pi - 0.3), goal)
    assert goals.block_reached(block(0.125, np.pi - 0.3), goal, 2.0)


@pytest.mark.parametrize("task", ["push_cube", "push_t"])
def test_starts_in_play_have_goals_that_play_reaches(task):
    attempts = goals.later_frames(task, 4, 0)
    world = goals.opened(task, len(attempts.states), 0, to_the_end=True)
    world.reset(seeds=np.arange(len(attempts.states)))
    state = world.restore(attempts.starts)[ENVIRONMENT_STATE][:, -1]
    assert not goals.REACHED[task](state, attempts.states, goals.MOVED).any()
    world.close()


def test_an_attempt_counts_what_is_reached_at_any_step():
    attempts = goals.last_frames("push_cube", 4, 0)
    world = goals.opened("push_cube", 4, 0, to_the_end=False)
    expert = make_expert("push_cube", world.spec)
    assert expert is not None

    class Expert:
        def act(self, observation, running):
            return expert.act(observation)[:, None], 4

    for by_task in (True, False):
        chosen = goals.Attempts(attempts.starts, attempts.pictures, attempts.states, attempts.limit, by_task)
        result = goals.attempt(world, "push_cube", chosen, Expert())
        assert result["successes"] == 4 and result["steps"] == 1
    still = SimpleNamespace(act=lambda observation, running: (np.zeros((4, 3, 2)), 4))
    assert goals.attempt(world, "push_cube", attempts, still)["successes"] == 0


def test_tables_pool_seeds():
    row = {"successes": 16, "episodes": 32, "milliseconds": 50.0, "steps": 2}
    seeds = {str(seed): {"minutes": 4.0, "end": row, "later": row} for seed in range(2)}
    (table,) = goals.BENCHMARK.tables({"tasks": {"push_cube": {"latent_ensemble": seeds}}})
    assert table.lines[0][:3] == ["`latent_ensemble`", "the expert's last frame", "50.0 % [38.1, 61.9] of 64"]
