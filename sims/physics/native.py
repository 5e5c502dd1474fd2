"""Physics on MuJoCo's native rollout threads: one call advances all rows, without Python per row or step."""
# pyright: reportAttributeAccessIssue=false
# (MuJoCo's compiled classes have no type stubs.)

from collections.abc import Sequence

import mujoco
import numpy as np
from mujoco.rollout import Rollout

from sims.physics.protocol import state_layout


class NativePhysics:
    """Physics engine that runs on CPU threads with `mujoco.rollout`; implements `Physics` and
    `PhysicsOfModels`.

    threads: number of threads. A row that diverges repeats its last state, so its time stands still.
    """

    def __init__(self, model: mujoco.MjModel, batch_size: int, *, threads: int = 1):
        self._size = state_layout(model).size
        self._sensors = model.nsensordata
        # 0 threads means the caller's own: a pool of one would only add a hand-over.
        self._pool = Rollout(nthread=threads if threads > 1 else 0)
        self._data = [mujoco.MjData(model) for _ in range(max(1, threads))]
        self._models = [model] * batch_size

    def advance(self, state: np.ndarray, control: np.ndarray, every: int) -> tuple[np.ndarray, np.ndarray]:
        """Simulate C control steps: state [R, nstate], control [R, C, nu] -> [R, C, nstate], [R, C, nsensordata]."""
        return self.advance_each(self._models[: len(state)], state, control, every)

    def advance_each(
        self, models: Sequence[mujoco.MjModel], state: np.ndarray, control: np.ndarray, every: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Implement `PhysicsOfModels.advance_each`: state [R, nstate], control [R, C, nu] -> [R, C, nstate], [R, C,
        nsensordata].
        """
        repeated = np.repeat(control, every, axis=1)
        count, steps = repeated.shape[:2]
        states = np.empty((count, steps, self._size))
        sensors = np.empty((count, steps, self._sensors))
        self._pool.rollout(
            list(models),
            self._data,
            np.ascontiguousarray(state),
            repeated,
            skip_checks=True,
            nstep=steps,
            state=states,
            sensordata=sensors,
        )
        # Only the last physics step of every control step is observed.
        last = slice(every - 1, None, every)
        return np.ascontiguousarray(states[:, last]), np.ascontiguousarray(sensors[:, last])

    def close(self) -> None:
        """Free the threads."""
        self._pool.close()
