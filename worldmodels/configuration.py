"""Settings of every kind of world model (size, training, sampling), and of planning in any of them."""

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from robopolicy.core.errors import ConfigError, did_you_mean
from robopolicy.core.ranges import Count, Fraction, Natural, NonNegative
from robopolicy.core.structured import REGISTRY, FormerNames
from robopolicy.nn.configuration import AGGREGATES, MOST_PLANNED, EdmConfig, Precision


@dataclass(frozen=True)
class ReadoutConfig(FormerNames):
    """Settings of predicting states, reward and success from frames.

    It is given states that are off by about a standard deviation of a step's change, and learns to mend them.
    """

    FIXED: ClassVar[Mapping[str, Any]] = {"state_noise": 1.0}
    RENAMED: ClassVar[Mapping[str, str]] = {
        "positive_share": "positive_fraction",
        "imagined_share": "imagined_fraction",
    }

    batch_size: Count = 128
    """Number of steps per training batch."""
    positive_fraction: Fraction = 0.25
    """Fraction of successful steps in a batch."""
    imagined_steps: Natural = 2048
    """Number of steps whose frames are imagined by the finished model."""
    imagined_fraction: Fraction = 0.25
    """Fraction of imagined steps in a batch."""
    members: Count = 5
    """Number of heads; their disagreement is the uncertainty."""

    def __post_init__(self):
        if min(self.batch_size, self.members, self.imagined_steps) < 1:
            raise ConfigError("The readout's batch_size, members and imagined_steps must be at least 1.")
        shares = self.positive_fraction, self.imagined_fraction
        if min(shares) < 0 or max(shares) > 1:
            raise ConfigError("positive_fraction and imagined_fraction must be between 0 and 1.")


class ImageConfig(Protocol):
    """Interface of the configurations of all image models; each is a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def success_head(self) -> str:
        """Type of success head: a registered name, or module:Name."""
        ...

    @property
    def readout(self) -> ReadoutConfig:
        """Settings of predicting states, reward and success from frames."""
        ...

    @property
    def edm(self) -> EdmConfig:
        """Settings of the frame diffusion."""
        ...


MIN_LOGVAR, MAX_LOGVAR = -10.0, 0.5
"""Initial soft bounds of an ensemble's log-variance; they are trained."""
DECODER_CHANNELS = 8
"""Channels of the decoder's largest feature maps, used in training only; the smallest have four times as many."""


@dataclass(frozen=True)
class EnsembleConfig(FormerNames):
    """An ensemble of dynamics networks."""

    builds: ClassVar[str] = "worldmodels.ensemble:EnsembleModel"
    FIXED: ClassVar[Mapping[str, Any]] = {"min_logvar": MIN_LOGVAR, "max_logvar": MAX_LOGVAR}
    RENAMED: ClassVar[Mapping[str, str]] = {"positive_share": "positive_fraction"}

    members: Count = 5
    """Number of networks; their disagreement is the uncertainty."""
    width: Count = 200
    """Width of the networks' hidden layers."""
    depth: Count = 3
    """Number of hidden layers."""
    head_width: Count = 192
    """Width of the reward and success heads."""
    success_head: str = field(default="logistic", metadata={REGISTRY: "worldmodels.registry:SUCCESS_HEADS"})
    """Type of success head: a registered name, or module:Name."""
    success: Literal["classifier", "potential"] = "classifier"
    """What decides success: the success head, or a potential that learns from all rewards, beside the head. Its
    threshold makes episodes of held-out data succeed as often as recorded; the head's makes single steps do.
    """
    batch_size: Count = 256
    """Number of transitions per training step and ensemble member."""
    sample: bool = False
    """Sample the predicted Gaussian, as in MOPO, instead of using the mean of a random member. In a noise-free
    simulator, sampling errors accumulate where precision matters (ten policies ranked on pick_place: Pearson .81, bias
    -.41; with the mean .98 and +.06).
    """
    beta: NonNegative = 1.0
    """Exponent of the predicted variance that weights each element's likelihood (beta-NLL, Seitzer 2022): 0 is the
    plain likelihood, which neglects contacts; 1 weights errors like a squared error.
    """
    positive_fraction: Fraction = 0.25
    """Fraction of successful steps in a batch of the success head."""
    rollout_step_ratio: NonNegative = 0.4
    """Number of training steps through the networks' own predictions per single-step training step, afterwards; 0 for
    none. They take half as long again; errors over 20 to 40 steps fall by a tenth to a third (push_cube, one seed).
    """
    rollout_steps: Count = 8
    """Largest number of control steps that the networks predict from their own predictions in that training."""

    def __post_init__(self) -> None:
        if min(self.members, self.width, self.depth, self.batch_size) < 1:
            raise ConfigError("members, width, depth and batch_size must be at least 1.")


