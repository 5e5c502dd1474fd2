"""Teaching a student."""

from dataclasses import dataclass

from robopolicy.core.errors import ConfigError
from robopolicy.core.ranges import Natural
from robopolicy.training.configuration import TeachConfig


@dataclass(frozen=True)
class TeachSection(TeachConfig):
    """A student that is taught where it leads itself."""

    teacher: str = ""
    """Checkpoint (default: what finetune wrote under the same name and seed), or expert: the world's."""
    noise: str = "0.2"
    """Of the expert, as in collect.noise. A policy explores."""
    evaluate_episodes: Natural = 200
    """Episodes that judge both at the end, 0 for none."""
    videos: Natural = 8
    """Of them in the student's film, 0 for none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.evaluate_episodes, self.videos) < 0:
            raise ConfigError("teach.evaluate_episodes and teach.videos are 0 or more.")
