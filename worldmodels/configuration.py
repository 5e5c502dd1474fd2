"""What can be set about every kind of world model, how large it is, trained and sampled, and about planning in any."""

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from robopolicy.core.errors import ConfigError, did_you_mean
from robopolicy.core.ranges import Count, Natural, NonNegative, Share
from robopolicy.core.structured import REGISTRY
from robopolicy.nn.configuration import AGGREGATES, EdmConfig, Precision


@dataclass(frozen=True)
class ReadoutConfig:
    """How states, reward and success are read off frames.

    It is given states that are off by about a standard deviation of a step's change, and learns to mend them.
    """

    FIXED: ClassVar[Mapping[str, Any]] = {"state_noise": 1.0}

    batch_size: Count = 128
    """Steps a training step."""
    positive_share: Share = 0.25
    """Share of successes among them."""
    imagined_steps: Natural = 2048
    """Steps whose frames the finished model imagines."""
    imagined_share: Share = 0.25
    """Their share of the batches."""
    members: Count = 5
    """Heads whose disagreement is the uncertainty."""

    def __post_init__(self):
        if min(self.batch_size, self.members, self.imagined_steps) < 1:
            raise ConfigError("The readout's batch_size, members and imagined_steps must be at least 1.")
        shares = self.positive_share, self.imagined_share
        if min(shares) < 0 or max(shares) > 1:
            raise ConfigError("positive_share and imagined_share are between 0 and 1.")


class ImageConfig(Protocol):
    """What the configurations of all models of images have, dataclasses each."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def success_head(self) -> str:
        """What reads success, or module:Name."""
        ...

    @property
    def readout(self) -> ReadoutConfig:
        """How states, reward and success are read off frames."""
        ...

    @property
    def edm(self) -> EdmConfig:
        """How frames are diffused."""
        ...


MIN_LOGVAR, MAX_LOGVAR = -10.0, 0.5
"""Where the soft bounds of an ensemble's log-variance begin; they are learned."""
DECODER_CHANNELS = 8
"""Channels of the largest maps that frames are drawn from in training; the smallest have four times as many."""


@dataclass(frozen=True)
class EnsembleConfig:
    """An ensemble of dynamics networks."""

    builds: ClassVar[str] = "worldmodels.ensemble:EnsembleModel"
    FIXED: ClassVar[Mapping[str, Any]] = {"min_logvar": MIN_LOGVAR, "max_logvar": MAX_LOGVAR}

    members: Count = 5
    """Networks, whose disagreement is the uncertainty."""
    width: Count = 200
    """Of their layers."""
    depth: Count = 3
    """Their hidden layers."""
    head_width: Count = 192
    """Width of the heads of reward and success."""
    success_head: str = field(default="logistic", metadata={REGISTRY: "worldmodels.registry:SUCCESS_HEADS"})
    """What reads success, or module:Name."""
    batch_size: Count = 256
    """Transitions a training step, for every member."""
    sample: bool = False
    """Draw from the predicted Gaussian, as MOPO does, instead of following the mean of the random member: in a
    simulator without noise what is drawn adds up where precision matters (ten policies ranked on pick_place: Pearson
    .81, bias -.41; following the mean .98 and +.06).
    """
    beta: NonNegative = 1.0
    """Each element's likelihood is weighted by its predicted variance to this power (beta-NLL, Seitzer 2022): 0 is the
    plain likelihood, which neglects contacts, 1 weighs errors like a squared error.
    """
    positive_share: Share = 0.25
    """Share of successful steps in a batch of the success head."""

    def __post_init__(self) -> None:
        if min(self.members, self.width, self.depth, self.batch_size) < 1:
            raise ConfigError("members, width, depth and batch_size must be at least 1.")


@dataclass(frozen=True)
class LatentEnsembleConfig:
    """An encoder of images, and an ensemble of dynamics networks on its features, which policies read."""

    builds: ClassVar[str] = "worldmodels.latent_ensemble:LatentEnsembleModel"
    FIXED: ClassVar[Mapping[str, Any]] = {"decoder_channels": DECODER_CHANNELS}

    encoder: Path | None = None
    """Checkpoint of a model of this kind whose encoder is kept, for policies that read it: a second model of the same
    latent, to judge what was learned in the first, or to know more data. Null to train one.
    """
    features: Count = 32
    """How many a camera's frame has."""
    channels: tuple[Count, Count, Count] = (16, 32, 32)
    """Of the encoder's convolutions, multiples of 8."""
    batch_size: Count = 64
    """Frames a training step of the encoder."""
    encoder_share: NonNegative = 1.0
    """Training steps of the encoder, for each of the ensemble."""
    ensemble: EnsembleConfig = field(default_factory=EnsembleConfig)
    """The networks on its features."""

    def __post_init__(self) -> None:
        if min(self.features, self.batch_size) < 1 or self.encoder_share <= 0:
            raise ConfigError("features and batch_size are at least 1, encoder_share above 0.")


