"""How large a recurrent state-space model is, and how it is trained and imagines."""

from dataclasses import dataclass, field, fields, replace
from typing import ClassVar, Literal

from robopolicy.core.errors import ConfigError
from robopolicy.core.ranges import Count, Natural, NonNegative, Share
from robopolicy.core.structured import REGISTRY


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


SIZES = {
    "tiny": RssmSize(64, 4, 64, 8, 8, 8),
    "small": RssmSize(256, 4, 128, 16, 16, 16),
    "size1m": RssmSize(512, 8, 64, 32, 4, 4),
    "size12m": RssmSize(2048, 8, 256, 32, 16, 16),
}
"""tiny for tests, small for states on one core, and two of DreamerV3's own."""


@dataclass(frozen=True)
class RssmConfig:
    """A recurrent state-space model (DreamerV3)."""

    builds: ClassVar[str] = "worldmodels.rssm.model:RssmModel"

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
    unimix: Share = 0.01
    """Share of a uniform distribution in every categorical one."""
    free_nats: NonNegative = 1.0
    """Below so many, the KL terms are not reduced further."""
    reconstruction_scale: NonNegative = 1.0
    """Weight of what is decoded, in the loss."""
    reward_scale: NonNegative = 1.0
    """Weight of the reward."""
    success_scale: NonNegative = 1.0
    """Weight of success."""
    dynamics_scale: NonNegative = 1.0
    """Weight of the KL term that teaches the prior."""
    representation_scale: NonNegative = 0.1
    """Weight of the KL term that makes the posterior predictable."""
    burn_in: Natural = 4
    """Recorded frames that are read before imagination begins; one is enough."""
    length: Count = 16
    """Frames that follow them in a training subsequence."""
    batch_size: Count = 32
    """Subsequences a training step."""
    start_share: Share = 0.25
    """Subsequences that begin with their episode."""
    success_share: Share = 0.25
    """Subsequences that hold a success."""
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
        for name in ("unimix", "start_share", "success_share", "seen_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; a share is between 0 and 1.")
        if self.start_share + self.success_share > 1:
            raise ConfigError("start_share and success_share of the subsequences are more than all of them.")

    @property
    def networks(self) -> RssmSize:
        """The preset with its replacements."""
        given = {item.name: getattr(self, item.name) for item in fields(RssmSize)}
        return replace(SIZES[self.size], **{name: value for name, value in given.items() if value is not None})
