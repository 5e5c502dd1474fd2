"""Training through own predictions: the loss against loops of single steps, what learns, and what it is good for."""

from dataclasses import replace

import dot_world
import point_world
import pytest
import torch
from torch.nn import functional

from robopolicy.core.randomness import Generators
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE
from robopolicy.evaluation.world_model import open_loop
from robopolicy.training.configuration import FitConfig
from robopolicy.training.fit import fit_stages
from worldmodels.configuration import EnsembleConfig, LatentEnsembleConfig
from worldmodels.ensemble import EnsembleModel
from worldmodels.latent_ensemble import LatentEnsembleModel
from worldmodels.rollouts import RATE, RolloutStage

CONFIG = EnsembleConfig(members=2, width=16, depth=1, head_width=8, batch_size=6, rollout_step_ratio=0.5)


def built(config=CONFIG, episodes=20):
    data = point_world.recorded(episodes)
    return EnsembleModel.build(config, point_world.SPEC, data, seed=0), data


def in_turn(model, batch):
    """The loss of a batch, one member, row and step at a time."""
    rows, steps = batch["valid"].shape[1:]
    result = torch.zeros(rows)
    for member in range(model.config.members):
        for row in range(rows):
            state = batch["states"][member, row, 0]
            for step in range(steps):
                action = batch["actions"][member, row, step]
                inputs = torch.cat([model.standard("state", state), model.standard("action", action)])
                outputs = model.dynamics(inputs.expand(model.config.members, 1, -1))[member, 0]
                state = state.clone()
                inputs = torch.cat([state[model.robot], action, torch.ones(1)])
                state[:2] += model.delta_mean + model.delta_std * outputs[: len(outputs) // 2] + inputs @ model.response
                state[4:] = state[2:4] - state[:2]  # to the goal, which never moves
                if not batch["valid"][member, row, step]:
                    break
                error = (state - batch["states"][member, row, step + 1])[:2] / model.delta_std
                result[row] += functional.huber_loss(error, torch.zeros(2)) / steps / model.config.members
    return result


def test_the_loss_is_that_of_single_steps_one_after_another():
    model, data = built()
    stage = RolloutStage(model)
    batches = stage.batches(data, torch.Generator().manual_seed(3))
    lengths = set()
    for _ in range(12):
        batch = next(batches)
        lengths.add(batch["valid"].shape[-1])
        losses = stage.loss(batch, torch.Generator())
        assert set(losses) == {"rollouts"}
        assert torch.allclose(losses["rollouts"], in_turn(model, batch), atol=1e-4, rtol=1e-4)
    assert lengths <= set(range(4, 9)) and len(lengths) > 2
    assert not bool(batch["valid"].all()), "some rollouts go beyond their episode's end"


def test_rows_are_recorded_steps_and_divide():
    model, data = built()
    stage = RolloutStage(model)
    batch = next(stage.batches(data, torch.Generator().manual_seed(1)))
    assert stage.rows(batch) == 3
    moved = batch["states"][..., 1:, :2] - batch["states"][..., :-1, :2]
    expected = point_world.GAIN * batch["actions"]
    assert torch.allclose(moved[batch["valid"]], expected[batch["valid"]], atol=1e-5)
    whole = stage.loss(batch, torch.Generator())["rollouts"]
    parts = [stage.loss(stage.divided(batch, own), torch.Generator())["rollouts"] for own in (slice(0, 1), slice(1, 3))]
    assert torch.allclose(torch.cat(parts), whole)


def test_only_the_dynamics_learn_and_at_a_rate_of_their_own(tmp_path):
    model, data = built()
    stages = model.stages()
    assert list(stages) == ["ensemble", "rollouts"] and list(built(replace(CONFIG, rollout_step_ratio=0))[0].stages())
    stage, share = stages["rollouts"]
    assert share == 0.5 and stage.learning_rate_scale == RATE
    assert {id(weight) for weight in stage.parameters()} == {id(weight) for weight in model.dynamics.parameters()}
    sampling = RolloutStage(built(replace(CONFIG, sample=True))[0])
    losses = sampling.loss(next(sampling.batches(data, torch.Generator())), torch.Generator())
    assert set(losses) == {"rollouts", "likelihood"} and losses["likelihood"].shape == losses["rollouts"].shape


def test_latents_are_encoded_once_for_all_stages():
    data = dot_world.recorded(12)
    config = LatentEnsembleConfig(features=4, channels=(8, 8, 8), batch_size=8, ensemble=CONFIG)
    model = LatentEnsembleModel.build(config, dot_world.SPEC, data, 0)
    assert list(model.stages()) == ["encoder", "readout", "ensemble", "rollouts"]
    first = model.latents(data)
    assert model.latents(data) is first
    assert model.latents(dot_world.recorded(12)) is not first
    first = model.latents(data)
    with torch.no_grad():
        next(model.autoencoder.encoders.parameters()).add_(0.1)
    assert model.latents(data) is not first, "another encoder"


def blurred(data, deviation=0.1):
    """The recorded points, read off with errors half as large as a step."""
    noise = deviation * torch.randn(data.observation[STATE].shape, generator=torch.Generator().manual_seed(1))
    environment = data.observation[ENVIRONMENT_STATE].clone()
    environment[:, 2:] -= noise
    seen = {STATE: data.observation[STATE] + noise, ENVIRONMENT_STATE: environment}
    return replace(data, observation=seen)


@pytest.mark.slow
def test_of_states_read_off_with_errors_more_is_learnt_through_own_predictions_than_from_single_steps():
    """Errors of a state look like movements that the next step takes back: a bias that several steps show."""
    torch.set_num_threads(1)
    errors = []
    for steps, ratio in ((600, 0.0), (300, 1.0)):
        train, held = point_world.recorded(steps=12).split(0.1, torch.Generator().manual_seed(0))
        config = replace(CONFIG, width=32, batch_size=64, rollout_step_ratio=ratio)
        model = EnsembleModel.build(config, point_world.SPEC, blurred(train), seed=0)
        fit_stages(model, blurred(train), FitConfig(steps=steps, learning_rate=3e-3), Generators(0))
        figures = open_loop(model, held, torch.Generator().manual_seed(0), 200, (1, 8))
        errors.append(figures["8"][STATE]["model"])
    assert errors[1] < 0.8 * errors[0]
