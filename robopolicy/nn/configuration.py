"""What can be chosen about networks, normalisation and noise, with its defaults; imports nothing heavy."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Literal

from robopolicy.core.errors import ConfigError
from robopolicy.core.ranges import Count, Natural, NonNegative, Positive, Share


@dataclass(frozen=True)
class ImageEncoderConfig:
    """A small convolutional encoder a camera, for some 64 pixels."""

    features: Count = 64
    """Size of each frame's vector."""
    channels: tuple[Count, Count, Count] = (32, 64, 64)
    """Channels of the three convolutions, multiples of 8."""
    frozen: bool = False
    """Whether the encoder stays as it is: never trained."""
    random_shift: Natural = 0
    """Pixels of shift in training (DrQ, arXiv:2107.09645)."""
    layer_norm: bool = False
    """Of a frame's vector (arXiv:1910.01741)."""


class NormalizationMode(Enum):
    """mean_std: zero mean, unit deviation; min_max: the data's range becomes [-1, 1]; identity: untouched."""

    MEAN_STD = "mean_std"
    MIN_MAX = "min_max"
    IDENTITY = "identity"


class ActionTokens(Enum):
    """bins: one token per action element; frequencies: one per kept frequency and action dimension."""

    BINS = "bins"
    FREQUENCIES = "frequencies"


class DenoiserKind(Enum):
    """Residual MLP (small chunks, fastest), transformer, or 1-D convolutional U-Net (long chunks)."""

    MLP = "mlp"
    TRANSFORMER = "transformer"
    UNET = "unet"


class Prediction(Enum):
    """What the denoiser predicts: the noise, the clean sample or the velocity (diffusion's v, flow's noise - data)."""

    EPSILON = "epsilon"
    SAMPLE = "sample"
    VELOCITY = "velocity"


class Spacing(Enum):
    """Which training steps are sampled: trailing starts at the noisiest one, leading ends at the cleanest one."""

    TRAILING = "trailing"
    LEADING = "leading"


class FlowNoise(Enum):
    """ode: none; sde: Flow-GRPO's marginal-preserving noise; constant: the same bounded noise on every step; learned:
    ReinFlow's, a network's function of observation and time within the bounds.
    """

    ODE = "ode"
    SDE = "sde"
    CONSTANT = "constant"
    LEARNED = "learned"


RHO = 7.0
"""How strongly the levels of EDM's sampler crowd towards the lowest (Karras et al. 2022, section 3)."""
CHURN_NOISE = 1.003
"""Standard deviation of the churn's noise (S_noise there)."""


@dataclass(frozen=True)
class EdmConfig:
    """Diffusion's noise and sampler (EDM); by default the paper's training and a deterministic sampler.

    Raises ConfigError on no steps, another order than 1 and 2, and noise levels in the wrong order.
    """

    FIXED: ClassVar[Mapping[str, Any]] = {"rho": RHO, "churn_low": 0.0, "churn_high": 1e6, "churn_noise": CHURN_NOISE}

    sigma_data: Positive = 0.5
    """Standard deviation of the data."""
    log_mean: float = -1.2
    """Mean of the training noise's logarithm."""
    log_std: Positive = 1.2
    """Standard deviation of the training noise's logarithm."""
    sigma_min: Positive = 0.002
    """Lowest noise level of the sampler."""
    sigma_max: Positive = 80.0
    """Highest noise level of the sampler."""
    steps: Count = 18
    """Number of the sampler's steps, from each noise level to the next and from the last to 0."""
    order: Count = 2
    """Order of the sampler: 2 is Heun's method, 1 Euler's."""
    churn: NonNegative = 0.0
    """Amount of noise that is added and taken out again on the way (churn), 0 for none (an ODE)."""
    offset_noise: Share = 0.0
    """Share of training noise that is one draw per channel (keeps frames from drifting in brightness)."""

    def __post_init__(self):
        if self.steps > 10_000:
            raise ConfigError(f"EDM's steps are {self.steps}: choose at most 10000.")
        if self.steps < 1 or self.order not in (1, 2):
            raise ConfigError(f"EDM needs steps >= 1 and order 1 or 2, got {self.steps} and {self.order}.")
        if not 0 < self.sigma_min < self.sigma_max:
            raise ConfigError(f"EDM needs 0 < sigma_min < sigma_max, got {self.sigma_min} and {self.sigma_max}.")


Precision = Literal["auto", "float32", "bfloat16"]

LearningPrecision = Literal["fp32", "bf16", "bf16_backward"]
"""In which numbers policies and critics multiply while they learn, see `robopolicy.nn.precision`."""

Optimiser = Literal["adamw", "adamw8bit"]
"""What takes the steps, see `robopolicy.nn.optimisers.make_optimiser`."""

AGGREGATES = ("mean", "lower_bound", "median", "majority")
"""How the scores of several imagined futures become one."""
