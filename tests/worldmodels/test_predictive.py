"""An encoder that predicts its own features: its guard against the closed form and against collapse, and its loss."""

import math
import warnings
from dataclasses import replace

import dot_world
import numpy as np
import pytest
import torch
from dot_world import IMAGE, SPEC, recorded

from robopolicy.core.errors import RobopolicyWarning
from robopolicy.core.randomness import Generators
from robopolicy.core.spec import STATE
from robopolicy.training.configuration import FitConfig
from robopolicy.training.fit import fit
from worldmodels import load_world_model, predictive, save_world_model
from worldmodels.configuration import EnsembleConfig, LatentEnsembleConfig
from worldmodels.latent_ensemble import LatentEnsembleModel
from worldmodels.predictive import OFFSETS, PredictiveEncoding, feature_rank, sigreg

CONFIG = LatentEnsembleConfig(
    features=8,
    channels=(8, 8, 8),
    batch_size=32,
    encoder_loss="predict",
    readout_step_ratio=0,  # and so no labels
    ensemble=EnsembleConfig(members=2, width=16, depth=1, head_width=8, rollout_step_ratio=0),
)


def built(config=CONFIG, episodes=30):
    data = recorded(episodes)
    return LatentEnsembleModel.build(config, SPEC, data, seed=0), data


def closed_form(values):
    """The statistic of one direction: N integrals of Gaussians and cosines, over all frequencies, for values [N]."""
    pairs = np.exp(-np.square(values[:, None] - values[None]) / 2).mean()
    singles = np.exp(-np.square(values) / 4).mean()
    integral = math.sqrt(2 * math.pi) * pairs - 2 * math.sqrt(math.pi) * singles + math.sqrt(2 * math.pi / 3)
    return len(values) * integral


@pytest.mark.parametrize(("scale", "shift"), [(1, 0), (0.01, 0), (3, 0), (0.5, 1)])
def test_the_guard_is_the_integral_of_the_characteristic_function(scale, shift):
    values = shift + scale * np.random.default_rng(0).normal(size=(2, 50, 3))
    directions = torch.nn.functional.normalize(torch.randn(3, 4, generator=torch.Generator().manual_seed(1)), dim=0)
    expected = [
        np.mean([closed_form(row @ direction) for direction in directions.numpy().astype(float).T]) for row in values
    ]
    assert np.allclose(sigreg(torch.tensor(values).float(), directions).numpy(), expected, rtol=2e-3, atol=2e-3)


def test_the_guard_is_least_for_a_standard_normal_distribution():
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(4000, 2, generator=generator)
    directions = torch.nn.functional.normalize(torch.randn(2, 64, generator=generator), dim=0)
    line = normal[:, :1].expand(-1, 2)
    least = float(sigreg(normal, directions))
    assert least == pytest.approx(math.sqrt(2 * math.pi) - math.sqrt(2 * math.pi / 3), rel=0.4)
    for other in (torch.zeros(4000, 2), line, 2 * normal, 0.5 * normal, normal + 0.5):
        assert float(sigreg(other, directions)) > 20 * least


def test_rank_counts_the_directions_in_which_features_vary():
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(2000, 6, generator=generator)
    assert feature_rank(normal) == 6 and feature_rank(normal[:, :1]) == 1
    assert feature_rank(normal[:, :2].repeat(1, 3)) == 2
    assert feature_rank(0.01 * normal) == feature_rank(torch.ones(10, 6)) == 0


def test_windows_are_the_recorded_frames_and_repeat_the_last_one():
    model, data = built()
    batch = next(model.encoder_stage().batches(data, torch.Generator().manual_seed(2)))
    assert batch["frames"][IMAGE].shape == (32, 4, 16, 16, 3) and batch["actions"].shape[:2] == (32, 8)
    states = data.observation[STATE]
    deviation, mean = states.std(0, correction=0), states.mean(0)
    action_mean, action_deviation = data.actions.mean(0), data.actions.std(0, correction=0)
    cut = 0
    for row in range(32):
        image = batch["frames"][IMAGE][row, 0]
        begin = int((data.observation[IMAGE] == image).flatten(1).all(1).nonzero()[0])
        episode = int((data.frame_starts <= begin).sum()) - 1
        left = int(data.frame_starts[episode] + data.lengths[episode]) - begin
        for place, offset in enumerate(OFFSETS):
            frame = begin + min(offset, left)
            assert bool(batch["valid"][row, place]) == (offset <= left)
            assert torch.equal(batch["frames"][IMAGE][row, place], data.observation[IMAGE][frame])
            assert torch.allclose(batch["vectors"][row, place], (states[frame] - mean) / deviation, atol=1e-5)
        action = (data.actions[begin - episode] - action_mean) / action_deviation
        assert torch.allclose(batch["actions"][row, 0], action, atol=1e-5)
        cut += left < OFFSETS[-1]
    assert cut, "some windows go beyond their episode's end"


