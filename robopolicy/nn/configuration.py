"""Settings of networks, normalisation and noise with their defaults; no heavy imports."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Literal

from robopolicy.core.errors import ConfigError
from robopolicy.core.ranges import Count, Fraction, Natural, NonNegative, Positive


@dataclass(frozen=True)
class ImageEncoderConfig:
    """Small convolutional image encoder, one per camera, for images of about 64 pixels."""

    features: Count = 64
    """Number of features per frame."""
    channels: tuple[Count, Count, Count] = (32, 64, 64)
    """Number of channels of the three convolutions, multiples of 8."""
    frozen: bool = False
    """Whether the encoder is frozen, i.e. never trained."""
    random_shift: Natural = 0
    """Random shift augmentation during training, in pixels (DrQ, arXiv:2107.09645)."""
    layer_norm: bool = False
    """Apply layer normalisation to the features of a frame (arXiv:1910.01741)."""


class NormalizationMode(Enum):
    """mean_std: zero mean, unit deviation; min_max: the data's range is mapped to [-1, 1]; identity: unchanged."""

    MEAN_STD = "mean_std"
    MIN_MAX = "min_max"
    IDENTITY = "identity"


class ActionTokens(Enum):
    """bins: one token per action element; frequencies: one per retained frequency and action dimension."""

    BINS = "bins"
    FREQUENCIES = "frequencies"


class DenoiserKind(Enum):
    """Residual MLP (small chunks, fastest), transformer, or 1-D convolutional U-Net (long chunks)."""

    MLP = "mlp"
    TRANSFORMER = "transformer"
    UNET = "unet"


class Prediction(Enum):
    """Prediction target of the denoiser: noise, clean sample or velocity (diffusion's v, flow's noise - data)."""

    EPSILON = "epsilon"
    SAMPLE = "sample"
    VELOCITY = "velocity"


class Spacing(Enum):
    """Choice of training steps for sampling: trailing starts at the noisiest step, leading ends at the cleanest one."""

    TRAILING = "trailing"
    LEADING = "leading"


class FlowNoise(Enum):
    """ode: no noise; sde: Flow-GRPO's marginal-preserving noise; constant: the same bounded noise at every step;
    learned: ReinFlow's, a network of observation and time within the bounds.
    """

    ODE = "ode"
    SDE = "sde"
    CONSTANT = "constant"
    LEARNED = "learned"


RHO = 7.0
"""Exponent rho of EDM's noise levels; larger values place more of them near the lowest (Karras et al. 2022, section 3).
"""
CHURN_NOISE = 1.003
"""Standard deviation of the churn's noise (S_noise there)."""


@dataclass(frozen=True)
class EdmConfig:
    """EDM noise and sampler for diffusion; defaults are the paper's training settings and a deterministic sampler.

    Raises ConfigError on zero steps, an order other than 1 or 2, or noise levels in the wrong order.
    """

    FIXED: ClassVar[Mapping[str, Any]] = {"rho": RHO, "churn_low": 0.0, "churn_high": 1e6, "churn_noise": CHURN_NOISE}

    sigma_data: Positive = 0.5
    """Standard deviation of the data."""
    log_mean: float = -1.2
    """Mean of the logarithm of the training noise level."""
    log_std: Positive = 1.2
    """Standard deviation of the logarithm of the training noise level."""
    sigma_min: Positive = 0.002
    """Lowest noise level of the sampler."""
    sigma_max: Positive = 80.0
    """Highest noise level of the sampler."""
    steps: Count = 18
    """Number of sampler steps, including the last one to noise level 0."""
    order: Count = 2
    """Order of the sampler: 2 for Heun's method, 1 for Euler's."""
    churn: NonNegative = 0.0
    """Amount of noise added and removed again during sampling (churn); 0 for none, i.e. an ODE."""
    offset_noise: Fraction = 0.0
    """Fraction of the training noise that is drawn once per channel, which prevents brightness drift between frames."""

    def __post_init__(self):
        if self.steps > 10_000:
            raise ConfigError(f"EDM's steps={self.steps} must be at most 10000.")
        if self.steps < 1 or self.order not in (1, 2):
            raise ConfigError(f"EDM needs steps >= 1 and order 1 or 2, got {self.steps} and {self.order}.")
        if not 0 < self.sigma_min < self.sigma_max:
            raise ConfigError(f"EDM needs 0 < sigma_min < sigma_max, got {self.sigma_min} and {self.sigma_max}.")


Precision = Literal["auto", "float32", "bfloat16"]

LearningPrecision = Literal["fp32", "bf16", "bf16_backward", "fp8"]
"""Number format of multiplications during training of policies and critics, see `robopolicy.nn.precision`."""

Optimiser = Literal["adamw", "adamw8bit"]
"""Optimiser algorithm, see `robopolicy.nn.optimisers.make_optimiser`."""

MOST_PLANNED = 10_000
"""Maximum number of a joint model's candidates, and of the values of each of their futures."""

AGGREGATES = ("mean", "lower_bound", "median", "majority", "successes")
"""Aggregations of the scores of several imagined futures into one."""
