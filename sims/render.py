"""Fast off-screen images of many states: one graphics context per image size, no shadows, reflections or smoothing.

The same settings serve data collection, training and evaluation, so that a policy never sees another style of image.
"""
# pyright: reportAttributeAccessIssue=false
# (MuJoCo's compiled classes have no type stubs.)

import atexit
import weakref

import mujoco
import numpy as np

from robopolicy.core.errors import ConfigError
from sims.task import Markers

FREE_CAMERA = ""
"""MuJoCo's own view of the whole scene, for models that name no camera."""


class FrameRenderer:
    """Renders states of one model; contexts are made on first use and belong to the thread that made them."""

    def __init__(self, model: mujoco.MjModel):
        self._model = model
        quality = model.vis.quality
        quality.offsamples, quality.numslices, quality.numstacks, quality.numquads = 0, 16, 8, 1
        self._data = mujoco.MjData(model)
        self._renderers: dict[tuple[int, int], mujoco.Renderer] = {}
        self._option = mujoco.MjvOption()
        self._option.geomgroup[3] = 0

    def frames(self, qpos: np.ndarray, markers: Markers | None, camera: str, height: int, width: int) -> np.ndarray:
        """Render qpos [R, nq] with goal markers from `camera`, or FREE_CAMERA; returns uint8 [R, height, width, 3].

        Raises ConfigError when MuJoCo cannot open a graphics context.
        """
        renderer, model, data = self._renderer(height, width), self._model, self._data
        frames = np.empty((len(qpos), height, width, 3), dtype=np.uint8)
        for index, position in enumerate(qpos):
            data.qpos[:] = position
            if markers is not None:
                data.mocap_pos[:] = markers.position[index]
                data.mocap_quat[:] = markers.quaternion[index]
            mujoco.mj_kinematics(model, data)
            mujoco.mj_camlight(model, data)
            renderer.update_scene(data, -1 if camera == FREE_CAMERA else camera, self._option)
            renderer.scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = 0
            renderer.scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0
            renderer.render(out=frames[index])
        return frames

    def _renderer(self, height: int, width: int) -> mujoco.Renderer:
        size = (height, width)
        if size not in self._renderers:
            limit = self._model.vis.global_
            limit.offheight, limit.offwidth = max(limit.offheight, height), max(limit.offwidth, width)
            try:
                self._renderers[size] = mujoco.Renderer(self._model, height, width)
            except Exception as error:
                raise ConfigError(
                    f"MuJoCo could not open a graphics context ({error}). On a machine without a display, install EGL "
                    "(Debian and Ubuntu: apt-get install libegl1 libgl1) or OSMesa, set MUJOCO_GL=egl or osmesa, and "
                    "import robopolicy or sims before mujoco."
                ) from error
            # Exit handlers run last in, first out: this one must come after the graphics library's own.
            atexit.register(_close_at_exit, weakref.ref(self))
        return self._renderers[size]

    def close(self) -> None:
        """Free every graphics context."""
        for renderer in self._renderers.values():
            renderer.close()
        self._renderers.clear()


def _close_at_exit(reference: weakref.ref[FrameRenderer]) -> None:
    renderer = reference()
    if renderer is not None:
        renderer.close()
