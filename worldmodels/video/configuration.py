"""How large a latent video model is, what it remembers, and how it is trained and sampled."""

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from robopolicy.core.errors import ConfigError
from robopolicy.core.ranges import Count, Natural, NonNegative, Share
from robopolicy.core.structured import REGISTRY
from robopolicy.nn.configuration import EdmConfig, Precision
from worldmodels.images.configuration import ReadoutConfig


@dataclass(frozen=True)
class VideoSize:
    """channels: of the autoencoder's resolutions, each half as fine as the one before, the finest half the image's;
    latent: channels of a latent; patch: latents a side of a token; width, depth, heads: of the transformer; maps:
    channels of the convolutions around it; readout, hidden: channels of the readout's first convolution, width of its
    layers.
    """

    channels: tuple[int, ...]
    latent: int
    patch: int
    width: int
    depth: int
    heads: int
    maps: int
    readout: int
    hidden: int


SIZES = {
    "tiny": VideoSize((16, 32), 4, 1, 64, 2, 2, 16, 8, 64),
    "small": VideoSize((32, 64), 8, 4, 160, 4, 5, 64, 16, 128),
    "medium": VideoSize((48, 96), 8, 4, 256, 8, 8, 96, 32, 256),
    "large": VideoSize((96, 192), 8, 2, 512, 10, 8, 192, 48, 512),
}
"""tiny for tests; with two cameras of 64 px, small has 3.5 million parameters (two CPU cores), medium 14, large 64."""


@dataclass(frozen=True)
class VideoConfig:
    """A latent video model of all cameras."""

    builds: ClassVar[str] = "worldmodels.video.model:VideoModel"

    size: Literal["tiny", "small", "medium", "large"] = "small"
    """A preset, of which the six entries below replace single ones: 3.5 (small), 14 (medium) and 64 (large) million
    parameters with two cameras of 64 px; tiny for tests.
    """
    channels: tuple[Count, ...] = ()
    """Of the autoencoder's resolutions."""
    latent: Count | None = None
    """Channels of a latent."""
    patch: Count | None = None
    """Latents a side of a token."""
    width: Count | None = None
    """Of the transformer."""
    depth: Count | None = None
    """Its blocks."""
    heads: Count | None = None
    """Its attention heads."""
    recent: Count = 2
    """History: frames in a row, the present one among them."""
    memory: Natural = 4
    """History: older frames before those, 0 for none."""
    stride: Count = 5
    """Steps between those."""
    chunk: Count = 5
    """Future frames predicted together at most."""
    batch_size: Count = 16
    """Rows a training step of the dynamics."""
    view_batch_size: Count = 16
    """Frames a training step of the autoencoder."""
    motion_weight: NonNegative = 2.0
    """How much more pixels weigh, for the autoencoder, that differ from the mean image."""
    kl_weight: NonNegative = 1e-5
    """Weight of its KL term."""
    autoencoder_share: Share = 0.8
    """Its training steps, as a share of those of fit."""
    readout_share: Share = 0.5
    """The readout's training steps, as a share of those of fit."""
    memory_noise: NonNegative = 0.3
    """Noise on older history frames in training reaches up to so many standard deviations."""
    present_noise: NonNegative = 0.2
    """The same of recent frames."""
    action_dropout: Share = 0.05
    """Share of actions that are hidden in training."""
    collapse: Share = 0.15
    """Share of rows whose history is the present frame repeated."""
    first_share: Share = 0.7
    """Rows trained on what the sampler begins with, noise that shows nothing, so that history and actions alone tell
    what comes.
    """
    bootstrap: Share = 0.3
    """Share of the rows whose history are the model's own cached predictions (Sword's dynamic latent bootstrapping), 0
    for none.
    """
    bootstrap_steps: Natural = 1500
    """Updates until that share is reached."""
    temperature: NonNegative = 1.0
    """Deviation of the noise that sampling begins with, 0 for none."""
    change_threshold: Share = 0.06
    """A pixel keeps its value until what is decoded there has changed by so much (1 is from black to white), so that
    what does not move stays as sharp as in the frame it began with; 0 shows what is decoded.
    """
    precision: Precision = "auto"
    """Of the networks; auto is bfloat16 where the hardware multiplies it."""
    success_head: str = field(default="contrastive", metadata={REGISTRY: "worldmodels.registry:SUCCESS_HEADS"})
    """What reads success, or module:Name."""
    readout: ReadoutConfig = field(default_factory=ReadoutConfig)
    edm: EdmConfig = field(
        default_factory=lambda: EdmConfig(sigma_data=1.0, log_mean=0.0, sigma_min=0.3, sigma_max=5.0, steps=2, order=1)
    )

    def __post_init__(self):
        if self.size not in SIZES:
            raise ConfigError(f"size is '{self.size}', not one of {', '.join(SIZES)}.")
        counts = self.recent, self.stride, self.chunk, self.batch_size, self.view_batch_size, self.bootstrap_steps
        if min(counts) < 1 or self.memory < 0:
            raise ConfigError("recent, stride, chunk, batch sizes and steps must be at least 1, memory at least 0.")
        shares = self.action_dropout, self.collapse, self.first_share, self.bootstrap
        if min(shares) < 0 or max(shares) > 1:
            raise ConfigError("action_dropout, collapse, first_share and bootstrap are between 0 and 1.")
        noise = self.memory_noise, self.present_noise, self.temperature
        if min(*noise, self.motion_weight, self.kl_weight, self.change_threshold) < 0:
            raise ConfigError("Noise, temperature, motion_weight, kl_weight and change_threshold are at least 0.")
        if min(self.autoencoder_share, self.readout_share) <= 0:
            raise ConfigError("autoencoder_share and readout_share must be above 0.")
        if any(channels % 8 for channels in self.sizes.channels):
            raise ConfigError(f"channels are {self.sizes.channels}; group norm needs multiples of 8.")

    @property
    def sizes(self) -> VideoSize:
        """The sizes in use."""
        given = {name: getattr(self, name) for name in ("channels", "latent", "patch", "width", "depth", "heads")}
        return replace(SIZES[self.size], **{name: value for name, value in given.items() if value not in (None, ())})

    @property
    def history_offsets(self) -> tuple[int, ...]:
        """How many steps ago each history frame was, the oldest first; the present one is 0."""
        recent = self.recent - 1
        return (*(recent + self.stride * count for count in range(self.memory, 0, -1)), *range(recent, -1, -1))

    @property
    def history_span(self) -> int:
        """How many frames the history reaches over, the present one included."""
        return 1 + self.history_offsets[0]