@dataclass(frozen=True)
class LatentEnsembleConfig(FormerNames):
    """An image encoder, and an ensemble of dynamics networks on its features; policies read the features."""

    builds: ClassVar[str] = "worldmodels.latent_ensemble:LatentEnsembleModel"
    FIXED: ClassVar[Mapping[str, Any]] = {"decoder_channels": DECODER_CHANNELS}
    RENAMED: ClassVar[Mapping[str, str]] = {"encoder_share": "encoder_step_ratio"}

    encoder: Path | None = None
    """Checkpoint of a latent_ensemble whose encoder is reused: a second model on the same latent can evaluate policies
    that were trained in the first, or use more data. Or the folder of a vision model (DINOv2, V-JEPA 2; extra vla),
    whose frozen features a layer condenses. null trains convolutions.
    """
    encoder_loss: Literal["draw", "predict"] = "draw"
    """What teaches the encoder: draw each frame again, or predict the features of later frames (JEPA), for scenes that
    cannot be drawn (textures, moving cameras). A step of predict takes three times as long.
    """
    features: Count = 32
    """Number of features per camera frame."""
    channels: tuple[Count, Count, Count] = (16, 32, 32)
    """Channels of the encoder's convolutions, multiples of 8."""
    batch_size: Count = 64
    """Number of frames per training step of the encoder."""
    encoder_step_ratio: NonNegative = 1.0
    """Number of training steps of the encoder per training step of the ensemble."""
    readout_step_ratio: NonNegative = 0.8
    """Number of training steps per step of the ensemble of a readout of the recorded vectors that the encoder does not
    read, so that experts and policies of states act in the model; 0 for none.
    """
    drawing_step_ratio: NonNegative = 0.0
    """Number of training steps per step of the ensemble of a network that draws frames from imagined latents, so that
    policies of pixels act in the model; 0 for none.
    """
    ensemble: EnsembleConfig = field(default_factory=EnsembleConfig)
    """Settings of the ensemble that predicts the features."""

    def __post_init__(self) -> None:
        if min(self.features, self.batch_size) < 1 or self.encoder_step_ratio <= 0:
            raise ConfigError("features and batch_size must be at least 1, and encoder_step_ratio above 0.")


