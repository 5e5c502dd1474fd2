"""Convert images of other projects to uint8 [height, width, 3], by their shape and values instead of their names."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from robopolicy.core.errors import DataError, in_one_line

IMAGE_FORMATS = ("PNG", "JPEG")
LARGEST_SIDE = 2**14
"""Maximum side of an encoded image that is decoded, in pixels."""
SMALLEST_SIDE = 8
"""Minimum side of an image in pixels; smaller arrays are not images."""
DARKEST = 8.0
"""Minimum brightness, of 255, of the brightest pixel of images."""
_SLACK = 1e-3

Layout = Literal["hwc", "chw", "hw"]


def layout(shape: Sequence[int], dtype: str) -> Layout | None:
    """Return the order of the axes of one row; None if it is not a colour or grey image.

    The last axis is the channel axis if both ends could be. Depth (16 bits, or one float channel) is not an image.
    """
    if dtype != "uint8" and not dtype.startswith("float"):
        return None
    colours = (1, 3, 4) if dtype == "uint8" else (3, 4)
    if len(shape) == 3:
        if shape[2] in colours and min(shape[:2]) >= SMALLEST_SIDE:
            return "hwc"
        if shape[0] in colours and min(shape[1:]) >= SMALLEST_SIDE:
            return "chw"
    if len(shape) == 2 and dtype == "uint8" and min(shape) >= SMALLEST_SIDE:
        return "hw"
    return None


@dataclass(frozen=True)
class Pictures:
    """Conversion of one column's rows to images.

    scale: factor for float values, 255 or 1; upside_down: the first row is the lowest; bgr: the first channel is blue.
    """

    layout: Layout
    scale: float = 1.0
    upside_down: bool = False
    bgr: bool = False

    def __call__(self, values: np.ndarray, what: str) -> np.ndarray:
        """Return `values` [L, *row] as uint8 [L, height, width, 3]; raises DataError, with `what` in its text, if a
        pixel is out of range.
        """
        if self.layout == "chw":
            values = np.moveaxis(values, 1, -1)
        elif self.layout == "hw":
            values = values[..., None]
        values = values[..., :3]  # opacity is left out
        if values.dtype != np.uint8:
            values = self._rounded(values, what)
        values = np.broadcast_to(values, (*values.shape[:3], 3))  # grey is repeated
        values = values[:, ::-1] if self.upside_down else values
        return np.ascontiguousarray(values[..., ::-1] if self.bgr else values)

    def _rounded(self, values: np.ndarray, what: str) -> np.ndarray:
        low, high = float(values.min()), float(values.max())
        if not (low >= -_SLACK and high * self.scale <= 255 * (1 + _SLACK)):  # NaN is neither
            expected = "0 to 1" if self.scale > 1 else "0 to 255"
            raise DataError(
                f"{what} contains pixels from {low:g} to {high:g}, but other images of this column {expected}: write "
                "all of them as uint8."
            )
        return np.clip(np.rint(values * self.scale), 0, 255).astype(np.uint8)


def scale_of(samples: Sequence[np.ndarray], what: str) -> float:
    """Return the factor for float pixels: 255 if all samples are between 0 and 1, else 1.

    samples: each [L, *row]. Raises DataError, with `what` in its text, if they exceed 1 by too little to be either.
    """
    high = max((float(each.max()) for each in samples if each.size), default=0.0)
    if 1 + _SLACK < high < DARKEST:
        raise DataError(
            f"{what} contains pixels up to {high:g}, which are in neither 0 to 1 nor 0 to 255: write them as uint8."
        )
    return 255.0 if high <= 1 + _SLACK else 1.0


def decoded(data: bytes, path: Path, what: str) -> np.ndarray:
    """Return an encoded image, PNG or JPEG, as uint8 [height, width, 3]; raises DataError if it is neither."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=IMAGE_FORMATS) as image:
            if max(image.size) > LARGEST_SIDE:
                raise DataError(
                    f"{path}: {what} has {image.width} x {image.height} pixels, which is too large: it is not read."
                )
            return np.asarray(image.convert("RGB"))
    except DataError:
        raise
    except Exception as error:  # PIL's decoders raise whatever they stumble over
        raise DataError(
            f"{path}: {what} is damaged, or not {' or '.join(IMAGE_FORMATS)} ({in_one_line(error, 80)}). Exclude "
            "that episode, or restore the file from a copy."
        ) from error
