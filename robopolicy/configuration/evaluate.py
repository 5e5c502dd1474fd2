"""What is judged."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class EvaluateSection:
    """Success over paired episodes, deterministic and stochastic."""

    policy: Path | None = None
    """Checkpoint."""
    base: Path | None = None
    """Checkpoint of a second policy on the same seeds; the difference is tested. Beside one that plans, the default is
    the same policy without planning.
    """
    instruction: str = ""
    """What the policy is told: empty for what the world asks for, wrong for another of its instructions, or any text; a
    policy that minds the language then fails.
    """
    anchors: Path | None = None
    """A dataset of graded quality (collect.quality) of the same world: returns are also scored between what uniform
    actions earn there, 0, and the expert, 100.
    """
    episodes: int = 200
    """How many in each mode."""
    videos: int = 8
    """How many are filmed, 0 for none."""