@dataclass(frozen=True)
class TrajectoryConfig:
    """Settings of a trajectory diffusion model. length: steps of a subsequence; width, depth: of the U-Net over time,
    whose width is best twice the channels of a step (with fewer, the first layer loses information); edm: the
    paper's values except for fewer steps; head_width: width of the reward and success heads; success_head: type of
    success head, see SUCCESS_HEADS.
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
                f"length={self.length} must be a multiple of {2 ** (self.depth - 1)} at depth={self.depth}."
            )


CANDIDATES = "candidates"
"""The kind of planning that chooses among chunks of a policy."""


@dataclass(frozen=True)
class PlanConfig(FormerNames):
    """Planning in a world model: execute the best of several policy chunks, or an optimised action sequence, as
    predicted by the model.
    """

    RENAMED: ClassVar[Mapping[str, str]] = {"futures": "rollouts"}

    candidates: int = 5
    """Number of candidate action chunks per batch row."""
    horizon: int = 10
    """Planning horizon in control steps, rounded to complete action chunks."""
    discount: Fraction = 0.97
    """Discount factor of rewards and uncertainty per control step."""
    uncertainty: float = 0.0
    """Score per unit of uncertainty: negative stays where the model is certain (conservative), positive seeks uncertain
    states (optimistic, for exploration).
    """
    rollouts: Count = 1
    """Number of imagined rollouts per candidate."""
    aggregate: str = "mean"
    """Aggregation of a candidate's rollout scores: mean, lower_bound (mean minus deviation), median, majority or
    successes.
    """

    kind: str = CANDIDATES
    """candidates: the best of several chunks of the policy. cem, icem, mppi: action sequences optimised in the model,
    of which a policy, if any, proposes one; or the import path of a planner.
    """
    options: dict[str, Any] = field(default_factory=dict)
    """Options of other kinds than candidates, such as plan.options.samples=64."""
    replan: Count = 2
    """Control steps executed between two plans, for other kinds than candidates."""
    objective: str = ""
    """Import path of a potential of imagined observations, key -> [n, ...] to [n], to increase instead of the model's
    rewards; for other kinds than candidates.
    """
    goal: dict[str, Any] = field(default_factory=dict)
    """Goal that the end of a plan should be close to, instead of rewards: observation key -> image file (PNG, JPEG), or
    elements of a vector, null for those that do not matter; for other kinds than candidates.
    """

    def __post_init__(self):
        if self.goal and (self.objective or self.kind == CANDIDATES):
            raise ConfigError("plan.goal needs plan.kind=cem, icem or mppi, and no plan.objective.")
        if min(self.candidates, self.horizon, self.rollouts) < 1 or not 0 < self.discount <= 1:
            raise ConfigError("Planning needs candidates, horizon and rollouts >= 1 and a discount in (0, 1].")
        if self.aggregate not in AGGREGATES:
            raise ConfigError(f"aggregate={self.aggregate} is not known.{did_you_mean(self.aggregate, AGGREGATES)}")


@dataclass(frozen=True)
class RssmSize:
    """deter units of the GRU in `blocks`; hidden: width of every layer; stochastic: number of categoricals with
    `classes`; channels: of the first convolution.
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
"""tiny: for tests; small: for states on one core; plus two of DreamerV3's sizes."""


UNIMIX = 0.01
"""Weight of a uniform distribution mixed into every categorical distribution (DreamerV3)."""
FREE_NATS = 1.0
"""Free nats: KL terms below this value have no gradient (DreamerV3)."""
REPRESENTATION_SCALE = 0.1
"""Weight of the KL term that makes the posterior predictable; the one that trains the prior weighs 1 (DreamerV3)."""
START_SHARE = SUCCESS_SHARE = 0.25
"""Fractions of the training subsequences that start with their episode, and that contain a success."""


@dataclass(frozen=True)
class RssmConfig(FormerNames):
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
    RENAMED: ClassVar[Mapping[str, str]] = {"seen_share": "observed_fraction"}

    size: Literal["tiny", "small", "size1m", "size12m"] = "small"
    """Preset: tiny for tests, small for states on one core, and two of DreamerV3's own. The next six settings override
    single values.
    """
    deter: Count | None = None
    """Number of GRU units."""
    blocks: Count | None = None
    """Number of blocks of the GRU."""
    hidden: Count | None = None
    """Width of every layer."""
    stochastic: Count | None = None
    """Number of categorical latent variables."""
    classes: Count | None = None
    """Number of classes per categorical latent variable."""
    channels: Count | None = None
    """Number of channels of the first convolution."""
    layers: Count = 2
    """Number of layers of encoders, decoders and heads."""
    reward_scale: NonNegative = 1.0
    """Weight of the reward loss; reconstruction, success and the prior's KL term have weight 1."""
    burn_in: Natural = 4
    """Number of recorded frames read before imagination starts; one is enough."""
    length: Count = 16
    """Number of frames after the burn-in in a training subsequence."""
    batch_size: Count = 32
    """Number of subsequences per training step."""
    observed_fraction: Fraction = 0.5
    """Fraction of frames after the first few that the posterior reads; the others are predicted by the prior."""
    images: Natural = 8
    """Number of frames per subsequence decoded to images in training."""
    members: Count = 5
    """Number of heads; their disagreement is the uncertainty."""
    success_head: str = field(default="contrastive", metadata={REGISTRY: "worldmodels.registry:SUCCESS_HEADS"})
    """Type of success head: a registered name, or module:Name."""
    sample: bool = True
    """Imagine with samples of the prior instead of its most likely classes."""

    def __post_init__(self) -> None:
        if min(self.layers, self.burn_in, self.length, self.batch_size, self.images, self.members) < 1:
            raise ConfigError("layers, burn_in, length, batch_size, images and members must be at least 1.")
        if not 0 <= self.observed_fraction <= 1:
            raise ConfigError(f"observed_fraction={self.observed_fraction} must be between 0 and 1.")

    @property
    def networks(self) -> RssmSize:
        """The preset with its overrides."""
        values = {item.name: getattr(self, item.name) for item in fields(RssmSize)}
        return replace(RSSM_SIZES[self.size], **{name: value for name, value in values.items() if value is not None})