def test_the_loss_is_that_of_one_row_and_step_at_a_time():
    model, data = built()
    stage = model.encoder_stage()
    assert isinstance(stage, PredictiveEncoding)
    batch = next(stage.batches(data, torch.Generator().manual_seed(2)))
    losses = stage.loss(batch, torch.Generator().manual_seed(5))
    assert set(losses) == {"predicted", "guard", "drawn"} and all(value.shape == (32,) for value in losses.values())
    with torch.no_grad():
        for row in range(32):
            features = model.autoencoder({IMAGE: batch["frames"][IMAGE][row]})
            latents = torch.cat([batch["vectors"][row], features], -1)
            state, errors = latents[0], []
            for step in range(1, 9):
                action = batch["actions"][row, step - 1]
                state = state + stage.predictor(torch.cat([state, action])[None, None])[0, 0]
                if step in OFFSETS and bool(batch["valid"][row, OFFSETS.index(step)]):
                    errors.append((state - latents[OFFSETS.index(step)]).square().mean())
            assert float(losses["predicted"][row]) == pytest.approx(float(torch.stack(errors).mean()), rel=1e-4)
        directions = torch.randn(8, 128, generator=torch.Generator().manual_seed(5))
        directions = directions / directions.norm(dim=0)
        features = [model.autoencoder({IMAGE: batch["frames"][IMAGE][:, place]}) for place in range(4)]
        guard = 0.1 * torch.stack([sigreg(each, directions) for each in features]).mean()
    assert torch.allclose(losses["guard"], guard.expand(32), rtol=1e-4)


def test_nothing_of_the_decoder_reaches_the_encoder():
    model, data = built()
    stage = model.encoder_stage()
    stage.loss(next(stage.batches(data, torch.Generator())), torch.Generator())["drawn"].sum().backward()
    assert all(weight.grad is None for weight in model.autoencoder.encoders.parameters())
    assert any(weight.grad is not None for weight in model.autoencoder.decoders.parameters())


def features_after(guard, monkeypatch):
    monkeypatch.setattr(predictive, "GUARD", guard)
    torch.set_num_threads(1)
    model, data = built(episodes=60)
    stage, generators = model.encoder_stage(), Generators(0)
    fit(stage, stage.batches(data, generators["batches"]), FitConfig(steps=150, learning_rate=3e-3), generators)
    with torch.no_grad():
        return model, model.autoencoder({IMAGE: recorded(20, seed=7).observation[IMAGE]})


@pytest.mark.long
def test_without_its_guard_the_encoder_collapses(monkeypatch):
    """The point and its goal have two coordinates each; constants are predicted without error."""
    model, kept = features_after(0.1, monkeypatch)
    assert feature_rank(kept) >= 4 and float(kept.std(0).min()) > 0.3
    collapsed, lost = features_after(0.0, monkeypatch)
    assert feature_rank(lost) == 0
    held_out = recorded(20, seed=7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.calibrate(held_out)
    with pytest.warns(RobopolicyWarning, match="its 8 features vary in 0 directions"):
        collapsed.calibrate(held_out)


def test_an_encoder_that_predicts_is_reused_by_one_that_draws(tmp_path):
    model, data = built()
    assert list(model.stages()) == ["encoder", "ensemble"]
    save_world_model(model, tmp_path / "model")
    loaded = load_world_model(tmp_path / "model")
    assert isinstance(loaded, LatentEnsembleModel) and loaded.config.encoder_loss == "predict"
    assert "encoder" not in loaded.stages()
    other = LatentEnsembleModel.build(
        replace(CONFIG, encoder_loss="draw", encoder=tmp_path / "model"), dot_world.SPEC, data, seed=4
    )
    assert "encoder" not in other.stages()
    assert all(torch.equal(value, other.encoder_weights()[name]) for name, value in model.encoder_weights().items())
