"""What can be set about the joint model of actions, futures and values."""

from dataclasses import dataclass, field
from typing import ClassVar

from robopolicy.core.errors import ConfigError
from robopolicy.core.ranges import Count, Share
from robopolicy.nn.configuration import AGGREGATES, EdmConfig

MOST = 10_000
"""Of candidates, of their futures, and of the values of each."""


@dataclass(frozen=True)
class JointConfig:
    """A diffusion model that is policy, world model and value at once, and how it plans with itself."""

    builds: ClassVar[str] = "robopolicy.policies.joint:JointModel"

    chunk: Count = 4
    """Actions of a decision."""
    width: Count = 64
    """Of the transformer."""
    depth: Count = 3
    """Its layers."""
    heads: Count = 4
    """Its attention heads."""
    batch_size: Count = 256
    """Decisions a training step."""
    policy_share: Share = 0.5
    """Of a batch: decisions of successful episodes, from which it learns to act; the rest, split between world and
    value, is of all episodes.
    """
    discount: Share = 0.99
    """Of the returns that values are, a control step."""
    candidates: Count = 8
    """Actions that planning chooses from, 1 for none."""
    futures: Count = 2
    """Futures imagined for each of them."""
    values: Count = 2
    """Values imagined for each future."""
    aggregate: str = "majority"
    """How the values of a candidate become one score: mean, lower_bound, median, or majority, the mean of those on the
    side where more of them are.
    """
    edm: EdmConfig = field(default_factory=lambda: EdmConfig(sigma_data=1.0, steps=6, order=1, sigma_max=20.0))

    def __post_init__(self):
        if min(self.chunk, self.width, self.depth, self.candidates, self.futures, self.values) < 1:
            raise ConfigError("A joint model needs sizes and counts of at least 1.")
        if max(self.candidates, self.futures, self.values) > MOST:
            raise ConfigError(f"candidates, futures and values of a joint model are at most {MOST} each.")
        if self.heads < 1 or self.width % self.heads:
            raise ConfigError(f"A joint model's width {self.width} must be a multiple of its heads, {self.heads}.")
        if not 0 < self.policy_share < 1:
            raise ConfigError(f"policy_share {self.policy_share} must be in (0, 1).")
        if self.aggregate not in AGGREGATES:
            raise ConfigError(f"aggregate={self.aggregate} is not known: {', '.join(AGGREGATES)}.")
