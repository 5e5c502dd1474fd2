"""MuJoCo's off-screen graphics contexts, opened alike by all simulators. Runs inside worker processes: no torch."""
# pyright: reportAttributeAccessIssue=false
# (MuJoCo's compiled classes have no type stubs.)

import atexit
import contextlib
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import mujoco

from robopolicy.core.errors import ConfigError


class HoldsContexts(Protocol):
    """Owner of graphics contexts."""

    def close(self) -> None:
        """Free every graphics context."""
        ...


def open_renderer(model: mujoco.MjModel, height: int, width: int, owner: HoldsContexts) -> mujoco.Renderer:
    """Return a renderer of images of this size, in pixels; `owner` is closed when this process exits.

    Raises ConfigError when MuJoCo cannot open a graphics context.
    """
    limit = model.vis.global_
    limit.offheight, limit.offwidth = max(limit.offheight, height), max(limit.offwidth, width)
    try:
        renderer = mujoco.Renderer(model, height, width)
    except Exception as error:
        raise ConfigError(
            f"MuJoCo could not open a graphics context ({error}). On a machine without a display, install EGL "
            "(Debian and Ubuntu: apt-get install libegl1 libgl1) or OSMesa, set MUJOCO_GL=egl or osmesa, and "
            "import robopolicy or sims before mujoco."
        ) from error
    # Exit handlers run last in, first out: this one must come after the graphics library's own.
    atexit.register(_close_at_exit, weakref.ref(owner))
    return renderer


def _close_at_exit(reference: "weakref.ref[HoldsContexts]") -> None:
    owner = reference()
    if owner is not None:
        with contextlib.suppress(Exception):  # another package may have closed the display before
            owner.close()


def without_shadows(renderer: mujoco.Renderer) -> None:
    """Draw the present scene of `renderer` without shadows and reflections."""
    renderer.scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = 0
    renderer.scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0


def upload_textures(renderer: mujoco.Renderer, model: mujoco.MjModel, textures: Iterable[int]) -> None:
    """Send textures, by number, of a variation of the renderer's model to its graphics context."""
    context: Any = renderer
    if context._gl_context:
        context._gl_context.make_current()
    for texture in textures:
        mujoco.mjr_uploadTexture(model, context._mjr_context, texture)