@dataclass(frozen=True)
class PixelSize:
    """Network sizes of the pixel diffusion model. grid: side length in pixels of the U-Net's finest maps (0: the
    image's own); channels and residual blocks (layers) per resolution, each half as fine as the previous one;
    readout, hidden: channels of the readout's first convolution, width of its layers.
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
"""tiny: for tests; small: for 32 to 64 pixels on two cores; plus the paper's size."""


UNROLL_SHARE = 0.5
"""Fraction of batch rows in which the denoiser continues from its own prediction (DIAMOND: all)."""


@dataclass(frozen=True)
class PixelDiffusionConfig(FormerNames):
    """Pixel diffusion with DIAMOND's noise and sampling parameters."""

    builds: ClassVar[str] = "worldmodels.pixel_diffusion:PixelDiffusionModel"
    FIXED: ClassVar[Mapping[str, Any]] = {"unroll_share": UNROLL_SHARE}
    RENAMED: ClassVar[Mapping[str, str]] = {"first_share": "max_noise_fraction", "hold": "change_threshold"}

    size: Literal["tiny", "small", "diamond"] = "small"
    """Preset: tiny for tests, small for 32 to 64 pixels on two cores, or the paper's own. The next three settings
    override single values.
    """
    grid: Natural | None = None
    """Side in pixels of the U-Net's finest feature maps, 0 for the image's own."""
    channels: tuple[Count, ...] = ()
    """Channels per resolution of the U-Net, each half as fine as the previous one."""
    layers: Count | None = None
    """Number of residual blocks per resolution."""
    context: Count = 4
    """Number of past frames and actions that condition the next frame."""
    batch_size: Count = 32
    """Number of frames per training step."""
    unroll: Count = 1
    """Number of times that training feeds the denoiser's own quantised prediction back, in half of the batch rows."""
    max_noise_fraction: Fraction = 0.5
    """Fraction of batch rows trained at the sampler's initial noise level, where only context and actions determine the
    next frame. DIAMOND has none; 5 % of its rows are about as noisy, and a small model then learns the effect of
    actions late.
    """
    context_noise: NonNegative = 0.0
    """Standard deviation of training noise on the context; pixels range from -1 to 1."""
    temperature: NonNegative = 1.0
    """Standard deviation of the initial noise in sampling; 0 is deterministic and suits a single sampling step."""
    change_threshold: Fraction = 0.02
    """Minimum change of a pixel, as a fraction of its range; smaller changes are ignored so that static parts do not
    fade.
    """
    precision: Precision = "auto"
    """Precision of the U-Net; auto is bfloat16 where the hardware supports it."""
    success_head: str = field(default="contrastive", metadata={REGISTRY: "worldmodels.registry:SUCCESS_HEADS"})
    """Type of success head: a registered name, or module:Name."""
    readout: ReadoutConfig = field(default_factory=ReadoutConfig)
    edm: EdmConfig = field(
        default_factory=lambda: EdmConfig(log_mean=-0.4, sigma_max=5.0, steps=3, order=1, offset_noise=0.3)
    )

    def __post_init__(self):
        if self.size not in PIXEL_SIZES:
            raise ConfigError(f"size='{self.size}' must be one of {', '.join(PIXEL_SIZES)}.")
        if min(self.context, self.batch_size) < 1:
            raise ConfigError("context and batch_size must be at least 1.")
        if not 0 <= self.max_noise_fraction <= 1 or self.unroll < 0:
            raise ConfigError("max_noise_fraction must be between 0 and 1, and unroll at least 0.")
        if min(self.context_noise, self.temperature, self.change_threshold) < 0:
            raise ConfigError("context_noise, temperature and change_threshold must be at least 0.")
        if any(channels % 8 for channels in self.networks.channels):
            raise ConfigError(f"channels={self.networks.channels} must be multiples of 8, because of group norm.")

    @property
    def networks(self) -> PixelSize:
        """The selected sizes."""
        preset = PIXEL_SIZES[self.size]
        grid = preset.grid if self.grid is None else self.grid
        layers = preset.layers if self.layers is None else self.layers
        return PixelSize(grid, self.channels or preset.channels, layers, preset.readout, preset.hidden)