@dataclass(frozen=True)
class TrajectoryConfig:
    """length: steps of a subsequence; width, depth: of the U-Net over time, whose width is best twice the channels of a
    step (with fewer, what should be denoised does not get through the first layer); edm: the paper's but for fewer
    steps; head_width: of the heads of reward and success; success_head: what success is read with, see SUCCESS_HEADS.
    """

    length: int = 32
    width: int = 128
    depth: int = 2
    batch_size: int = 64
    head_width: int = 192
    success_head: str = "logistic"
    edm: EdmConfig = field(default_factory=lambda: EdmConfig(sigma_data=1.0, steps=32, churn=20.0))

    def __post_init__(self):
        if self.length % 2 ** (self.depth - 1):
            raise ConfigError(
                f"length {self.length} must be a multiple of {2 ** (self.depth - 1)} at depth {self.depth}."
            )


@dataclass(frozen=True)
class PlanConfig:
    """Looking ahead in a world model: of several decisions of a policy, take the one that the model thinks best of."""

    candidates: int = 5
    """Decisions tried for each row."""
    horizon: int = 10
    """Control steps imagined, whole chunks of the policy."""
    discount: Share = 0.97
    """Of rewards and of uncertainty, a control step."""
    uncertainty: float = 0.0
    """What a unit of it adds: negative to stay where the model knows (conservative), positive to go where it does not
    (optimistic, for exploring).
    """
    rollouts: Count = 1
    """How often each candidate is imagined."""
    aggregate: str = "mean"
    """How their scores become one: mean, lower_bound (mean minus deviation), median or majority."""

    def __post_init__(self):
        if min(self.candidates, self.horizon, self.rollouts) < 1 or not 0 < self.discount <= 1:
            raise ConfigError("Planning needs candidates, horizon and rollouts >= 1 and a discount in (0, 1].")
        if self.aggregate not in AGGREGATES:
            raise ConfigError(f"aggregate={self.aggregate} is not known.{did_you_mean(self.aggregate, AGGREGATES)}")


@dataclass(frozen=True)
class RssmSize:
    """deter units of the GRU in `blocks`; hidden: width of every layer; stochastic categoricals of `classes`; channels:
    of the first convolution.
    """

    deter: int
    blocks: int
    hidden: int
    stochastic: int
    classes: int
    channels: int


RSSM_SIZES = {
    "tiny": RssmSize(64, 4, 64, 8, 8, 8),
    "small": RssmSize(256, 4, 128, 16, 16, 16),
    "size1m": RssmSize(512, 8, 64, 32, 4, 4),
    "size12m": RssmSize(2048, 8, 256, 32, 16, 16),
}
"""tiny for tests, small for states on one core, and two of DreamerV3's own."""


UNIMIX = 0.01
"""Share of a uniform distribution in every categorical one (DreamerV3)."""
FREE_NATS = 1.0
"""Below so many, the KL terms are not reduced further (DreamerV3)."""
REPRESENTATION_SCALE = 0.1
"""Weight of the KL term that makes the posterior predictable; that which teaches the prior weighs 1 (DreamerV3)."""
START_SHARE = SUCCESS_SHARE = 0.25
"""Of the training subsequences: those that begin with their episode, and those that hold a success."""


@dataclass(frozen=True)
class RssmConfig:
    """A recurrent state-space model (DreamerV3)."""

    builds: ClassVar[str] = "worldmodels.rssm.model:RssmModel"
    FIXED: ClassVar[Mapping[str, Any]] = {
        "unimix": UNIMIX,
        "free_nats": FREE_NATS,
        "reconstruction_scale": 1.0,
        "success_scale": 1.0,
        "dynamics_scale": 1.0,
        "representation_scale": REPRESENTATION_SCALE,
        "start_share": START_SHARE,
        "success_share": SUCCESS_SHARE,
    }

    size: Literal["tiny", "small", "size1m", "size12m"] = "small"
    """A preset, of which the six entries below replace single ones: tiny for tests, small for states on one core, and
    two of DreamerV3's own.
    """
    deter: Count | None = None
    """Units of the GRU."""
    blocks: Count | None = None
    """Blocks that they are in."""
    hidden: Count | None = None
    """Width of every layer."""
    stochastic: Count | None = None
    """Categorical variables."""
    classes: Count | None = None
    """Classes of each."""
    channels: Count | None = None
    """Of the first convolution."""
    layers: Count = 2
    """Of encoders, decoders and heads."""
    reward_scale: NonNegative = 1.0
    """Weight of the reward in the loss, where what is decoded, success and the prior's KL term weigh 1."""
    burn_in: Natural = 4
    """Recorded frames that are read before imagination begins; one is enough."""
    length: Count = 16
    """Frames that follow them in a training subsequence."""
    batch_size: Count = 32
    """Subsequences a training step."""
    seen_share: Share = 0.5
    """Frames after the first few that the posterior reads; the others are guessed."""
    images: Natural = 8
    """Frames of a subsequence that are decoded to images in training."""
    members: Count = 5
    """Heads whose disagreement is the uncertainty."""
    success_head: str = field(default="contrastive", metadata={REGISTRY: "worldmodels.registry:SUCCESS_HEADS"})
    """What reads success, or module:Name."""
    sample: bool = True
    """Imagine with samples of the prior, instead of its likeliest classes."""

    def __post_init__(self) -> None:
        if min(self.layers, self.burn_in, self.length, self.batch_size, self.images, self.members) < 1:
            raise ConfigError("layers, burn_in, length, batch_size, images and members must be at least 1.")
        if not 0 <= self.seen_share <= 1:
            raise ConfigError(f"seen_share is {self.seen_share}; a share is between 0 and 1.")

    @property
    def networks(self) -> RssmSize:
        """The preset with its replacements."""
        given = {item.name: getattr(self, item.name) for item in fields(RssmSize)}
        return replace(RSSM_SIZES[self.size], **{name: value for name, value in given.items() if value is not None})


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


