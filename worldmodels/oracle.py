"""Oracle world model: the true simulator, used to verify that imagined and real worlds behave identically.

`ImaginedWorld(OracleModel(sim), ...)` must reproduce `sim` bitwise. Oracle dynamics also separate model error from
other failures of learning in imagination (Sims et al. 2024, edge of reach).
"""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.former_names import keep_former_names
from robopolicy.core.spec import TASK, WorldSpec
from robopolicy.core.world import Snapshot, Snapshots, World
from worldmodels.env import ImaginedWorld, Truncation
from worldmodels.protocol import Context, Imagined, Latent


class Restorable(World, Snapshots, Protocol):
    """A world whose rows can be saved and restored."""


class OracleModel:
    """A `WorldModel` that runs the true world; its latent is the world's snapshot.

    world: must have the same number of rows as the imagined world around it, and a history of 1.
    """

    def __init__(self, world: Restorable):
        self._world, self._started = world, False

    @property
    def spec(self) -> WorldSpec:
        """The true world's spec."""
        return self._world.spec

    def initial(self, context: Context, seeds: np.ndarray) -> Latent:
        """Return the snapshots in `context.state`; without any, those of the true world's rows reset with `seeds`.

        seeds: [R], at most as many as the world has rows; the latent is the snapshot's arrays, name -> [R, ...].
        """
        if context.state:
            if not self._started:
                self._world.reset()
                self._started = True
            return _latent(Snapshot(dict(context.state)))
        rows = np.arange(len(seeds))
        # The first reset of a world must be of every row; only later ones may choose rows.
        if len(rows) < self._world.batch_size:
            self._world.reset()
        self._world.reset(rows=rows, seeds=seeds)
        return _latent(self._world.snapshot(rows))

    def imagine(self, latent: Latent, actions: Tensor) -> tuple[Latent, Imagined]:
        """Restore rows, at most as many as the world has, run one true control step, and return the snapshots after it.

        actions: [B, A], in the world's units; the latent is name -> [B, ...], and the uncertainty [B] is 0.
        """
        count, rows = len(actions), np.arange(len(actions))
        self._world.restore(Snapshot({name: value.numpy() for name, value in latent.items() if value.numel()}), rows)
        # Rows of the world that nobody imagines get zero actions, and what happens in them is not read.
        moves = np.zeros((self._world.batch_size, 1, actions.shape[1]), actions.numpy().dtype)
        moves[:count, 0] = actions.numpy()
        step = self._world.step(moves)
        observation = {key: step.observation[key][:count, -1] for key in self._world.spec.observation}
        return _latent(self._world.snapshot(rows)), Imagined(
            {key: torch.from_numpy(np.ascontiguousarray(value)) for key, value in observation.items()},
            {name: torch.from_numpy(reward[:count, 0].copy()) for name, reward in step.rewards.items()},
            torch.from_numpy(step.success[:count].copy()),
            torch.from_numpy(step.terminated[:count].copy()),
            torch.zeros(count),
        )


def wrap_oracle(
    world: Restorable, *, history: int = 1, truncation: Truncation | None = None, seed: int = 0
) -> ImaginedWorld:
    """Wrap the true `world` (history 1) exactly like a learned model."""
    starting = world

    def starts(seeds: np.ndarray) -> Context:
        rows = np.arange(len(seeds))
        if len(rows) < starting.batch_size:
            starting.reset()
        observation = starting.reset(rows=rows, seeds=seeds)
        frames = {key: observation[key][rows, -1:] for key in starting.spec.observation}
        return Context(frames, observation[TASK][rows])

    return ImaginedWorld(
        OracleModel(world), starts, world.batch_size, history=history, truncation=truncation, seed=seed
    )


def _latent(snapshot: Snapshot) -> Latent:
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in snapshot.arrays.items()}


keep_former_names(__name__, {"oracle_twin": "wrap_oracle"})
