"""What demonstrations are recorded."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class CollectSection:
    """Demonstrations, by the scripted expert, a controller of yours or a policy."""

    episodes: int = 200
    """How many, over all levels of noise."""
    noise: tuple[str, ...] = ("low",)
    """Levels of disturbance, each for an equal share of the episodes: none, low, medium, high, random, or the standard
    deviation of noise on every action as a share of half its range.
    """
    controller: str = ""
    """Dotted path package.module:factory of your own controller, empty for the expert."""
    policy: Path | None = None
    """Checkpoint of a policy that plays instead."""
    successes_only: bool = False
    """Drop failures; world models need them."""
    images: Literal["png", "video"] = "png"
    """How images are stored: png, exact, or video, small."""
