"""Worlds of a few lines for claims that need no physics: doors, of which a policy has to remember, and a line.

Axes: B row, R selected rows, H history frame, C chunk step, A action dimension.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from robopolicy.core.arrays import Array
from robopolicy.core.randomness import uniforms
from robopolicy.core.spec import STATE, TASK, Field, Observation, WorldSpec
from robopolicy.core.world import Rows, Snapshot, Step

DOORS, TRIES = 4, 3
ACTION = Field((1,), low=-1.0, high=1.0)
FIELDS = {STATE: Field((1,), names=("x",))}
"""Observation of a `LineWorld`."""

Seeds = Sequence[int] | Array | None
Options = Mapping[str, Any] | None


class DoorsWorld:
    """One of four doors is right in a scene, and three may be opened in an episode; only memory tells which were tried.

    Reward 1 and the end for the right door, which the seed decides; the state is the same everywhere.
    """

    def __init__(self, batch_size: int, history: int = 1):
        self.batch_size = batch_size
        self.spec = WorldSpec("doors", {STATE: Field((1,))}, ACTION, 10.0, TRIES, history)
        self.right, self.time = np.zeros(batch_size, int), np.zeros(batch_size, int)
        self.won = np.zeros(batch_size, bool)

    def reset(self, rows: Rows = None, seeds: Seeds = None, options: Options = None) -> Observation:
        """Start new episodes in `rows` [R], one seed each; see `World.reset`."""
        rows = np.arange(self.batch_size) if rows is None else np.asarray(rows)
        self.right[rows] = (uniforms(np.asarray(seeds), 1)[:, 0] * DOORS).astype(int)
        self.time[rows], self.won[rows] = 0, False
        return self.observe()

    def observe(self) -> Observation:
        """Return the state of all rows, key -> [B, H, 1], which never changes."""
        state = np.ones((self.batch_size, self.spec.history, 1), np.float32)
        return {STATE: state, TASK: np.full(self.batch_size, self.spec.instructions[0])}

    def step(self, actions: Array) -> Step:
        """Open the door at each action [B, 1, 1]."""
        door = np.round((actions[:, 0, 0] + 1) / 2 * (DOORS - 1)).astype(int)
        valid = (self.time < TRIES) & ~self.won
        found = valid & (door == self.right)
        self.time, self.won = self.time + valid, self.won | found
        trace = {STATE: np.ones((self.batch_size, 1, 1), np.float32)}
        reward = {"found": found.astype(float)[:, None]}
        over = (self.time >= TRIES) & ~self.won
        return Step(self.observe(), trace, reward, valid[:, None], self.won.copy(), over, self.won.copy())

    def snapshot(self, rows: Rows = None) -> Snapshot:
        """Return the state of `rows` [R]."""
        rows = np.arange(self.batch_size) if rows is None else np.asarray(rows)
        return Snapshot({"right": self.right[rows], "time": self.time[rows], "won": self.won[rows]})

    def restore(self, snapshot: Snapshot, rows: Rows = None) -> Observation:
        """Set the state of `rows` [R]."""
        rows = np.arange(self.batch_size) if rows is None else np.asarray(rows)
        for name, array in snapshot.arrays.items():
            getattr(self, name)[rows] = array
        return self.observe()

    def close(self) -> None:
        """Nothing is open."""


class LineWorld:
    """A point that starts at 0 on a line and moves by its action, at most 1 a control step; `x` is its place.

    It has a limit of `horizon` control steps and no goal of its own.
    """

    def __init__(self, batch_size: int, horizon: int = 10, history: int = 1):
        self.batch_size = batch_size
        self.spec = WorldSpec("line", FIELDS, ACTION, 1.0, horizon, history, rewards=("none",))
        self.x, self.time = np.zeros(batch_size), np.zeros(batch_size, int)

    def reset(self, rows: Rows = None, seeds: Seeds = None, options: Options = None) -> Observation:
        """Start new episodes in `rows` [R], all alike; see `World.reset`."""
        rows = np.arange(self.batch_size) if rows is None else np.asarray(rows)
        self.x[rows], self.time[rows] = 0.0, 0
        return self.observe()

    def observe(self) -> Observation:
        """Return the places of all rows, key -> [B, H, 1]."""
        state = np.repeat(self.x[:, None, None], self.spec.history, axis=1).astype(np.float32)
        return {STATE: state, TASK: np.full(self.batch_size, "")}

    def step(self, actions: Array) -> Step:
        """Move all points by their actions [B, 1, 1]."""
        valid = self.time < self.spec.horizon
        self.x, self.time = self.x + np.where(valid, np.clip(actions[:, 0, 0], -1, 1), 0.0), self.time + valid
        trace = {STATE: self.x[:, None, None].astype(np.float32)}
        none, never = np.zeros((self.batch_size, 1)), np.zeros(self.batch_size, bool)
        return Step(self.observe(), trace, {"none": none}, valid[:, None], never, self.time >= self.spec.horizon, never)

    def close(self) -> None:
        """Nothing is open."""
