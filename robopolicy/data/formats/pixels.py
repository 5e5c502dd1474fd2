"""Pictures as other projects store them, made uint8 height x width x 3: by their shape and values, not by name."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from robopolicy.core.errors import DataError, in_one_line

IMAGE_FORMATS = ("PNG", "JPEG")
LARGEST_SIDE = 2**14
"""Pixels along a side of an encoded picture that is decoded."""
SMALLEST_SIDE = 8
"""Pixels: an array with a smaller side is no picture."""
DARKEST = 8.0
"""The brightest pixel, of 255, that pictures have at least."""
_SLACK = 1e-3

Layout = Literal["hwc", "chw", "hw"]


def layout(shape: Sequence[int], dtype: str) -> Layout | None:
    """Return how the axes of one row stand, None where it is no picture in colours or grey.

    Colours stand last where both ends could be the colours. Depth (16 bits, or one channel of float) is no picture.
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
    """How one column's rows become pictures.

    scale: what a value of float is multiplied by, 255 or 1; upside_down: the first row is the lowest; bgr: blue stands
    first.
    """

    layout: Layout
    scale: float = 1.0
    upside_down: bool = False
    bgr: bool = False

    def __call__(self, values: np.ndarray, what: str) -> np.ndarray:
        """Return `values` [L, *row] as uint8 [L, height, width, 3]; raises DataError, which names `what`, where a pixel
        is out of range.
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
    """Return by what pixels of float are multiplied: 255 where all samples lie between 0 and 1, else 1.

    samples: each [L, *row]. Raises DataError, which names `what`, where they go so little beyond 1 that they are
    neither.
    """
    high = max((float(each.max()) for each in samples if each.size), default=0.0)
    if 1 + _SLACK < high < DARKEST:
        raise DataError(
            f"{what} contains pixels up to {high:g}, which are in neither 0 to 1 nor 0 to 255: write them as uint8."
        )
    return 255.0 if high <= 1 + _SLACK else 1.0


def decoded(data: bytes, path: Path, what: str) -> np.ndarray:
    """Return an encoded picture, PNG or JPEG, as uint8 [height, width, 3]; raises DataError where it is neither."""
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
