"""Factors that only cameras see: colour, light, camera pose, texture and distractors.

Motion stays the same, bit by bit. A value is a strength from 0 (the scene's own appearance) to 1, except for the number
of distractors.
"""
# pyright: reportAttributeAccessIssue=false
# (MuJoCo's compiled classes have no type stubs.)

import mujoco
import numpy as np

from sims.graphics import Prop
from sims.render import recolour, relight
from sims.variations.protocol import Factor

CAMERA_SHIFT = 0.05
"""Largest move of a camera along each axis at strength 1, m."""
MOUNTED_SHIFT = 0.01
"""The same for a camera on a moving body, such as a wrist."""
CAMERA_TURN = np.deg2rad(3.0)
"""Largest turn of a camera about each of its axes at strength 1, rad."""
CAMERA_ZOOM = 0.05
"""Largest relative change of the field of view at strength 1."""
TABLE = "table"
"""Name of the geom on which distractors stand."""
RIM = 0.87
"""Distance of distractors from the table's centre, as a fraction of its half size."""
PLACES = 20
"""Places on the rim, and so the largest number of distractors."""


class Colour(Factor):
    """Hue, saturation and brightness of every material; see `sims.render.recolour`."""

    def change(self, model: mujoco.MjModel, value: float, generator: np.random.Generator) -> None:
        """Implement `Factor.change`."""
        recolour(model, generator, value)


class Light(Factor):
    """Direction, colour and strength of lights; see `sims.render.relight`."""

    def change(self, model: mujoco.MjModel, value: float, generator: np.random.Generator) -> None:
        """Implement `Factor.change`."""
        relight(model, generator, value)


class Camera(Factor):
    """Position, direction and field of view of every named camera."""

    @classmethod
    def obstacle(cls, model: mujoco.MjModel) -> str:
        """Implement `Factor.obstacle`."""
        return "" if model.ncam else "its scene has no camera"

    def change(self, model: mujoco.MjModel, value: float, generator: np.random.Generator) -> None:
        """Implement `Factor.change`."""
        cameras = model.ncam
        shift, turn = generator.uniform(-1, 1, (2, cameras, 3))
        is_fixed = model.body_weldid[model.cam_bodyid] == 0
        model.cam_pos[:] += value * shift * np.where(is_fixed, CAMERA_SHIFT, MOUNTED_SHIFT)[:, None]
        model.cam_fovy[:] *= 1 + value * CAMERA_ZOOM * generator.uniform(-1, 1, cameras)
        for camera in range(cameras):
            rotation = np.zeros(4)
            mujoco.mju_euler2Quat(rotation, value * CAMERA_TURN * turn[camera], "xyz")
            mujoco.mju_mulQuat(model.cam_quat[camera], model.cam_quat[camera].copy(), rotation)


class Texture(Factor):
    """Pattern of textured materials: blended with stripes, squares or blots of two other colours."""

    def __init__(self, model: mujoco.MjModel):
        super().__init__(model)
        self.textures = _material_textures(model)

    @classmethod
    def obstacle(cls, model: mujoco.MjModel) -> str:
        """Implement `Factor.obstacle`."""
        return "" if _material_textures(model) else "none of its materials has a texture"

    def change(self, model: mujoco.MjModel, value: float, generator: np.random.Generator) -> None:
        """Implement `Factor.change`."""
        for texture in self.textures:
            height, width = int(model.tex_height[texture]), int(model.tex_width[texture])
            channels, begin = int(model.tex_nchannel[texture]), int(model.tex_adr[texture])
            pixels = model.tex_data[begin : begin + height * width * channels].reshape(height, width, channels)
            share = _pattern(height, width, generator)[..., None]
            first, second = 255 * generator.uniform(0.2, 1.0, (2, min(channels, 3)))
            coloured = (1 - share) * first + share * second
            scene_pixels = pixels[..., :3].astype(np.float64)
            pixels[..., :3] = np.round((1 - value) * scene_pixels + value * coloured).astype(np.uint8)


class Distractors(Factor):
    """Number of coloured blocks, balls and cans on the rim of the table, which touch nothing."""

    high, swept = float(PLACES), (4.0,)
    integer = True

    def __init__(self, model: mujoco.MjModel):
        super().__init__(model)
        table = model.geom(TABLE)
        self._centre, self._half = np.array(table.pos), np.array(table.size)
        if table.type[0] == mujoco.mjtGeom.mjGEOM_BOX:
            self._centre[2] += self._half[2]

    @classmethod
    def obstacle(cls, model: mujoco.MjModel) -> str:
        """Implement `Factor.obstacle`."""
        geom = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_GEOM.value, TABLE)
        flat = (mujoco.mjtGeom.mjGEOM_BOX, mujoco.mjtGeom.mjGEOM_PLANE)
        if geom < 0 or model.geom_type[geom] not in flat or model.geom_bodyid[geom] or not model.geom_size[geom, 0]:
            return f"its scene has no geom named {TABLE}, a box or a bounded plane of the world, on which they stand"
        return ""

    def props(self, value: float, generator: np.random.Generator) -> tuple[Prop, ...]:
        """Implement `Factor.props`; more of them leave the others where they are."""
        from matplotlib.colors import hsv_to_rgb

        order = generator.permutation(PLACES)
        props: list[Prop] = []
        for place in order[: int(value)]:
            # A walk round the rim: four sides of PLACES / 4 places each.
            side, along = divmod(4 * int(place) / PLACES, 1.0)
            corner = np.array([RIM, RIM * (2 * along - 1)])
            turn = np.pi / 2 * side
            across = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]]) @ corner
            radius, height = generator.uniform(0.010, 0.018), generator.uniform(0.012, 0.025)
            yaw = generator.uniform(0, np.pi)
            colour = hsv_to_rgb([generator.uniform(), generator.uniform(0.4, 1.0), generator.uniform(0.4, 1.0)])
            kind, size = [
                (mujoco.mjtGeom.mjGEOM_BOX, (radius, radius, height)),
                (mujoco.mjtGeom.mjGEOM_CYLINDER, (radius, height, 0.0)),
                (mujoco.mjtGeom.mjGEOM_ELLIPSOID, (radius, radius, height)),
            ][int(generator.integers(3))]
            position = self._centre + np.array([*(across * self._half[:2]), height])
            rotation = [[np.cos(yaw), -np.sin(yaw), 0], [np.sin(yaw), np.cos(yaw), 0], [0, 0, 1]]
            props.append(Prop(kind, np.array(size), position, np.array(rotation), np.array([*colour, 1.0])))
        return tuple(props)


def _material_textures(model: mujoco.MjModel) -> tuple[int, ...]:
    """Return the numbers of the textures of materials."""
    return tuple(sorted({int(texture) for texture in np.asarray(model.mat_texid).ravel() if texture >= 0}))


def _pattern(height: int, width: int, generator: np.random.Generator) -> np.ndarray:
    """Return a random pattern [height, width] of numbers in [0, 1]: stripes, squares or blots."""
    kind, count = generator.integers(3), int(generator.integers(2, 7))
    rows, columns = np.meshgrid(np.arange(height) / height, np.arange(width) / width, indexing="ij")
    phase = generator.uniform(0, 2 * np.pi, 2)
    if kind == 0:
        return np.round(0.5 + 0.5 * np.sin(2 * np.pi * count * columns + phase[0]))
    waves = np.sin(2 * np.pi * count * rows + phase[0]) * np.sin(2 * np.pi * count * columns + phase[1])
    if kind == 1:
        return np.round(0.5 + 0.5 * np.sign(waves))
    return 0.5 + 0.5 * waves
