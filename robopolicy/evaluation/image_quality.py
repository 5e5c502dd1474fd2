"""Image similarity: PSNR, structural similarity (SSIM), and LPIPS if its classifier weights are available.

torchmetrics provides all three but takes seconds to import; it is used for LPIPS only.
"""

import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional

SSIM, LPIPS = " (SSIM)", " (LPIPS)"
"""Key suffixes of structural similarities and perceptual distances; PSNR uses the camera's key without a suffix."""

ALEXNET = "alexnet-owt-7be5be79.pth"
"""Torchvision's file of the classifier used by LPIPS, in torch.hub's folder `checkpoints`."""

UNITS = {SSIM: "SSIM (1: identical)", LPIPS: "LPIPS (0: identical)"}
"""Units of the metrics by key suffix."""

WINDOW, DEVIATION = 11, 1.5
"""Side length and standard deviation, in pixels, of the SSIM window."""


def psnr(first: Tensor, second: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio [N] in dB of uint8 images [N, height, width, 3]; 80 for equal images."""
    error = ((first.float() - second.float()) / 255).square().flatten(1).mean(1).clamp_min(1e-8)
    return -10 * error.log10()


def ssim(first: Tensor, second: Tensor) -> Tensor:
    """Return the structural similarity [N] of uint8 images [N, height, width, 3], 1 for equal images (Wang et al. 2004,
    doi:10.1109/TIP.2003.819861): per colour channel, with Gaussian windows that lie inside the image.

    The window shrinks to the image if that is smaller.
    """
    side = min(WINDOW, first.shape[1], first.shape[2])
    place = torch.arange(side) - (side - 1) / 2
    weight = (-place.square() / (2 * DEVIATION**2)).exp()
    weight = weight / weight.sum()

    def blurred(pixels: Tensor) -> Tensor:
        wide = functional.conv2d(pixels, weight[None, None, None, :])
        return functional.conv2d(wide, weight[None, None, :, None])

    a, b = (rearrange(value.float() / 255, "n h w c -> (n c) 1 h w") for value in (first, second))
    mean_a, mean_b = blurred(a), blurred(b)
    variance_a, variance_b = blurred(a * a) - mean_a.square(), blurred(b * b) - mean_b.square()
    covariance = blurred(a * b) - mean_a * mean_b
    luminance, contrast = 0.01**2, 0.03**2
    above = (2 * mean_a * mean_b + luminance) * (2 * covariance + contrast)
    below = (mean_a.square() + mean_b.square() + luminance) * (variance_a + variance_b + contrast)
    return (above / below).flatten(1).mean(1).unflatten(0, (len(first), -1)).mean(1)


@cache
def perceptual() -> Callable[[Tensor, Tensor], Tensor] | None:
    """Return LPIPS (Zhang et al. 2018, arXiv:1801.03924): the mean distance [] of uint8 images [N, height, width, 3], 0
    for equal images; None without torchmetrics (extra `lpips`) or the file `ALEXNET`. Nothing is downloaded.
    """
    weights = Path(torch.hub.get_dir()) / "checkpoints" / ALEXNET
    if not weights.is_file() or importlib.util.find_spec("torchmetrics") is None:
        return None
    torch.load(weights, map_location="meta", weights_only=True)  # refuses what is more than weights, before torchvision
    from torchmetrics.image.lpip import LearnedPerceptualImagePatchSimilarity

    metric = LearnedPerceptualImagePatchSimilarity("alex", normalize=True)

    def distance(first: Tensor, second: Tensor) -> Tensor:
        small = min(first.shape[1:3]) < 64
        a, b = (rearrange(value.float() / 255, "n h w c -> n c h w") for value in (first, second))
        if small:  # below it the classifier has nothing left to look at
            a, b = (functional.interpolate(value, (64, 64)) for value in (a, b))
        return metric(a, b)

    return distance


def compare(first: Tensor, second: Tensor) -> dict[str, float]:
    """Return mean similarities of uint8 images [N, height, width, 3], by key suffix."""
    similarities = {"": psnr(first, second), SSIM: ssim(first, second)}
    distance = perceptual()
    if distance is not None:
        similarities[LPIPS] = distance(first, second)
    return {ending: float(value.mean()) for ending, value in similarities.items()}


def unit_of(key: str) -> str:
    """Return the unit of the metrics under a camera's `key`."""
    return next((unit for ending, unit in UNITS.items() if key.endswith(ending)), "PSNR in dB (higher is better)")
