"""Camera images in the form that a policy reads: RGB, uint8, height x width x 3, in the size of its field.

Client and server give bit-identical results, so a client may resize before sending. Needs only numpy; with Pillow
installed it is several times faster.
"""

from __future__ import annotations

import numpy as np

try:
    from PIL.Image import Resampling, fromarray
except ImportError:  # a robot's computer: `_scaled` computes what Pillow would
    fromarray = Resampling = None

_BITS = 22
"""Fixed-point bits of a weight, as in Pillow's Resample.c."""


def pixels(frames: np.ndarray) -> np.ndarray | None:
    """Return images [..., h, w, 3] or [..., 3, h, w] as uint8 [..., h, w, 3], None if they are not clearly images.

    Valid are uint8, and floats from 0 to 1, which openpi's servers accept too: floats outside that range are ambiguous.
    """
    if frames.dtype.kind == "f" and frames.size and frames.min() >= 0 and frames.max() <= 1:  # NaN is neither
        frames = np.rint(frames * 255).astype(np.uint8)
    if frames.dtype != np.uint8 or frames.ndim < 3:
        return None
    if frames.shape[-1] != 3 and frames.shape[-3] == 3:
        frames = np.moveaxis(frames, -3, -1)
    return frames if frames.shape[-1] == 3 else None


def downscale(sent: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return camera images, [..., h, w, 3] or [..., 3, h, w], as the server would read them if that is smaller.

    shape: shape that the policy reads, [height, width, 3]; the frames are then [..., *shape]. Anything that is not an
    image is returned unchanged: the server reports the error.
    """
    frames = pixels(sent)
    if frames is None or frames.ndim > 4 or not frames.size:
        return sent
    if frames[..., 0, 0, 0].size * int(np.prod(shape)) >= frames.size:
        return frames
    flat_frames = frames.reshape(-1, *frames.shape[-3:])
    return np.stack([resize_with_padding(each, shape[:2]) for each in flat_frames]).reshape(*frames.shape[:-3], *shape)


def resize_with_padding(image: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    """Return an image [h, w, 3] uint8 as [*size, 3]: scaled to fit with its aspect ratio, centred on black."""
    height, width = size
    if image.shape[:2] == (height, width):
        return image
    scale = min(height / image.shape[0], width / image.shape[1])
    inner = max(1, round(scale * image.shape[0])), max(1, round(scale * image.shape[1]))
    if fromarray is None or Resampling is None:
        scaled = _scaled(_scaled(image, inner[1], 1), inner[0], 0)
    else:
        scaled = np.asarray(fromarray(image).resize((inner[1], inner[0]), Resampling.BILINEAR))
    result = np.zeros((height, width, 3), np.uint8)
    top, left_edge = (height - inner[0]) // 2, (width - inner[1]) // 2
    result[top : top + inner[0], left_edge : left_edge + inner[1]] = scaled
    return result


def _scaled(image: np.ndarray, count: int, axis: int) -> np.ndarray:
    """Resize an image [h, w, 3] uint8 to `count` rows or columns along `axis`, with the same result as Pillow's
    BILINEAR.

    Each new pixel is a weighted mean under a triangle filter as wide as two new pixels (two old ones if the image is
    enlarged), in integer arithmetic.
    """
    before = image.shape[axis]
    if before == count:
        return image
    support = max(before / count, 1.0)
    centre = (np.arange(count) + 0.5) * (before / count)
    first = np.maximum((centre - support + 0.5).astype(np.int64), 0)
    after = np.minimum((centre + support + 0.5).astype(np.int64), before)
    place = first[:, None] + np.arange((after - first).max())
    weight = np.maximum(1 - np.abs((place - centre[:, None] + 0.5) / support), 0.0) * (place < after[:, None])
    weights = (weight / weight.sum(1, keepdims=True) * 2**_BITS + 0.5).astype(np.int32)
    shape = [1, 1, 1]
    shape[axis] = count
    total = np.full_like(image, 0, np.int32, shape=(*image.shape[:axis], count, *image.shape[axis + 1 :]))
    total += 1 << (_BITS - 1)
    for term in range(place.shape[1]):
        index = np.minimum(place[:, term], before - 1)
        total += np.take(image, index, axis).astype(np.int32) * weights[:, term].reshape(shape)
    return (total >> _BITS).astype(np.uint8)
