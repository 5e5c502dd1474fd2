"""Which judge to trust."""

from dataclasses import dataclass
from pathlib import Path

from robopolicy.core.errors import ConfigError
from robopolicy.core.ranges import Count


@dataclass(frozen=True)
class BakeoffSection:
    """Judges (those that gate.judges names) scored on policies whose true value the world tells."""

    policies: tuple[Path, ...] = ()
    """Checkpoints, at least three: of independent trainings and steps, good ones and bad ones."""
    episodes: Count = 200
    """Episodes in the world that say what each is truly worth."""
    threshold: float = 0.0
    """A policy is truly better than another one where it is so by more than this."""

    def __post_init__(self) -> None:
        if self.episodes < 1 or self.threshold < 0:
            raise ConfigError("bakeoff.episodes is at least 1, bakeoff.threshold at least 0.")
