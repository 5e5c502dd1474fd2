"""The point world seen through a camera: a small image of the point and of its goal."""

from dataclasses import replace

import numpy as np
import point_world
import torch

from robopolicy.core.spec import ENVIRONMENT_STATE, STATE, Field
from worldmodels import load_world_model, save_world_model
from worldmodels.env import ImaginedWorld
from worldmodels.initial_states import recorded_starts

IMAGE = "observation.images.top"
PIXELS = 16
SPEC = replace(
    point_world.SPEC, observation={**point_world.SPEC.observation, IMAGE: Field((PIXELS, PIXELS, 3), "uint8")}
)


def spots(position):
    """Bright spots [N, PIXELS, PIXELS] at positions [N, 2]."""
    axis = torch.linspace(-1.3, 1.3, PIXELS)
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1)
    return (-(grid - position[:, None, None]).square().sum(-1) / 0.08).exp()


def recorded(episodes=300, seed=0):
    """The point world with images of the point (red) and of its goal (green)."""
    data = point_world.recorded(episodes, seed=seed)
    point, goal = spots(data.observation[STATE]), spots(data.observation[ENVIRONMENT_STATE][:, :2])
    images = (255 * torch.stack([point, goal, torch.full_like(point, 0.2)], -1)).to(torch.uint8)
    return replace(data, observation_fields=SPEC.observation, observation={**data.observation, IMAGE: images})


def imagined_world(model, rows, **options):
    """A world inside `model`, which begins anywhere in some episodes."""
    return ImaginedWorld(model, recorded_starts(recorded(20, seed=5)), rows, **options)


def check_round_trip(model, folder):
    """What is saved and loaded imagines the same."""
    save_world_model(model, folder)
    loaded = load_world_model(folder)
    steps = []
    for each in (model, loaded):
        world = imagined_world(each, 3)
        world.reset(seeds=[1, 2, 3])
        steps.append(world.step(np.full((3, 2, 2), 0.5)))
    assert np.array_equal(steps[0].trace[IMAGE], steps[1].trace[IMAGE])
    assert np.array_equal(steps[0].uncertainty, steps[1].uncertainty)
    assert loaded.spec == model.spec and loaded.config == model.config
