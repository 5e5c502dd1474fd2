"""What a user brings along that no package has installed, nor the one beside this: it is found by dotted path alone."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from robopolicy.core.policy import Decision, TensorObservation
from robopolicy.core.spec import STATE, TASK, Field, PolicySpec, WorldSpec, validate_actions, validate_observation
from robopolicy.core.world import Step
from robopolicy.policies.checkpoint import save_policy

FIELDS = {STATE: Field((1,), names=("position",))}
ACTION = Field((1,), low=-0.2, high=0.2, names=("velocity",))


class Line:
    """A point on a line that must reach zero; history is accepted, images are not."""

    def __init__(self, batch_size: int, *, seed: int = 0, history: int = 1, horizon: int = 6):
        self.batch_size, self.history = batch_size, history
        self.spec = WorldSpec("line", FIELDS, ACTION, fps=10.0, horizon=horizon, history=history)
        self.position, self.time = np.zeros(batch_size), np.zeros(batch_size, dtype=int)
        self.running = np.zeros(batch_size, dtype=bool)

    def observe(self):
        frames = np.repeat(self.position[:, None, None], self.history, 1)
        return {STATE: frames.astype(np.float32), TASK: np.array([""] * self.batch_size)}

    def reset(self, rows=None, seeds=None, options=None):
        rows = np.arange(self.batch_size) if rows is None else np.asarray(rows)
        self.position[rows] = [np.random.default_rng(seed).uniform(-1, 1) for seed in np.asarray(seeds)]
        self.time[rows], self.running[rows] = 0, True
        return self.observe()

    def step(self, actions):
        validate_actions(actions, ACTION, self.batch_size)
        valid, reward = np.zeros(actions.shape[:2], dtype=bool), np.zeros(actions.shape[:2])
        trace = np.zeros((*actions.shape[:2], 1), dtype=np.float32)
        for index in range(actions.shape[1]):
            before = np.abs(self.position)
            self.position[self.running] += np.clip(actions[self.running, index, 0], -0.2, 0.2)
            self.time[self.running] += 1
            valid[:, index], trace[:, index, 0] = self.running, self.position
            reward[:, index] = np.where(self.running, before - np.abs(self.position), 0.0)
            self.running &= (np.abs(self.position) >= 0.1) & (self.time < self.spec.horizon)
        success = np.abs(self.position) < 0.1
        over = (self.time >= self.spec.horizon) & ~success
        return Step(self.observe(), {STATE: trace}, {"reward": reward}, valid, success.copy(), over, success.copy())

    def close(self):
        pass


class Towards:
    """A controller that goes to zero."""

    def reset(self, rows=None):
        pass

    def act(self, observation):
        return np.clip(-observation[STATE][:, -1].astype(float), -0.2, 0.2)


def make_towards() -> Towards:
    """Return a controller, as a function may."""
    return Towards()


@dataclass(frozen=True)
class LinearConfig:
    """A linear policy."""

    chunk: int = 2
    """Control steps a decision."""
    gain: float = 1.0
    """What it begins with."""


class Linear(nn.Module):
    """A `Policy` that acts and imitates, and scores nothing; its constructor is all that `build` and `load` need."""

    configuration = LinearConfig

    def __init__(self, config, observation, action, *, fps, instructions=("",), values=None, seed=0):
        super().__init__()
        self.config, self.fields, self.action, self.fps, self.instructions = (
            config,
            observation,
            action,
            fps,
            instructions,
        )
        self.gain = nn.Parameter(torch.tensor(float(config.gain)))

    @property
    def spec(self) -> PolicySpec:
        chunk = self.config.chunk
        return PolicySpec(self.fields, self.action, 1, chunk, chunk, 0, self.fps, self.instructions)

    def chunk(self, observation: TensorObservation) -> Tensor:
        validate_observation(observation, self.fields, history=1)
        return (-self.gain * torch.as_tensor(observation[STATE])[:, -1])[:, None].repeat(1, self.config.chunk, 1)

    @torch.no_grad()
    def act(self, observation, generator, *, deterministic=False) -> Decision:
        return Decision(self.chunk(observation).clamp(-0.2, 0.2))

    def loss(self, batch: Any, generator) -> dict[str, Tensor]:
        return {"imitation": (self.chunk(batch["observation"]) - batch["actions"]).square().mean((1, 2))}

    def reset(self, rows=None) -> None:
        pass

    def save(self, folder) -> None:
        save_policy(self, folder)


def plain(rollouts, context, *, scale: float = 1.0):
    """A = the return."""
    return scale * rollouts.row_return[:, None].expand(rollouts.shape)
