"""A numpy world and two actors small enough to check by hand: a point on a line that must reach zero."""

from pathlib import Path

import numpy as np
import torch

from robopolicy.core.policy import Decision, Scores
from robopolicy.core.randomness import uniforms
from robopolicy.core.spec import STATE, TASK, Field, PolicySpec, WorldSpec, validate_actions
from robopolicy.core.world import Step

ACTION = Field((1,), low=-0.2, high=0.2, names=("velocity",))
OBSERVATION = {STATE: Field((1,), names=("position",))}


class LineWorld:
    """Start at a seeded position in [-1, 1); success within 0.1 of zero; reward is the progress towards zero."""

    def __init__(self, batch_size: int, horizon: int = 12, cut_after: int | None = None, endless: bool = False):
        self.batch_size = batch_size
        self.spec = WorldSpec("line", OBSERVATION, ACTION, fps=10.0, horizon=horizon, rewards=("progress",))
        self.cut_after, self.endless = cut_after, endless
        self.position = np.zeros(batch_size)
        self.time = np.zeros(batch_size, dtype=np.int64)
        self.ended = np.ones(batch_size, dtype=bool)
        self.chunk_lengths: list[int] = []
        self.renders = 0

    def observe(self):
        return {STATE: self.position[:, None, None].copy(), TASK: np.array(["go to zero"] * self.batch_size)}

    def reset(self, rows=None, seeds=None, options=None):
        rows = np.arange(self.batch_size) if rows is None else np.asarray(rows)
        self.position[rows] = uniforms(np.asarray(seeds), 1)[:, 0] * 2 - 1
        self.time[rows], self.ended[rows] = 0, False
        return self.observe()

    def step(self, actions):
        validate_actions(actions, ACTION, self.batch_size)
        self.chunk_lengths.append(actions.shape[1])
        valid = np.zeros(actions.shape[:2], dtype=bool)
        reward = np.zeros(actions.shape[:2])
        for index in range(actions.shape[1]):
            live = ~self.ended
            before = np.abs(self.position)
            self.position[live] += np.clip(actions[live, index, 0], -0.2, 0.2)
            self.time[live] += 1
            valid[:, index] = live
            reward[:, index] = np.where(live, before - np.abs(self.position), 0.0)
            self.ended = self.success | self.over | self.cut
        return Step(
            observation=self.observe(),
            trace={},
            rewards={"progress": reward},
            valid=valid,
            terminated=self.success,
            truncated=self.over & ~self.success,
            success=self.success,
            horizon_end=self.cut if self.cut_after else None,
        )

    @property
    def success(self):
        return np.abs(self.position) < 0.1

    @property
    def over(self):
        return np.full(self.batch_size, False) if self.endless else self.time >= self.spec.horizon

    @property
    def cut(self):
        if self.cut_after is None:
            return np.full(self.batch_size, False)
        return (self.time >= self.cut_after) & ~self.success & ~self.over

    def render(self, rows=None, camera=None, height=240, width=240):
        self.renders += 1
        rows = np.arange(self.batch_size) if rows is None else np.asarray(rows)
        frames = np.full((len(rows), height, width, 3), 245, dtype=np.uint8)
        for frame, position in zip(frames, self.position[rows], strict=True):
            column = int((np.clip(position, -1, 1) + 1) / 2 * (width - 9))
            frame[height // 2 - 4 : height // 2 + 5, column : column + 9] = (30, 90, 200)
        return frames

    def close(self):
        pass


class LinePolicy:
    """Walk towards zero at `speed`, plus Gaussian noise, in chunks of `chunk` steps; noise obeys `deterministic`."""

    def __init__(self, speed: float = 0.15, noise: float = 0.0, chunk: int = 4):
        self.speed, self.noise = speed, noise
        self.spec = PolicySpec(OBSERVATION, ACTION, history=1, chunk=chunk, prediction=chunk, scored_steps=1, fps=10.0)
        self.resets = 0

    def act(self, observation, generator, *, deterministic=False):
        position = observation[STATE][:, -1]
        steps = torch.arange(self.spec.chunk)[None, :, None] * self.speed
        remaining = (position.abs()[:, None] - steps).clamp(0.0, self.speed)
        actions = -position.sign()[:, None] * remaining
        if not deterministic:
            actions = actions + self.noise * torch.randn(actions.shape, generator=generator)
        batch = len(position)
        return Decision(actions, {}, torch.zeros(batch, 1), torch.ones(batch, 1, dtype=torch.bool))

    def log_prob(self, observation, latents):
        return Scores(torch.zeros(1, 1), torch.zeros(1, 1))

    def reset(self, rows=None):
        self.resets += 1

    def save(self, folder: Path):
        raise NotImplementedError


class LineController:
    """The same walk, one control step at a time."""

    def __init__(self, speed: float = 0.15):
        self.speed = speed

    def reset(self, rows=None):
        pass

    def act(self, observation):
        position = observation[STATE][:, -1]
        return -np.sign(position) * np.minimum(np.abs(position), self.speed)
