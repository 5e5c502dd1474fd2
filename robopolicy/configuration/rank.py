"""What is ranked."""

from dataclasses import dataclass
from pathlib import Path

from robopolicy.core.ranges import Count, NoiseLevel


@dataclass(frozen=True)
class RankSection:
    """Policies scored in world models and in the simulator, on the same starts."""

    policies: tuple[Path, ...] = ()
    """Checkpoints of independently trained policies."""
    models: tuple[Path, ...] = ()
    """Checkpoints of world models of any kind (default: what worldmodel wrote under the same name and seed)."""
    noise: tuple[NoiseLevel, ...] = ("none", "low", "medium", "high", "random")
    """Levels at which the expert is ranked beside them, [] for none."""
    episodes: Count = 200
    """Episodes of every policy in every world."""
