"""MuJoCo's off-screen graphics contexts, opened alike by all simulators. Runs inside worker processes: no torch."""
# pyright: reportAttributeAccessIssue=false
# (MuJoCo's compiled classes have no type stubs.)

import atexit
import contextlib
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mujoco
import numpy as np

from robopolicy.core.errors import ConfigError

FREE_CAMERA = ""
"""MuJoCo's free camera on the whole scene, for models without named cameras."""


@dataclass(frozen=True)
class Prop:
    """Geometry that is drawn into images and is no part of the model.

    kind: a mujoco.mjtGeom; size: [3] m, as of a geom of this kind; position: [3] m; rotation: [3, 3]; rgba: [4].
    """

    kind: mujoco.mjtGeom
    size: np.ndarray
    position: np.ndarray
    rotation: np.ndarray
    rgba: np.ndarray


@dataclass(frozen=True)
class Look:
    """Appearance of one episode. model: a copy of the scene's model with other values; textures: numbers of the
    textures that differ from the scene's.
    """

    model: mujoco.MjModel
    props: tuple[Prop, ...] = ()
    textures: tuple[int, ...] = ()


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


class LookRenderer:
    """A graphics context, opened for one model, that draws the looks of this model; shadows: whether it draws them."""

    def __init__(self, renderer: mujoco.Renderer, shadows: bool = False):
        self._renderer, self._shadows = renderer, shadows
        self._textured: Look | None = None

    def image(
        self,
        look: Look,
        data: mujoco.MjData,
        view: mujoco.MjvCamera,
        option: mujoco.MjvOption,
        out: np.ndarray | None = None,
    ) -> np.ndarray:
        """Return uint8 [height, width, 3] of `data`, whose kinematics are computed with the model of `look`.

        out: array to draw into, a new one by default.
        """
        renderer, last = self._renderer, self._textured
        textures = {*look.textures, *(last.textures if last else ())}
        if look is not last and textures:  # the context keeps those of the last image
            upload_textures(renderer, look.model, sorted(textures))
            self._textured = look
        every_kind = mujoco.mjtCatBit.mjCAT_ALL.value
        mujoco.mjv_updateScene(look.model, data, option, None, view, every_kind, renderer.scene)
        _add_props(renderer.scene, look.props)
        if not self._shadows:
            without_shadows(renderer)
        return renderer.render(out=out)

    def close(self) -> None:
        """Free the graphics context."""
        self._renderer.close()


def view_of(model: mujoco.MjModel, camera: str) -> mujoco.MjvCamera:
    """Return the view from a named camera of the model, or from its free camera."""
    view = mujoco.MjvCamera()
    if camera == FREE_CAMERA:
        mujoco.mjv_defaultFreeCamera(model, view)
        return view
    view.type = mujoco.mjtCamera.mjCAMERA_FIXED.value
    view.fixedcamid = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_CAMERA.value, camera)
    return view


def _add_props(scene: mujoco.MjvScene, props: Sequence[Prop]) -> None:
    for prop in props:
        geom = scene.geoms[scene.ngeom]
        mujoco.mjv_initGeom(geom, prop.kind, prop.size, prop.position, prop.rotation.ravel(), prop.rgba)
        geom.specular = 0.0
        scene.ngeom += 1
