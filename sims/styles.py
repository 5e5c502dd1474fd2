"""Other materials and lights for the same scene: what a camera sees changes, what happens does not.

Structure-guided style augmentation (Sword) restyles training images while depth, segmentation and actions stay; in a
simulator that is exact and free: the same states are rendered in another look.
"""
# pyright: reportAttributeAccessIssue=false
# (MuJoCo's compiled classes have no type stubs.)

import mujoco
import numpy as np

from robopolicy.core.randomness import numpy_generator


def restyle(model: mujoco.MjModel, style: int, strength: float = 1.0) -> None:
    """Give `model` the look number `style`, in place; physics is untouched, and so is what is transparent.

    Materials and plain geoms keep their shade but for a random turn of hue and a shift of saturation and brightness;
    textures shift as a whole; lights change direction, colour and strength. strength: 0 changes nothing, 1 makes every
    hue possible. Call it before images are taken: textures are handed to the graphics card once.
    """
    generator = numpy_generator(style, "style")
    model.mat_rgba[:] = _recoloured(model.mat_rgba, generator, strength)
    plain = model.geom_matid < 0
    model.geom_rgba[plain] = _recoloured(model.geom_rgba[plain], generator, strength)
    for texture in range(model.ntex):
        begin, channels = model.tex_adr[texture], model.tex_nchannel[texture]
        size = model.tex_height[texture] * model.tex_width[texture] * channels
        pixels = model.tex_data[begin : begin + size].reshape(-1, channels)
        colours = np.concatenate([pixels[:, :3] / 255, np.ones((len(pixels), 1))], 1)
        shifted = _recoloured(colours, generator, strength, together=True)
        pixels[:, :3] = np.round(255 * shifted[:, :3]).astype(np.uint8)
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
    """Return colours [N, 4] with other hue, saturation and brightness, each its own or all the same."""
    from matplotlib.colors import hsv_to_rgb, rgb_to_hsv

    count = 1 if together else len(rgba)
    # Hue is a circle, so it wraps round; saturation and brightness are kept where a camera still sees the shape.
    hsv = rgb_to_hsv(np.clip(rgba[:, :3], 0, 1))
    hsv[:, 0] = (hsv[:, 0] + strength * generator.uniform(-0.5, 0.5, count)) % 1.0
    hsv[:, 1] = np.clip(hsv[:, 1] + strength * generator.uniform(-0.3, 0.3, count), 0, 1)
    hsv[:, 2] = np.clip(hsv[:, 2] * (1 + strength * generator.uniform(-0.35, 0.25, count)), 0.05, 1)
    return np.concatenate([hsv_to_rgb(hsv), rgba[:, 3:]], 1)
