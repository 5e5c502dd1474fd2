"""How large a pixel diffusion model is, and how it is trained and sampled."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from robopolicy.core.errors import ConfigError
from robopolicy.core.ranges import Count, Natural, NonNegative, Share
from robopolicy.core.structured import REGISTRY
from robopolicy.nn.configuration import EdmConfig, Precision
from worldmodels.images.configuration import ReadoutConfig


@dataclass(frozen=True)
class PixelSize:
    """grid: pixels a side of the U-Net's finest maps (0: the image's own); channels and residual blocks (layers) of
    its resolutions, each half as fine as the one before; readout, hidden: channels of the readout's first convolution,
    width of its layers.
    """

    grid: int
    channels: tuple[int, ...]
    layers: int
    readout: int
    hidden: int


SIZES = {
    "tiny": PixelSize(8, (16, 32), 1, 8, 64),
    "small": PixelSize(8, (64, 128), 1, 16, 128),
    "diamond": PixelSize(0, (64, 64, 64, 64), 2, 32, 512),
}
"""tiny for tests, small for 32 to 64 pixels on two cores, and the paper's own."""


@dataclass(frozen=True)
class PixelDiffusionConfig:
    """Pixel diffusion, DIAMOND's numbers of noise and sampling."""

    builds: ClassVar[str] = "worldmodels.pixel_diffusion.model:PixelDiffusionModel"

    size: Literal["tiny", "small", "diamond"] = "small"
    """A preset, of which the three entries below replace single ones: tiny for tests, small for 32 to 64 pixels on two
    cores, and the paper's own.
    """
    grid: Natural | None = None
    """Pixels a side of the U-Net's finest maps, 0 for the image's own."""
    channels: tuple[Count, ...] = ()
    """Of its resolutions, each half as fine as the one before."""
    layers: Count | None = None
    """Residual blocks of every resolution."""
    context: Count = 4
    """Frames and actions that the next frame depends on."""
    batch_size: Count = 32
    """Frames a training step."""
    unroll: Count = 1
    """Times that the denoiser goes on from its own, quantised prediction in training."""
    unroll_share: Share = 0.5
    """Rows in which it does (DIAMOND: all)."""
    first_share: Share = 0.5
    """Rows trained on what the sampler begins with, noise that shows nothing, so that context and actions alone tell
    what comes (DIAMOND has none; 5 % of its rows are about as noisy, and a small model learns late that actions
    matter).
    """
    context_noise: NonNegative = 0.0
    """Deviation of noise on the context in training; pixels reach from -1 to 1."""
    temperature: NonNegative = 1.0
    """Deviation of the noise that sampling begins with; 0 where one step is taken and nothing left to chance."""
    change_threshold: Share = 0.02
    """Pixels that change by less than this share of their range stay as they are, so that what stands still does not
    fade.
    """
    precision: Precision = "auto"
    """Of the U-Net; auto is bfloat16 where the hardware multiplies it."""
    success_head: str = field(default="contrastive", metadata={REGISTRY: "worldmodels.registry:SUCCESS_HEADS"})
    """What reads success, or module:Name."""
    readout: ReadoutConfig = field(default_factory=ReadoutConfig)
    edm: EdmConfig = field(
        default_factory=lambda: EdmConfig(log_mean=-0.4, sigma_max=5.0, steps=3, order=1, offset_noise=0.3)
    )

    def __post_init__(self):
        if self.size not in SIZES:
            raise ConfigError(f"size is '{self.size}', not one of {', '.join(SIZES)}.")
        if min(self.context, self.batch_size) < 1:
            raise ConfigError("context and batch_size must be at least 1.")
        shares = self.unroll_share, self.first_share
        if min(shares) < 0 or max(shares) > 1 or self.unroll < 0:
            raise ConfigError("A share is between 0 and 1, and unroll is 0 or more.")
        if min(self.context_noise, self.temperature, self.change_threshold) < 0:
            raise ConfigError("context_noise, temperature and change_threshold are at least 0.")
        if any(channels % 8 for channels in self.networks.channels):
            raise ConfigError(f"channels are {self.networks.channels}; group norm needs multiples of 8.")

    @property
    def networks(self) -> PixelSize:
        """The sizes in use."""
        preset = SIZES[self.size]
        grid = preset.grid if self.grid is None else self.grid
        layers = preset.layers if self.layers is None else self.layers
        return PixelSize(grid, self.channels or preset.channels, layers, preset.readout, preset.hidden)
