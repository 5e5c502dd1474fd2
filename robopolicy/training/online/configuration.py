"""What can be set about learning in the world by critics; nothing heavy is imported here."""

from dataclasses import dataclass
from typing import Literal

from robopolicy.core.errors import ConfigError
from robopolicy.core.ranges import Count, Natural, NonNegative, Share


@dataclass(frozen=True)
class OnlineConfig:
    """How an agent learns from its own decisions in the world, after recorded data or without any.

    WSRL (arXiv:2412.07762): warmup=5000 retain=0, RLPD (arXiv:2302.02948): retain=0.5. Raises ConfigError on shares
    outside [0, 1], and where there is nothing to count.
    """

    steps: Natural = 100_000
    """Control steps in the world, those of the warm-up included; never exceeded, and 0 plays none."""
    warmup: Natural = 5000
    """Control steps that the frozen policy plays before the first update."""
    updates: NonNegative = 1.0
    """Updates per decision collected since then; every one is a batch."""
    batch_size: Count = 256
    """Decisions a batch."""
    retain: Share = 0.0
    """Share of every batch drawn from recorded data: 0 forgets it (WSRL), 0.5 keeps half (RLPD)."""
    base_share: Share = 0.0
    """Share of decisions that the frozen policy goes on making after the warm-up."""
    moments: Literal["reset", "keep"] = "reset"
    """What the optimisers' moments are when learning in the world begins: forgotten, or those of the recorded data."""
    conservative: bool = False
    """Whether cql and cal_ql go on pushing values down in the world; otherwise they are plain SAC there (WSRL)."""
    evaluate_at: tuple[Natural, ...] = (0, 1, 100, 500)
    """Updates after which the policy is evaluated, early ones, or the dip after the switch is not seen."""
    evaluate_every: Natural = 5000
    """And after every so many, 0 for none."""
    checkpoint_every: Count = 5
    """Waves of episodes between resume points."""

    def __post_init__(self) -> None:
        if not (0 <= self.retain <= 1 and 0 <= self.base_share <= 1):
            raise ConfigError(f"retain {self.retain} and base_share {self.base_share} are shares, in [0, 1].")
        if min(self.steps, self.warmup, self.evaluate_every, *self.evaluate_at, 0) < 0 or self.updates < 0:
            raise ConfigError("steps, warmup, updates, evaluate_every and evaluate_at cannot be negative.")
        if self.batch_size < 1 or self.checkpoint_every < 1:
            raise ConfigError("batch_size and checkpoint_every must be at least 1.")
