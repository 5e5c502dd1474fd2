"""What is examined."""

from dataclasses import dataclass, field
from pathlib import Path

from robopolicy.core.ranges import Count


@dataclass(frozen=True)
class DoctorSection:
    """What to examine."""

    data: Path | None = None
    """A LeRobotDataset (default: what collect wrote under the same name and seed)."""
    policy: Path | None = None
    """Checkpoint (default: what train wrote under the same name and seed)."""
    rename: dict[str, str] = field(default_factory=dict)
    """Other names for columns and elements of the data, as train.rename (default: the policy's own)."""
    episodes: Count = 20
    """How many demonstrations are replayed."""
