"""How vectors, reward and success are read off images, with the defaults."""

from dataclasses import Field, dataclass
from typing import Any, ClassVar, Protocol

from robopolicy.core.errors import ConfigError
from robopolicy.core.ranges import Count, Natural, NonNegative, Share
from robopolicy.nn.configuration import EdmConfig


@dataclass(frozen=True)
class ReadoutConfig:
    """How states, reward and success are read off frames."""

    batch_size: Count = 128
    """Steps a training step."""
    positive_share: Share = 0.25
    """Share of successes among them."""
    imagined_steps: Natural = 2048
    """Steps whose frames the finished model imagines."""
    imagined_share: Share = 0.25
    """Their share of the batches."""
    state_noise: NonNegative = 1.0
    """The readout is given states that are off by up to about so many standard deviations of a step's change, and
    learns to mend them.
    """
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
