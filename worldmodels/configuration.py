"""What can be set about world models of one file, and about planning in any of them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from robopolicy.core.errors import ConfigError, did_you_mean
from robopolicy.core.ranges import Count, NonNegative, Share
from robopolicy.core.structured import REGISTRY
from robopolicy.nn.configuration import AGGREGATES, EdmConfig


@dataclass(frozen=True)
class EnsembleConfig:
    """An ensemble of dynamics networks."""

    builds: ClassVar[str] = "worldmodels.ensemble:EnsembleModel"

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
    min_logvar: float = -10.0
    """Initial soft lower bound of the log-variance."""
    max_logvar: float = 0.5
    """Initial soft upper bound of the log-variance."""
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

    encoder: Path | None = None
    """Checkpoint of a model of this kind whose encoder is kept, for policies that read it: a second model of the same
    latent, to judge what was learned in the first, or to know more data. Null to train one.
    """
    features: Count = 32
    """How many a camera's frame has."""
    channels: tuple[Count, Count, Count] = (16, 32, 32)
    """Of the encoder's convolutions, multiples of 8."""
    decoder_channels: Count = 8
    """Channels of the largest maps that frames are drawn from in training; the smallest have four times as many."""
    batch_size: Count = 64
    """Frames a training step of the encoder."""
    encoder_share: NonNegative = 1.0
    """Training steps of the encoder, for each of the ensemble."""
    ensemble: EnsembleConfig = field(default_factory=EnsembleConfig)
    """The networks on its features."""

    def __post_init__(self) -> None:
        if min(self.features, self.decoder_channels, self.batch_size) < 1 or self.encoder_share <= 0:
            raise ConfigError("features, decoder_channels and batch_size are at least 1, encoder_share above 0.")


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
