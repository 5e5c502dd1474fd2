"""Distilling a policy of many denoising steps into one of few."""

from dataclasses import dataclass
from pathlib import Path

from robopolicy.core.errors import ConfigError
from robopolicy.core.ranges import Count, Natural
from robopolicy.training.configuration import DistillConfig


@dataclass(frozen=True)
class DistillSection(DistillConfig):
    """A policy of few denoising steps that does what one of many does."""

    policy: Path | None = None
    """Checkpoint of the teacher (default: what finetune wrote under the same name and seed)."""
    data: tuple[Path, ...] = ()
    """Datasets at whose observations it is asked, [] for episodes that it plays itself."""
    episodes: Count = 200
    """Of those that it plays, with exploration noise, so that the student also sees where it may stray."""
    evaluate_episodes: Natural = 200
    """Episodes that judge teacher and student at the end, 0 where there is no world."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.episodes < 1 or self.evaluate_episodes < 0:
            raise ConfigError("distill: episodes is at least 1, evaluate_episodes at least 0.")
