"""A point in space whose dynamics are known exactly: the smallest place where the edge of reach bites.

State: where it is, in AXES dimensions; action: a step of at most STEP along each axis; reward: -COST times the distance
from the origin before the step. All values are at most 0, and going home at once is best.
Source of the shape: Sims et al. 2024, arXiv:2402.12527, in two dimensions; with eight there is always a direction in
which critics extrapolate upwards.
"""

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.randomness import uniforms
from robopolicy.core.spec import STATE, Field, WorldSpec
from worldmodels.protocol import Context, Imagined, Latent

AXES = 8
STEP = 1.0
COST = 0.02
REACH = 2.0

SPEC = WorldSpec(
    name="point",
    observation={STATE: Field((AXES,))},
    action=Field((AXES,), low=-1.0, high=1.0),
    fps=10,
    horizon=50,
    rewards=("cost",),
    success="It never ends.",
)


class PointModel:
    """The true dynamics as a `WorldModel`."""

    spec = SPEC

    def initial(self, context: Context, seeds: np.ndarray) -> Latent:
        """Return the latent of the newest frame, {"state": [N, AXES]}."""
        return {"state": torch.from_numpy(np.asarray(context.last(STATE), dtype=np.float32))}

    def imagine(self, latent: Latent, actions: Tensor) -> tuple[Latent, Imagined]:
        """Move by actions [N, AXES] at most STEP along each axis; nothing is uncertain."""
        state = latent["state"]
        after = state + STEP * actions.float().clamp(-1, 1)
        never = torch.zeros(len(state), dtype=torch.bool)
        paid = {"cost": -COST * state.norm(dim=1)}
        return {"state": after}, Imagined({STATE: after}, paid, never, never, torch.zeros(len(state)))


def starts(seeds: np.ndarray) -> Context:
    """Return contexts anywhere within REACH of the origin along every axis; one for each of `seeds` [N]."""
    place = (2 * uniforms(np.asarray(seeds, dtype=np.int64), AXES) - 1) * REACH
    return Context({STATE: place.astype(np.float32)[:, None]})


def best_value(state: Tensor, discount: float, steps: int = 400) -> Tensor:
    """Return the value [N] of walking straight home from states [N, AXES] in steps of at most STEP along each axis."""
    total, factor = torch.zeros(len(state)), 1.0
    for _ in range(steps):
        total, factor = total - factor * COST * state.norm(dim=1), factor * discount
        state = state - state.clamp(-STEP, STEP)
        if not bool(state.any()):
            break
    return total
