"""A point on a line that moves by its action, at most 1 a control step; `x` is its place."""

import numpy as np

from robopolicy.core.spec import STATE, TASK, Field, WorldSpec
from robopolicy.core.world import Step

ACTION = Field((1,), low=-1.0, high=1.0)
FIELDS = {STATE: Field((1,), names=("x",))}


class LineWorld:
    """It starts at 0, and has a limit of `horizon` control steps and no goal of its own."""

    def __init__(self, batch_size, horizon=10, history=1):
        self.batch_size = batch_size
        self.spec = WorldSpec("line", FIELDS, ACTION, 1.0, horizon, history, rewards=("none",))
        self.x, self.time = np.zeros(batch_size), np.zeros(batch_size, int)

    def reset(self, rows=None, seeds=None, options=None):
        rows = np.arange(self.batch_size) if rows is None else np.asarray(rows)
        self.x[rows], self.time[rows] = 0.0, 0
        return self.observe()

    def observe(self):
        state = np.repeat(self.x[:, None, None], self.spec.history, axis=1).astype(np.float32)
        return {STATE: state, TASK: np.full(self.batch_size, "")}

    def step(self, actions):
        valid = self.time < self.spec.horizon
        self.x, self.time = self.x + np.where(valid, np.clip(actions[:, 0, 0], -1, 1), 0.0), self.time + valid
        trace = {STATE: self.x[:, None, None].astype(np.float32)}
        none, never = np.zeros((self.batch_size, 1)), np.zeros(self.batch_size, bool)
        return Step(self.observe(), trace, {"none": none}, valid[:, None], never, self.time >= self.spec.horizon, never)

    def close(self):
        pass
