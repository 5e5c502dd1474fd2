"""Pixel diffusion imagines a moving dot, minds its actions, and reads states, reward and success off its own frames."""

from dataclasses import replace

import numpy as np
import point_world
import pytest
import torch
from dot_world import IMAGE, PIXELS, SPEC, check_round_trip, imagined_world, recorded

from robopolicy.core.errors import ConfigError, DataError, NonFiniteError
from robopolicy.core.randomness import Generators
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE, Field
from robopolicy.evaluation.world_model import examine
from robopolicy.testing.world import check_world
from robopolicy.training.configuration import FitConfig
from robopolicy.training.fit import fit_stages
from worldmodels.configuration import PixelDiffusionConfig, ReadoutConfig
from worldmodels.images.networks import to_frames, to_pixels
from worldmodels.initial_states import context_at
from worldmodels.pixel_diffusion import PixelDenoiser, PixelDiffusionModel

READOUT = ReadoutConfig(batch_size=64, imagined_steps=256, members=3)
TINY = PixelDiffusionConfig(size="tiny", batch_size=32, readout=READOUT, precision="float32")


@pytest.fixture(scope="module")
def learned():
    training = recorded()
    model = PixelDiffusionModel.build(TINY, SPEC, training, 0)
    config = FitConfig(steps=400, learning_rate=1e-3, warmup=20, ema_decay=0.98)
    fit_stages(model, training, config, Generators(0))
    held = recorded(100, seed=1)
    model.calibrate(held)
    return model.eval(), held


@pytest.mark.slow
def test_it_imagines_the_image_and_depends_on_its_actions(learned):
    model, held = learned
    figures = examine(model, held, torch.Generator().manual_seed(0), rows=100, steps=400, horizons=(1, 2, 3, 4, 5))
    print({k: v[IMAGE] for k, v in figures["open_loop"].items()}, figures["reward_error"], figures["success"])
    for ahead, figures_of_keys in figures["open_loop"].items():
        assert figures_of_keys[IMAGE]["model"] > figures_of_keys[IMAGE]["copy"] + 6, ahead
        assert figures_of_keys[IMAGE]["model"] > figures_of_keys[IMAGE]["shuffled"] + 6, ahead
        assert figures_of_keys[STATE]["model"] < 0.5 * figures_of_keys[STATE]["copy"], ahead
    assert figures["reward_error"] < 0.5
    assert figures["success"]["f1"] > 0.5


@pytest.mark.slow
def test_carried_states_follow_their_structure_and_the_images(learned):
    model, held = learned
    latent = model.initial(context_at(held, torch.arange(50)), np.arange(50))
    start = context_at(held, torch.arange(50)).last(ENVIRONMENT_STATE)
    drifted = {**latent, "state": latent["state"].clone()}
    drifted["state"][:, :2] += 0.1
    for step in range(3):
        latent, prediction = model.imagine(latent, held.actions[step : step + 50])
        drifted, _ = model.imagine(drifted, held.actions[step : step + 50])
    environment = prediction.observation[ENVIRONMENT_STATE]
    assert np.array_equal(environment[:, :2].numpy(), start[:, :2])
    assert torch.allclose(environment[:, 2:], environment[:, :2] - prediction.observation[STATE], atol=1e-4)
    assert float((drifted["state"] - latent["state"])[:, :2].abs().mean()) < 0.09
    shown = to_pixels(prediction.observation[IMAGE])[:, 0] + 1
    axis = torch.linspace(-1.3, 1.3, PIXELS)
    weights = (shown - 0.1).clamp_min(0)
    total = weights.sum((1, 2)).clamp_min(1e-6)
    place = torch.stack([(weights.sum(2) @ axis) / total, (weights.sum(1) @ axis) / total], -1)
    inside = prediction.observation[STATE].abs().amax(1) < 1
    error = (place - prediction.observation[STATE])[inside].abs().mean()
    assert float(error) < 0.15, error


@pytest.mark.slow
def test_the_next_image_depends_on_the_pose(learned):
    model, held = learned
    latent = model.initial(context_at(held, torch.arange(50)), np.arange(50))
    moved = {**latent, "state": latent["state"].clone()}
    moved["state"] += 0.5 * model.reader.state_std
    shown = [to_pixels(model.imagine(each, held.actions[:50])[1].observation[IMAGE]) for each in (latent, moved)]
    assert float((shown[0] - shown[1]).abs().amax()) > 0.05


@pytest.mark.slow
def test_uncertainty_grows_off_the_data(learned):
    model, held = learned

    def uncertainty(change):
        observation = {**held.observation, **change}
        moved = replace(held, observation=observation)
        latent = model.initial(context_at(moved, torch.arange(200), model.context), np.arange(200))
        return model.imagine(latent, held.actions[:200])[1].uncertainty.mean()

    usual = uncertainty({})
    assert uncertainty({STATE: held.observation[STATE] + 5.0}) > 2 * usual
    assert uncertainty({IMAGE: 255 - held.observation[IMAGE]}) > 1.5 * usual
    quantiles = model.uncertainty_quantiles
    assert quantiles[0] < usual < quantiles[-1] and (quantiles.diff() >= 0).all()


@pytest.mark.slow
def test_imagined_worlds_conform(learned):
    check_world(lambda rows: imagined_world(learned[0], rows), renders=False, tolerance=1e-4)


