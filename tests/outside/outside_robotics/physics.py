"""A physics engine of one's own: MuJoCo, one row and one step at a time."""

import mujoco
import numpy as np

STATE = mujoco.mjtState.mjSTATE_FULLPHYSICS


class Stepped:
    """Steps a row after the other. slower: repeats everything so often, to no effect."""

    def __init__(self, model, batch_size, *, threads=1, slower: int = 1):
        self.model, self.data = model, mujoco.MjData(model)
        self.slower = slower

    def advance(self, state, control, every):
        rows, steps = control.shape[:2]
        states = np.empty((rows, steps, state.shape[1]))
        sensors = np.empty((rows, steps, self.model.nsensordata))
        for row in list(range(rows)) * self.slower:
            mujoco.mj_setState(self.model, self.data, state[row], STATE)
            for step in range(steps):
                self.data.ctrl[:] = control[row, step]
                mujoco.mj_step(self.model, self.data, every)
                mujoco.mj_getState(self.model, self.data, states[row, step], STATE)
                sensors[row, step] = self.data.sensordata
        return states, sensors

    def close(self):
        pass
