"""Pre-training."""

from dataclasses import dataclass, field
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
    policy: Path | None = None
    """Checkpoint of a policy of ours to go on from, with more steps or other data, as a run of another name; it keeps
    its network and normalisers, and policy.* is not read. One of LeRobot's: policy.kind=lerobot policy.path=FOLDER.
    """
    encoder: Path | None = None
    """World model whose latent the policy shall read (for imagine)."""
    rename: dict[str, str] = field(default_factory=dict)
    """Other names for columns and elements of the data, its own -> those to read it by: {image:
    observation.images.image, state: observation.state, actions: action, motor_0: x}. The checkpoint remembers them.
    """
    episodes: Natural | tuple[Natural, ...] = 0
    """Use these of `data`, [0,2,5], or the first so many, 0 for all."""
    without: tuple[Natural, ...] = ()
    """Episodes of `data` to leave out, by number, such as broken ones."""
    evaluate_episodes: Natural = 200
    """Episodes of the judgement at the end, 0 for none."""
