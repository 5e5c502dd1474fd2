"""The point world seen through a camera: a small picture of the point and of its goal."""

from dataclasses import replace

import point_world
import torch

from robopolicy.core.spec import ENVIRONMENT_STATE, STATE, Field

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
    """The point world with pictures of the point (red) and of its goal (green)."""
    data = point_world.recorded(episodes, seed=seed)
    point, goal = spots(data.observation[STATE]), spots(data.observation[ENVIRONMENT_STATE][:, :2])
    pictures = (255 * torch.stack([point, goal, torch.full_like(point, 0.2)], -1)).to(torch.uint8)
    return replace(data, observation_fields=SPEC.observation, observation={**data.observation, IMAGE: pictures})
