"""Affine normalisation fitted on data; a module, so its statistics are saved in the checkpoint."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from robopolicy.core.errors import ConfigError, DataError, did_you_mean
from robopolicy.core.spec import check_finite
from robopolicy.nn.configuration import NormalizationMode

ACTION = "action"
"""Key of the action among normalisers and in the data that they are fitted on (LeRobot's name)."""
CONSTANT_SCALE = 1e-4
"""Dimensions with a scale below this are constant: they are centred but not divided."""


def with_constants_kept(scale: Tensor) -> Tensor:
    """Return a scale [...] that is 1 where the data is constant: what changes there later would be enormous."""
    return torch.where(scale < CONSTANT_SCALE, torch.ones_like(scale), scale)


def in_deviations(values: Tensor, sample: Tensor) -> Tensor:
    """Return values [..., D] as differences to the mean of a sample [N, D] in its standard deviations, by element;
    those of elements that are constant in it are not divided, so that rounding errors stay small.
    """
    return (values - sample.mean(0)) / with_constants_kept(sample.std(0, correction=0))


class Normalizer(nn.Module):
    """Maps x [..., *shape] to (x - offset) / scale per element, and back with `inverse`.

    Before `fit` it is the identity.
    """

    offset: Tensor
    scale: Tensor

    def __init__(self, shape: tuple[int, ...], mode: NormalizationMode = NormalizationMode.MIN_MAX):
        super().__init__()
        self.shape = tuple(shape)
        self.mode = NormalizationMode(mode)
        self.register_buffer("offset", torch.zeros(self.shape))
        self.register_buffer("scale", torch.ones(self.shape))

    @torch.no_grad()
    def fit(self, values: Tensor) -> "Normalizer":
        """Fit on values [..., *shape] (all leading axes are samples) and return itself.

        Raises DataError when there are no samples or the shape differs, NonFiniteError on NaN or infinity.
        """
        rank = len(self.shape)
        if tuple(values.shape[values.ndim - rank :]) != self.shape or values.ndim <= rank or values.numel() == 0:
            raise DataError(
                f"A normaliser for elements of shape {list(self.shape)} cannot be fitted to values of shape "
                f"{list(values.shape)}: pass at least one sample, [samples, {', '.join(map(str, self.shape))}]."
            )
        samples = values.reshape(-1, *self.shape).to(self.offset.device, torch.float64)
        check_finite("normaliser data", samples)
        if self.mode is NormalizationMode.MIN_MAX:
            low, high = samples.amin(0), samples.amax(0)
            offset, scale = (high + low) / 2, (high - low) / 2
        elif self.mode is NormalizationMode.MEAN_STD:
            offset, scale = samples.mean(0), samples.std(0, correction=0)
        else:
            return self
        self.offset.copy_(offset)
        self.scale.copy_(with_constants_kept(scale))
        return self

    def forward(self, values: Tensor) -> Tensor:
        """Normalise values [..., *shape]."""
        return (values - self.offset) / self.scale

    def inverse(self, normalized: Tensor) -> Tensor:
        """Convert normalised values [..., *shape] back to the data's units."""
        return normalized * self.scale + self.offset


@runtime_checkable
class ShowsNormalizers(Protocol):
    """A policy or network that exposes its normalisers: fitted ones, or ones to be fitted on data before training."""

    def normalizers(self) -> Mapping[str, Normalizer]:
        """Return the normalisers by observation key; a policy's normaliser of actions is under the key `ACTION`."""
        ...


def fit_normalizers(normalizers: Mapping[str, Normalizer], values: Mapping[str, Tensor]) -> None:
    """Fit each normaliser on the values [samples, *shape] of its key; raises ConfigError when a key is missing."""
    for key, normalizer in normalizers.items():
        if key not in values:
            raise ConfigError(f"There is no data to normalise '{key}'.{did_you_mean(key, values)}")
        normalizer.fit(values[key])