PIXEL_SIZES = {
    "tiny": PixelSize(8, (16, 32), 1, 8, 64),
    "small": PixelSize(8, (64, 128), 1, 16, 128),
    "diamond": PixelSize(0, (64, 64, 64, 64), 2, 32, 512),
}
"""tiny for tests, small for 32 to 64 pixels on two cores, and the paper's own."""


UNROLL_SHARE = 0.5
"""Rows of a batch in which the denoiser goes on from its own prediction (DIAMOND: all)."""


@dataclass(frozen=True)
class PixelDiffusionConfig:
    """Pixel diffusion, DIAMOND's numbers of noise and sampling."""

    builds: ClassVar[str] = "worldmodels.pixel_diffusion:PixelDiffusionModel"
    FIXED: ClassVar[Mapping[str, Any]] = {"unroll_share": UNROLL_SHARE}

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
    """Times that the denoiser goes on from its own, quantised prediction in training, in half of the rows."""
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
        if self.size not in PIXEL_SIZES:
            raise ConfigError(f"size is '{self.size}', not one of {', '.join(PIXEL_SIZES)}.")
        if min(self.context, self.batch_size) < 1:
            raise ConfigError("context and batch_size must be at least 1.")
        if not 0 <= self.first_share <= 1 or self.unroll < 0:
            raise ConfigError("first_share is between 0 and 1, and unroll is 0 or more.")
        if min(self.context_noise, self.temperature, self.change_threshold) < 0:
            raise ConfigError("context_noise, temperature and change_threshold are at least 0.")
        if any(channels % 8 for channels in self.networks.channels):
            raise ConfigError(f"channels are {self.networks.channels}; group norm needs multiples of 8.")

    @property
    def networks(self) -> PixelSize:
        """The sizes in use."""
        preset = PIXEL_SIZES[self.size]
        grid = preset.grid if self.grid is None else self.grid
        layers = preset.layers if self.layers is None else self.layers
        return PixelSize(grid, self.channels or preset.channels, layers, preset.readout, preset.hidden)


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


VIDEO_SIZES = {
    "tiny": VideoSize((16, 32), 4, 1, 64, 2, 2, 16, 8, 64),
    "small": VideoSize((32, 64), 8, 4, 160, 4, 5, 64, 16, 128),
    "medium": VideoSize((48, 96), 8, 4, 256, 8, 8, 96, 32, 256),
    "large": VideoSize((96, 192), 8, 2, 512, 10, 8, 192, 48, 512),
}
"""tiny for tests; with two cameras of 64 px, small has 3.5 million parameters (two CPU cores), medium 14, large 64."""


ACTION_DROPOUT = 0.05
"""Share of actions that are hidden in training."""


@dataclass(frozen=True)
class VideoConfig:
    """A latent video model of all cameras."""

    builds: ClassVar[str] = "worldmodels.video.model:VideoModel"
    FIXED: ClassVar[Mapping[str, Any]] = {"action_dropout": ACTION_DROPOUT}

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
        if self.size not in VIDEO_SIZES:
            raise ConfigError(f"size is '{self.size}', not one of {', '.join(VIDEO_SIZES)}.")
        counts = self.recent, self.stride, self.chunk, self.batch_size, self.view_batch_size, self.bootstrap_steps
        if min(counts) < 1 or self.memory < 0:
            raise ConfigError("recent, stride, chunk, batch sizes and steps must be at least 1, memory at least 0.")
        shares = self.collapse, self.first_share, self.bootstrap
        if min(shares) < 0 or max(shares) > 1:
            raise ConfigError("collapse, first_share and bootstrap are between 0 and 1.")
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
        return replace(
            VIDEO_SIZES[self.size], **{name: value for name, value in given.items() if value not in (None, ())}
        )

    @property
    def history_offsets(self) -> tuple[int, ...]:
        """How many steps ago each history frame was, the oldest first; the present one is 0."""
        recent = self.recent - 1
        return (*(recent + self.stride * count for count in range(self.memory, 0, -1)), *range(recent, -1, -1))

    @property
    def history_span(self) -> int:
        """How many frames the history reaches over, the present one included."""
        return 1 + self.history_offsets[0]
