"""How alike two pictures are: PSNR and structural similarity.

LPIPS is left out: it needs weights of a classifier that would have to be downloaded.
"""

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional

SSIM = " (SSIM)"
"""Ends the keys of figures that are structural similarities."""

WINDOW, DEVIATION = 11, 1.5
"""Side and standard deviation, in pixels, of the window in which structure is compared."""


def psnr(first: Tensor, second: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio [N] in dB of uint8 pictures [N, height, width, 3]; 80 where they agree."""
    error = ((first.float() - second.float()) / 255).square().flatten(1).mean(1).clamp_min(1e-8)
    return -10 * error.log10()


def ssim(first: Tensor, second: Tensor) -> Tensor:
    """Return the structural similarity [N] of uint8 pictures [N, height, width, 3], 1 where they agree (Wang et al.
    2004, doi:10.1109/TIP.2003.819861): colours apart, Gaussian windows that lie inside of the picture.

    The window shrinks to the picture where that is smaller.
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
