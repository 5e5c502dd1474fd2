"""Pre-training."""

from dataclasses import dataclass
from pathlib import Path

from robopolicy.core.ranges import Natural
from robopolicy.training.configuration import PretrainConfig


@dataclass(frozen=True)
class TrainSection(PretrainConfig):
    """Pre-training by regression on demonstrations."""

    data: Path | None = None
    """A LeRobotDataset (default: what collect wrote under the same name and seed)."""
    more: tuple[Path, ...] = ()
    """Further datasets of the same robot, such as corrections."""
    encoder: Path | None = None
    """World model whose latent the policy shall read (for imagine)."""
    episodes: Natural = 0
    """Use the first so many of `data`, 0 for all."""
    evaluate_episodes: Natural = 200
    """Episodes of the judgement at the end, 0 for none."""
