"""An operator of one's own: pushes with all its force for some control steps, then hands back."""

import numpy as np

from robopolicy.client.executed import ActingAgent


class Pusher:
    """`Operator` of any number of robots. steps: of a turn."""

    agent = ActingAgent.SCRIPT

    def __init__(self, site, steps=3):
        self.action, self.steps = np.broadcast_to(site.action.high, site.action.shape), steps
        self.done = np.zeros(site.rows, dtype=int)

    def start(self, seeds, rows=None):
        pass

    def begin(self, rows):
        self.done[rows] = 0

    def act(self, observation, rows, last):
        self.done[rows] += 1
        return np.repeat(self.action[None], len(rows), axis=0)

    def finished(self, rows):
        return self.done[rows] >= self.steps

    def close(self):
        pass
