"""Putting a new policy to work beside a known one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from robopolicy.core.errors import ConfigError
from robopolicy.core.ranges import Count, Share


@dataclass(frozen=True)
class DeploySection:
    """A deployment in which success must not fall below a floor."""

    policy: Path | None = None
    """Checkpoint of the new policy (default: what finetune wrote under the same name and seed)."""
    base: Path | None = None
    """Checkpoint of the known one (default: what train wrote under the same name and seed)."""
    coin: Literal["step", "episode"] = "step"
    """Who acts is drawn at every decision (StepMix), or once an episode (EpsMix)."""
    drop: Share = 0.2
    """Share of the base's success that may be lost: the floor is (1 - drop) times it."""
    known: Count = 200
    """Episodes of the base that are played first, so that its success is known."""
    episodes: Count = 500
    """Length of the deployment."""
    wave: Count = 20
    """Episodes after which the share of the new policy is chosen anew."""
    confidence: Share = 0.95
    """Of the one-sided bound that has to exceed the floor."""

    def __post_init__(self) -> None:
        if not 0 <= self.drop <= 1 or not 0.5 <= self.confidence < 1:
            raise ConfigError(
                f"deploy.drop={self.drop} is a share of the base's success, deploy.confidence={self.confidence} is in "
                "[0.5, 1)."
            )
        if min(self.known, self.wave) < 1 or self.episodes < 20:
            raise ConfigError("deploy: known and wave are at least 1, episodes at least 20.")
