"""Replay of imagined trajectories in the simulator, on push_cube, whose observation contains its complete physical
state.

An imagined trajectory is replayed from its first state with its actions, and compared step by step.
"""

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.world import Snapshot
from robopolicy.rl.offline.interface import Interface
from sims.engine import MujocoWorld
from sims.registry import load_task

TASK = "push_cube"


def physics(state: np.ndarray) -> dict[str, np.ndarray]:
    """Return push_cube's simulator state [R, 13], control [R, 2] and goal [R, 2] for state vectors [R, 19]."""
    pusher = state[:, 0:2]
    velocity = state[:, 2:4]
    target_offset = state[:, 4:6]
    cube, yaw = state[:, 6:8], np.arctan2(state[:, 9:10], state[:, 8:9])
    time = np.zeros((len(state), 1))
    columns = [time, cube, yaw, pusher, state[:, 10:13], velocity, pusher + target_offset]
    return {
        "state": np.concatenate(columns, 1).astype(np.float64),
        "control": np.zeros((len(state), 2)),
        "goal": state[:, 13:15].astype(np.float64),
    }


def replay(states: Tensor, actions: Tensor) -> Tensor:
    """Return the simulator's states [R, L, 19] after states [R, 19] under actions [R, L, 2] in its units."""
    world = MujocoWorld(load_task(TASK), len(states))
    interface = Interface.of(world.spec)
    world.reset(seeds=np.arange(len(states)))
    arrays = {**world.snapshot().arrays, **physics(states.numpy())}
    states_seen = []
    for step in range(actions.shape[1]):
        arrays |= {name: np.zeros(len(states), dtype=bool) for name in ("success", "terminated", "truncated")}
        arrays["steps"] = np.zeros(len(states), dtype=arrays["steps"].dtype)
        world.restore(Snapshot(arrays))
        observation = world.step(actions[:, step : step + 1].double().numpy()).observation
        states_seen.append(interface.state(observation))
        arrays = dict(world.snapshot().arrays)
    world.close()
    return torch.stack(states_seen, 1)
