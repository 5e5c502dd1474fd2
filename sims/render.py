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

import mujoco
import numpy as np

from robopolicy.core.randomness import numpy_generator
from sims.graphics import Look, LookRenderer, open_renderer, view_of
from sims.task import Markers


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
        self._renderers: dict[tuple[int, int], LookRenderer] = {}
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
        view = view_of(self._model, camera)
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
            renderer.image(look, data, view, self._option, out=frames[index])
        return frames

    def _renderer(self, height: int, width: int) -> LookRenderer:
        size = (height, width)
        if size not in self._renderers:
            self._renderers[size] = LookRenderer(open_renderer(self._model, height, width, self))
        return self._renderers[size]

    def close(self) -> None:
        """Free every graphics context."""
        for renderer in self._renderers.values():
            renderer.close()
        self._renderers.clear()


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
