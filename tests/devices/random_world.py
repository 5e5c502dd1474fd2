"""A world of random numbers and recordings of it, with all that a policy or a world model may ask for."""

from dataclasses import replace

import numpy as np
import torch

from robopolicy.core.episodes import Episodes
from robopolicy.core.randomness import uniforms
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE, TASK, Field, WorldSpec
from robopolicy.core.world import Snapshot, Step

IMAGE = "observation.images.top"
PIXELS = 16
STATES = WorldSpec(
    "random",
    {STATE: Field((2,)), ENVIRONMENT_STATE: Field((3,))},
    Field((2,), low=-1.0, high=1.0),
    fps=10.0,
    horizon=6,
    rewards=("progress", "success"),
    instructions=("push the red cube",),
)
IMAGES = replace(STATES, observation={**STATES.observation, IMAGE: Field((PIXELS, PIXELS, 3), "uint8", 0, 255)})
TEXTS = ("push the red cube", "push the blue cube")


class RandomWorld:
    """What is seen, paid and won is a function of the episode's seed, its step and the last action."""

    def __init__(self, rows: int = 6, spec: WorldSpec = STATES, history: int = 1):
        self.batch_size, self.spec = rows, replace(spec, history=history)
        self.seeds, self.steps = np.zeros(rows, dtype=np.int64), np.zeros(rows, dtype=np.int64)
        self.over = np.zeros(rows, dtype=bool)

    def reset(self, rows=None, seeds=None, options=None):
        """Begin with the seeds."""
        chosen = np.arange(self.batch_size) if rows is None else np.asarray(rows)
        self.seeds[chosen], self.steps[chosen], self.over[chosen] = seeds, 0, False
        return self._seen()

    def step(self, actions):
        """Pay at random; two of three episodes end before the time limit, one of these in success."""
        count = actions.shape[1]
        valid = ~self.over[:, None] & (self.steps[:, None] + np.arange(count) < self.spec.horizon)
        reward = np.where(valid, uniforms(self.seeds + self.steps + 3, count) - np.abs(actions).mean(2), 0.0)
        self.steps = self.steps + valid.sum(1)
        ends = (self.seeds % 3 < 2) & (self.steps >= self.spec.horizon - count)
        truncated = (self.steps >= self.spec.horizon) & ~ends
        self.over = ends | truncated
        success = ends & (self.seeds % 3 == 0)
        observation = self._seen()
        trace = {key: np.repeat(value[:, -1:], count, 1) for key, value in observation.items() if key != TASK}
        paid = {"progress": reward, "success": np.where(valid, success[:, None], 0.0)}
        return Step(observation, trace, paid, valid, ends.copy(), truncated, success)

    def snapshot(self, rows=None):
        """Copy seeds, steps and ends."""
        index = np.arange(self.batch_size) if rows is None else np.asarray(rows)
        return Snapshot({name: getattr(self, name)[index].copy() for name in ("seeds", "steps", "over")})

    def restore(self, snapshot, rows=None):
        """Go on from there."""
        index = np.arange(self.batch_size) if rows is None else np.asarray(rows)
        for name, value in snapshot.arrays.items():
            getattr(self, name)[index] = value
        return self._seen()

    def _seen(self):
        observation = {}
        for key, field in self.spec.observation.items():
            size = self.spec.history * field.size
            value = uniforms(self.seeds * 31 + self.steps, size).reshape(-1, self.spec.history, *field.shape)
            observation[key] = (255 * value).astype(np.uint8) if field.dtype == "uint8" else value.astype(np.float32)
        observation[TASK] = np.array(
            [self.spec.instructions[seed % len(self.spec.instructions)] for seed in self.seeds]
        )
        return observation

    def close(self):
        """Nothing to free."""


def recorded(spec: WorldSpec = STATES, count: int = 12, length: int = 6) -> Episodes:
    """Return `count` random episodes of `length` steps: every second one succeeds."""
    draws, steps = torch.Generator().manual_seed(0), count * length
    observation = {}
    for key, field in spec.observation.items():
        value = torch.rand(steps + count, *field.shape, generator=draws)
        observation[key] = (255 * value).to(torch.uint8) if field.dtype == "uint8" else value
    success = torch.zeros(steps, dtype=torch.bool)
    success[length - 1 :: 2 * length] = True
    return Episodes(
        spec.observation,
        spec.action,
        spec.fps,
        observation,
        2 * torch.rand(steps, 2, generator=draws) - 1,
        torch.full((count,), length),
        tuple(spec.instructions[number % len(spec.instructions)] for number in range(count)),
        rewards={"progress": torch.rand(steps, generator=draws), "success": success.float()},
        step_success=success,
        terminated=success[length - 1 :: length],
    )