@dataclass(frozen=True)
class VideoSize:
    """Network sizes of the video model. channels: of the autoencoder's resolutions, each half as fine as the previous
    one, the finest half the image's; latent: channels of a latent; patch: side length of a token in latents; width,
    depth, heads: of the transformer; maps: channels of the convolutions around it; readout, hidden: channels of the
    readout's first convolution, width of its layers.
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
"""Fraction of actions masked in training."""


@dataclass(frozen=True)
class VideoConfig(FormerNames):
    """A latent video model of all cameras."""

    builds: ClassVar[str] = "worldmodels.video.model:VideoModel"
    FIXED: ClassVar[Mapping[str, Any]] = {"action_dropout": ACTION_DROPOUT}
    RENAMED: ClassVar[Mapping[str, str]] = {
        "first_share": "max_noise_fraction",
        "collapse": "repeat_present_fraction",
        "bootstrap": "bootstrap_fraction",
        "autoencoder_share": "autoencoder_step_fraction",
        "readout_share": "readout_step_fraction",
        "hold": "change_threshold",
        "moving": "motion_weight",
        "divergence": "kl_weight",
    }

    size: Literal["tiny", "small", "medium", "large"] = "small"
    """Preset: 3.5 (small), 14 (medium) or 64 (large) million parameters with two cameras of 64 px, or tiny for tests.
    The next six settings override single values.
    """
    channels: tuple[Count, ...] = ()
    """Channels per resolution of the autoencoder."""
    latent: Count | None = None
    """Number of channels of a latent."""
    patch: Count | None = None
    """Side of a transformer token in latents."""
    width: Count | None = None
    """Width of the transformer."""
    depth: Count | None = None
    """Number of transformer blocks."""
    heads: Count | None = None
    """Number of attention heads of the transformer."""
    recent: Count = 2
    """History: number of consecutive most recent frames, including the present one."""
    memory: Natural = 4
    """History: number of older frames before the recent ones, 0 for none."""
    stride: Count = 5
    """Number of steps between the older history frames."""
    chunk: Count = 5
    """Maximum number of future frames predicted together."""
    batch_size: Count = 16
    """Number of batch rows per training step of the dynamics."""
    view_batch_size: Count = 16
    """Number of frames per training step of the autoencoder."""
    motion_weight: NonNegative = 2.0
    """Additional weight, in the autoencoder loss, of pixels that differ from the mean image."""
    kl_weight: NonNegative = 1e-5
    """Weight of the autoencoder's KL term."""
    autoencoder_step_fraction: Fraction = 0.8
    """Training steps of the autoencoder, as a fraction of those of fit."""
    readout_step_fraction: Fraction = 0.5
    """Training steps of the readout, as a fraction of those of fit."""
    memory_noise: NonNegative = 0.3
    """Maximum training noise on older history frames, in standard deviations."""
    present_noise: NonNegative = 0.2
    """Maximum training noise on recent frames, in standard deviations."""
    repeat_present_fraction: Fraction = 0.15
    """Fraction of batch rows whose history is the present frame repeated."""
    max_noise_fraction: Fraction = 0.7
    """Fraction of batch rows trained at the sampler's initial noise level, where only history and actions determine the
    next frames.
    """
    bootstrap_fraction: Fraction = 0.3
    """Fraction of batch rows whose history consists of the model's own cached predictions (Sword's dynamic latent
    bootstrapping), 0 for none.
    """
    bootstrap_steps: Natural = 1500
    """Number of updates over which the bootstrap fraction rises to its value."""
    temperature: NonNegative = 1.0
    """Standard deviation of the initial noise in sampling, 0 for none."""
    change_threshold: Fraction = 0.06
    """Change of the decoded value (1 is black to white) below which a pixel keeps its value, so that static parts stay
    as sharp as in the first frame; 0 shows the decoded frames.
    """
    precision: Precision = "auto"
    """Precision of the networks; auto is bfloat16 where the hardware supports it."""
    success_head: str = field(default="contrastive", metadata={REGISTRY: "worldmodels.registry:SUCCESS_HEADS"})
    """Type of success head: a registered name, or module:Name."""
    readout: ReadoutConfig = field(default_factory=ReadoutConfig)
    edm: EdmConfig = field(
        default_factory=lambda: EdmConfig(sigma_data=1.0, log_mean=0.0, sigma_min=0.3, sigma_max=5.0, steps=2, order=1)
    )

    def __post_init__(self):
        if self.size not in VIDEO_SIZES:
            raise ConfigError(f"size='{self.size}' must be one of {', '.join(VIDEO_SIZES)}.")
        counts = self.recent, self.stride, self.chunk, self.batch_size, self.view_batch_size, self.bootstrap_steps
        if min(counts) < 1 or self.memory < 0:
            raise ConfigError("recent, stride, chunk, batch sizes and steps must be at least 1, and memory at least 0.")
        shares = self.repeat_present_fraction, self.max_noise_fraction, self.bootstrap_fraction
        if min(shares) < 0 or max(shares) > 1:
            raise ConfigError(
                "repeat_present_fraction, max_noise_fraction and bootstrap_fraction must be between 0 and 1."
            )
        noise = self.memory_noise, self.present_noise, self.temperature
        if min(*noise, self.motion_weight, self.kl_weight, self.change_threshold) < 0:
            raise ConfigError("Noise, temperature, motion_weight, kl_weight and change_threshold must be at least 0.")
        if min(self.autoencoder_step_fraction, self.readout_step_fraction) <= 0:
            raise ConfigError("autoencoder_step_fraction and readout_step_fraction must be above 0.")
        if any(channels % 8 for channels in self.sizes.channels):
            raise ConfigError(f"channels={self.sizes.channels} must be multiples of 8, because of group norm.")

    @property
    def sizes(self) -> VideoSize:
        """The selected sizes."""
        values = {name: getattr(self, name) for name in ("channels", "latent", "patch", "width", "depth", "heads")}
        return replace(
            VIDEO_SIZES[self.size], **{name: value for name, value in values.items() if value not in (None, ())}
        )

    @property
    def history_offsets(self) -> tuple[int, ...]:
        """Offsets of the history frames in steps before the current one, oldest first; the current one has 0."""
        recent = self.recent - 1
        return (*(recent + self.stride * count for count in range(self.memory, 0, -1)), *range(recent, -1, -1))

    @property
    def history_span(self) -> int:
        """Number of frames that the history spans, including the current one."""
        return 1 + self.history_offsets[0]


