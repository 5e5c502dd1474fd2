"""A world whose every step is known: a number that actions add to, paid for being near a place."""

import numpy as np

from robopolicy.core.spec import STATE, TASK, Field, WorldSpec
from robopolicy.core.world import Step


class StepsWorld:
    """The state is a number x; an action adds to it; reward -(x - goal)^2; the task ends beyond `end`, if that is set.

    played: seeds of every episode that was begun; stepped: control steps that rows which had not ended were given.
    """

    def __init__(self, rows=4, horizon=6, goal=0.5, end=None, gain=0.2):
        self.batch_size, self.goal, self.end, self.gain = rows, goal, end, gain
        self.spec = WorldSpec(
            "steps",
            {STATE: Field((1,))},
            Field((1,), low=-1.0, high=1.0),
            fps=10.0,
            horizon=horizon,
            rewards=("near",),
        )
        self.x, self.steps = np.zeros(rows), np.zeros(rows, dtype=int)
        self.over, self.out = np.zeros(rows, dtype=bool), np.zeros(rows, dtype=bool)
        self.played, self.stepped, self.actions = [], 0, []

    def _seen(self):
        return {STATE: self.x[:, None, None].astype(np.float32), TASK: np.array([""] * self.batch_size)}

    def reset(self, rows=None, seeds=None, options=None):
        """Begin where the seed says."""
        chosen = np.arange(self.batch_size) if rows is None else np.asarray(rows)
        self.played += [int(seed) for seed in seeds]
        self.x[chosen] = [np.random.default_rng(int(seed)).uniform(-0.5, 0.5) for seed in seeds]
        self.steps[chosen], self.over[chosen], self.out[chosen] = 0, False, False
        return self._seen()

    def step(self, actions):
        """Add, pay, end."""
        count = actions.shape[1]
        valid, reward = np.zeros((2, self.batch_size, count))
        trace = np.zeros((self.batch_size, count, 1), dtype=np.float32)
        self.actions.append(actions.copy())
        for place in range(count):
            alive = ~(self.over | self.out)
            valid[:, place] = alive
            self.x = np.where(alive, self.x + self.gain * actions[:, place, 0].clip(-1, 1), self.x)
            reward[:, place] = np.where(alive, -np.square(self.x - self.goal), 0.0)
            trace[:, place, 0] = self.x
            self.steps += alive
            self.stepped += int(alive.sum())
            if self.end is not None:
                self.over |= alive & (self.x > self.end)
            self.out |= alive & ~self.over & (self.steps >= self.spec.horizon)
        return Step(
            self._seen(),
            {STATE: trace},
            {"near": reward},
            valid > 0,
            self.over.copy(),
            self.out.copy(),
            self.over.copy(),
        )

    def close(self):
        """Nothing to free."""
