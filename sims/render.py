"""Fast off-screen rendering of many states: one graphics context per image size, without shadows, reflections or
smoothing.

Data collection, training and evaluation use the same settings, so a policy always reads the same style of image, unless
another is requested. Structure-guided style augmentation (Sword) restyles training images while depth, segmentation and
actions stay unchanged. In a simulator this is exact and free: the same states are rendered with other materials and
lights.
"""
# pyright: reportAttributeAccessIssue=false
# (MuJoCo's compiled classes have no type stubs.)

from collections.abc import Sequence
from dataclasses import dataclass

import mujoco
import numpy as np

from robopolicy.core.randomness import numpy_generator
from sims.graphics import open_renderer, upload_textures, without_shadows
from sims.task import Markers

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


class FrameRenderer:
    """Renders states of one model; contexts are created on first use and belong to their creating thread."""

    def __init__(self, model: mujoco.MjModel):
        self._model = model
        quality = model.vis.quality
        quality.offsamples = 0
        quality.numslices = 16
        quality.numstacks = 8
        quality.numquads = 1
        self._data = mujoco.MjData(model)
        self._own_look = Look(model)
        self._renderers: dict[tuple[int, int], mujoco.Renderer] = {}
        self._textured: dict[tuple[int, int], Look] = {}
        self._option = mujoco.MjvOption()
        self._option.geomgroup[3] = 0

    def frames(
        self,
        qpos: np.ndarray,
        markers: Markers | None,
        camera: str,
        height: int,
        width: int,
        looks: Sequence[Look] | None = None,
    ) -> np.ndarray:
        """Render qpos [R, nq] with goal markers from `camera`, or FREE_CAMERA; returns uint8 [R, height, width, 3].

        looks: appearance of each row [R], None for the model's own. Raises ConfigError when MuJoCo cannot open a
        graphics context.
        """
        renderer = self._renderer(height, width)
        data = self._data
        view = _view(self._model, camera)
        frames = np.empty((len(qpos), height, width, 3), dtype=np.uint8)
        for index, position in enumerate(qpos):
            look = self._own_look if looks is None else looks[index]
            model = look.model
            data.qpos[:] = position
            if markers is not None:
                data.mocap_pos[:] = markers.position[index]
                data.mocap_quat[:] = markers.quaternion[index]
            mujoco.mj_kinematics(model, data)
            mujoco.mj_camlight(model, data)
            self._show_textures(renderer, look)
            every_kind = mujoco.mjtCatBit.mjCAT_ALL.value
            mujoco.mjv_updateScene(model, data, self._option, None, view, every_kind, renderer.scene)
            _add_props(renderer.scene, look.props)
            without_shadows(renderer)
            renderer.render(out=frames[index])
        return frames

    def _show_textures(self, renderer: mujoco.Renderer, look: Look) -> None:
        """Make the graphics context of `renderer` use the textures of `look`; it keeps those of the last image."""
        size = (renderer.height, renderer.width)
        last = self._textured.get(size, self._own_look)
        if look is not last and (textures := {*last.textures, *look.textures}):
            upload_textures(renderer, look.model, sorted(textures))
            self._textured[size] = look

    def _renderer(self, height: int, width: int) -> mujoco.Renderer:
        size = (height, width)
        if size not in self._renderers:
            self._renderers[size] = open_renderer(self._model, height, width, self)
        return self._renderers[size]

    def close(self) -> None:
        """Free every graphics context."""
        for renderer in self._renderers.values():
            renderer.close()
        self._renderers.clear()
        self._textured.clear()


def _view(model: mujoco.MjModel, camera: str) -> mujoco.MjvCamera:
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


def restyle(model: mujoco.MjModel, style: int, strength: float = 1.0) -> None:
    """Apply the style number `style` to `model`, in place; physics and transparent parts are unchanged.

    Materials and plain geoms keep their shade except for a random change of hue, saturation and brightness; textures
    shift as a whole; lights change direction, colour and strength. strength: 0 changes nothing, 1 allows every hue.
    Call it before rendering: textures are uploaded to the graphics card only once.
    """
    generator = numpy_generator(style, "style")
    recolour(model, generator, strength)
    for texture in range(model.ntex):
        begin, channels = model.tex_adr[texture], model.tex_nchannel[texture]
        size = model.tex_height[texture] * model.tex_width[texture] * channels
        pixels = model.tex_data[begin : begin + size].reshape(-1, channels)
        colours = np.concatenate([pixels[:, :3] / 255, np.ones((len(pixels), 1))], 1)
        shifted = _recoloured(colours, generator, strength, together=True)
        pixels[:, :3] = np.round(255 * shifted[:, :3]).astype(np.uint8)
    relight(model, generator, strength)


def recolour(model: mujoco.MjModel, generator: np.random.Generator, strength: float) -> None:
    """Change hue, saturation and brightness of every material and plain geom, in place; strength: see `restyle`."""
    model.mat_rgba[:] = _recoloured(model.mat_rgba, generator, strength)
    without_material = model.geom_matid < 0
    model.geom_rgba[without_material] = _recoloured(model.geom_rgba[without_material], generator, strength)


def relight(model: mujoco.MjModel, generator: np.random.Generator, strength: float) -> None:
    """Change direction, colour and strength of the lights, in place; strength: see `restyle`."""
    if model.nlight:
        tilt = strength * generator.normal(0, 0.35, (model.nlight, 3))
        direction = model.light_dir + tilt
        model.light_dir[:] = direction / np.linalg.norm(direction, axis=1, keepdims=True)
        model.light_diffuse[:] *= 1 + strength * generator.uniform(-0.5, 0.5, (model.nlight, 3))
    headlight = model.vis.headlight
    headlight.ambient[:] = headlight.ambient * (1 + strength * generator.uniform(-0.35, 0.35))
    headlight.diffuse[:] = headlight.diffuse * (1 + strength * generator.uniform(-0.35, 0.35))


def _recoloured(
    rgba: np.ndarray, generator: np.random.Generator, strength: float, together: bool = False
) -> np.ndarray:
    """Return colours [N, 4] with modified hue, saturation and brightness, individually or all the same."""
    from matplotlib.colors import hsv_to_rgb, rgb_to_hsv

    count = 1 if together else len(rgba)
    # Hue is a circle, so it wraps round; saturation and brightness are kept where a camera still sees the shape.
    hsv = rgb_to_hsv(np.clip(rgba[:, :3], 0, 1))
    hsv[:, 0] = (hsv[:, 0] + strength * generator.uniform(-0.5, 0.5, count)) % 1.0
    hsv[:, 1] = np.clip(hsv[:, 1] + strength * generator.uniform(-0.3, 0.3, count), 0, 1)
    hsv[:, 2] = np.clip(hsv[:, 2] * (1 + strength * generator.uniform(-0.35, 0.25, count)), 0.05, 1)
    return np.concatenate([hsv_to_rgb(hsv), rgba[:, 3:]], 1)
