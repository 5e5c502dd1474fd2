"""Pixel diffusion dreams a moving dot, minds its actions, and reads states, reward and success off its own frames."""

from dataclasses import replace

import numpy as np
import point_world
import pytest
import torch

from robopolicy.core.conformance import check_world
from robopolicy.core.errors import ConfigError, DataError, NonFiniteError
from robopolicy.core.randomness import Generators
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE, Field
from robopolicy.training.fit import FitConfig
from robopolicy.training.stages import fit_stages
from worldmodels import load_world_model, save_world_model
from worldmodels.diagnostics import examine
from worldmodels.env import ImaginedWorld
from worldmodels.imagination import context_at, recorded_starts
from worldmodels.pixel_diffusion import PixelDiffusionModel
from worldmodels.pixel_networks import PixelDenoiser, PixelDiffusionConfig, to_frames, to_pixels

IMAGE = "observation.images.top"
PIXELS = 16
SPEC = replace(
    point_world.SPEC, observation={**point_world.SPEC.observation, IMAGE: Field((PIXELS, PIXELS, 3), "uint8")}
)
TINY = PixelDiffusionConfig(
    size="tiny", batch_size=64, readout_batch_size=64, dreams=256, members=3, precision="float32"
)


def spots(position):
    """Bright spots [N, PIXELS, PIXELS] at positions [N, 2]."""
    axis = torch.linspace(-1.3, 1.3, PIXELS)
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1)
    return (-(grid - position[:, None, None]).square().sum(-1) / 0.08).exp()


def recorded(episodes=300, seed=0):
    """The point world with pictures of the point (red) and of its goal (green)."""
    data = point_world.recorded(episodes, seed=seed)
    point, goal = spots(data.observation[STATE]), spots(data.observation[ENVIRONMENT_STATE][:, :2])
    pictures = (255 * torch.stack([point, goal, torch.full_like(point, 0.2)], -1)).to(torch.uint8)
    return replace(data, observation_fields=SPEC.observation, observation={**data.observation, IMAGE: pictures})


@pytest.fixture(scope="module")
def learned():
    training = recorded()
    model = PixelDiffusionModel.build(TINY, SPEC, training, 0)
    config = FitConfig(steps=400, learning_rate=3e-3, warmup=20, ema_decay=0.98)
    fit_stages(model, training, config, Generators(0))
    held = recorded(100, seed=1)
    model.calibrate(held)
    return model.eval(), held


def world(model, rows):
    starts = point_world.recorded(64, seed=5)
    return ImaginedWorld(model, recorded_starts(recorded(20, seed=5)), rows)


def test_it_dreams_the_picture_and_minds_its_actions(learned):
    model, held = learned
    figures = examine(model, held, torch.Generator().manual_seed(0), rows=100, steps=400, horizons=(1, 2, 3, 4, 5))
    print(figures)
    for ahead, found in figures["open_loop"].items():
        assert found[IMAGE]["model"] > found[IMAGE]["copy"] + 1.5, ahead
        assert found[IMAGE]["model"] > found[IMAGE]["shuffled"] + 1.5, ahead
        assert found[STATE]["model"] < 0.5 * found[STATE]["copy"], ahead
    assert figures["reward_error"] < 0.5
    assert figures["success"]["f1"] > 0.5