@dataclass(frozen=True)
class JointVideoConfig(FormerNames):
    """Settings of a policy that is a video model too: actions, robot state and value are frames of it."""

    builds: ClassVar[str] = "worldmodels.video.joint:JointVideoPolicy"

    model: Path | None = None
    """World model of kind video from which it starts; its autoencoder stays as it is. null trains one first."""
    chunk: Count = 4
    """Number of control steps per action chunk."""
    batch_size: Count = 32
    """Number of action chunks per training step: half of them train the policy, a quarter each world and value."""
    discount: Fraction = 0.99
    """Discount factor per control step of the returns that values predict."""
    candidates: Count = 1
    """Number of action candidates for planning, 1 for none."""
    futures: Count = 1
    """Number of futures that are imagined per candidate (the paper: 3)."""
    values: Count = 2
    """Number of values that are sampled per future (the paper: 5)."""
    aggregate: str = "majority"
    """Aggregation of a candidate's values into one score: mean, lower_bound, median, majority (mean of the values on
    the side of the midrange with more values), or successes (mean of those above .05 if they are at least half, else 0,
    as in the paper's code).
    """
    edm: EdmConfig = field(
        default_factory=lambda: EdmConfig(sigma_data=1.0, log_mean=0.0, sigma_max=20.0, steps=6, order=1)
    )
    video: VideoConfig = field(default_factory=VideoConfig)
    """Sizes and training of the video model, if it does not start from one."""

    def __post_init__(self):
        if self.batch_size < 4:
            raise ConfigError(f"batch_size={self.batch_size} must be at least 4: three roles share a batch.")
        if max(self.candidates, self.futures, self.values) > MOST_PLANNED:
            raise ConfigError(f"candidates, futures and values must be at most {MOST_PLANNED} each.")
        if self.aggregate not in AGGREGATES:
            raise ConfigError(f"aggregate={self.aggregate} is not known.{did_you_mean(self.aggregate, AGGREGATES)}")
