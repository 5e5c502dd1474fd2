"""Doors: one of four is right in a scene, and three may be opened in an episode. Only memory tells which were tried."""

import numpy as np

from robopolicy.core.randomness import uniforms
from robopolicy.core.spec import STATE, TASK, Field, WorldSpec
from robopolicy.core.world import Snapshot, Step

DOORS, TRIES = 4, 3
ACTION = Field((1,), low=-1.0, high=1.0)


class DoorsWorld:
    """Reward 1 and the end for the right door, which the seed decides; the state is the same everywhere."""

    def __init__(self, batch_size: int, history: int = 1):
        self.batch_size = batch_size
        self.spec = WorldSpec("doors", {STATE: Field((1,))}, ACTION, 10.0, TRIES, history)
        self.right, self.time = np.zeros(batch_size, int), np.zeros(batch_size, int)
        self.won = np.zeros(batch_size, bool)

    def reset(self, rows=None, seeds=None, options=None):
        rows = np.arange(self.batch_size) if rows is None else np.asarray(rows)
        self.right[rows] = (uniforms(np.asarray(seeds), 1)[:, 0] * DOORS).astype(int)
        self.time[rows], self.won[rows] = 0, False
        return self.observe()

    def observe(self):
        state = np.ones((self.batch_size, self.spec.history, 1), np.float32)
        return {STATE: state, TASK: np.full(self.batch_size, self.spec.instructions[0])}

    def step(self, actions):
        door = np.round((actions[:, 0, 0] + 1) / 2 * (DOORS - 1)).astype(int)
        valid = (self.time < TRIES) & ~self.won
        found = valid & (door == self.right)
        self.time, self.won = self.time + valid, self.won | found
        trace = {STATE: np.ones((self.batch_size, 1, 1), np.float32)}
        reward = {"found": found.astype(float)[:, None]}
        over = (self.time >= TRIES) & ~self.won
        return Step(self.observe(), trace, reward, valid[:, None], self.won.copy(), over, self.won.copy())

    def snapshot(self, rows=None):
        rows = np.arange(self.batch_size) if rows is None else np.asarray(rows)
        return Snapshot({"right": self.right[rows], "time": self.time[rows], "won": self.won[rows]})

    def restore(self, snapshot, rows=None):
        rows = np.arange(self.batch_size) if rows is None else np.asarray(rows)
        for name, array in snapshot.arrays.items():
            getattr(self, name)[rows] = array
        return self.observe()

    def close(self):
        pass