@pytest.mark.slow
def test_an_episode_depends_on_its_seed_and_actions_alone(learned):
    model, held = learned
    latent = model.initial(context_at(held, torch.arange(4), model.context), np.arange(4))
    _, prediction = model.imagine(latent, held.actions[:4])
    order = [2, 0]
    part = {name: value[order] for name, value in latent.items()}
    _, again = model.imagine(part, held.actions[order])
    assert torch.allclose(again.observation[STATE], prediction.observation[STATE][order], atol=1e-4)
    difference = again.observation[IMAGE].int() - prediction.observation[IMAGE][order].int()
    assert int(difference.abs().max()) <= 1
    _, other = model.imagine({**latent, "seed": latent["seed"] + 1}, held.actions[:4])
    assert not torch.equal(other.observation[IMAGE], prediction.observation[IMAGE])


@pytest.mark.slow
def test_checkpoints_round_trip(learned, tmp_path):
    check_round_trip(learned[0], tmp_path / "model")


def test_training_batches_are_a_function_of_the_generator():
    data = recorded(20)
    model = PixelDiffusionModel.build(replace(TINY, readout=replace(READOUT, imagined_steps=8)), SPEC, data, 0)
    for part, _ in model.stages().values():
        first, again = (next(part.batches(data, torch.Generator().manual_seed(0))) for _ in range(2))
        assert torch.equal(first["frames"], again["frames"])
        losses = part.loss(first, torch.Generator().manual_seed(0))
        assert all(value.shape == (len(first["frames"]),) for value in losses.values())
    part, _ = model.stages()["denoiser"]
    batch = next(part.batches(data, torch.Generator().manual_seed(0)))
    moved, past = batch["frames"].clone(), TINY.context
    outside = ~batch["valid"][:, past - 1 :]
    moved[:, past:][outside] = 255
    assert bool(outside.any())
    losses = [part.loss({**batch, "frames": f}, torch.Generator().manual_seed(0))["pixels"] for f in (moved, moved)]
    kept = part.loss(batch, torch.Generator().manual_seed(0))["pixels"]
    assert torch.allclose(losses[0], kept)


def test_an_untrained_denoiser_repeats_the_last_frame():
    frames = torch.randint(0, 256, (3, 4, 16, 16, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(to_frames(to_pixels(frames)), frames)
    denoiser = PixelDenoiser(TINY, 16, 16, 2, 3)
    noise = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    new = denoiser.next_frame(frames, torch.zeros(3, 4, 2), torch.zeros(3, 3), noise)
    assert float((new.float() - frames[:, -1].float()).abs().mean()) < 8


def test_without_temperature_no_image_is_left_to_chance():
    frames = torch.randint(0, 256, (3, 4, 16, 16, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    told = frames, torch.zeros(3, 4, 2), torch.zeros(3, 3)
    shown = {}
    for temperature in (0.0, 1.0):
        denoiser = PixelDenoiser(replace(TINY, temperature=temperature), 16, 16, 2, 3)
        torch.nn.init.normal_(denoiser.unet.conv_out.weight, generator=torch.Generator().manual_seed(0))
        draws = (torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
        shown[temperature] = [denoiser.next_frame(*told, noise) for noise in draws]
    assert torch.equal(*shown[0.0]) and not torch.equal(*shown[1.0])
    with pytest.raises(ConfigError, match="temperature"):
        PixelDiffusionConfig(temperature=-1.0)


def test_several_cameras_are_one_image():
    second = "observation.images.side"
    spec = replace(SPEC, observation={**SPEC.observation, second: Field((PIXELS, PIXELS, 3), "uint8")})
    data = recorded(10)
    observation = {**data.observation, second: 255 - data.observation[IMAGE]}
    data = replace(data, observation_fields=spec.observation, observation=observation)
    model = PixelDiffusionModel.build(TINY, spec, data, 0)
    latent = model.initial(context_at(data, torch.arange(3)), np.arange(3))
    assert latent["frames"].shape == (3, 4, 2 * PIXELS, PIXELS, 3)
    _, prediction = model.imagine(latent, data.actions[:3])
    for key in (IMAGE, second):
        repeated = torch.from_numpy(context_at(data, torch.arange(3)).last(key))
        assert (
            prediction.observation[key].shape == (3, PIXELS, PIXELS, 3)
            and prediction.observation[key].dtype == torch.uint8
        )
        assert float((prediction.observation[key].float() - repeated.float()).abs().mean()) < 8


def test_bad_settings_and_data_are_refused():
    data = recorded(4)
    with pytest.raises(DataError, match="another world"):
        PixelDiffusionModel.build(TINY, SPEC, replace(data, actions=data.actions[:, :1]), 0)
    broken = {**data.observation, STATE: data.observation[STATE] * torch.nan}
    with pytest.raises(NonFiniteError, match="state"):
        PixelDiffusionModel.build(TINY, SPEC, replace(data, observation=broken), 0)
    blind = point_world.recorded(4)
    with pytest.raises(ConfigError, match="no images"):
        PixelDiffusionModel.build(TINY, point_world.SPEC, blind, 0)
    with pytest.raises(ConfigError, match="does not divide"):
        PixelDenoiser(TINY, 18, 17, 2, 3)
    with pytest.raises(ConfigError, match="multiples of 8"):
        PixelDiffusionConfig(channels=(12, 24))
    with pytest.raises(ConfigError, match="between 0 and 1"):
        ReadoutConfig(imagined_fraction=1.5)
    assert PixelDiffusionConfig(size="diamond").networks.grid == 0
