"""What can be set about recording and converting; nothing heavy is imported here."""

from dataclasses import dataclass, field
from typing import Any, Literal

from robopolicy.core.errors import ConfigError
from robopolicy.core.ranges import Natural, Positive


@dataclass(frozen=True)
class CorrectConfig:
    """When an operator takes over from a policy, and what is done first."""

    patience: Natural = 0
    """Control steps without a new best sum of rewards after which the expert takes over; 0 for never."""
    budget: Natural = 0
    """Control steps of an episode after which it takes over in any case; 0 for never."""
    rewind: Natural = 0
    """Control steps of the policy that are undone first (RaC's recovery), the last one first: the actions' elements
    mirrored in the middle of their range, grippers as they were. Right where actions are velocities or steps; 0
    corrects at once, which taught more on push_cube (rl/offline/README.md).
    """

    def __post_init__(self) -> None:
        if min(self.patience, self.budget, self.rewind) < 0:
            raise ConfigError("patience, budget and rewind of corrections are at least 0.")

    @property
    def wanted(self) -> bool:
        """Whether anybody ever takes over."""
        return bool(self.patience or self.budget)


@dataclass(frozen=True)
class ConvertConfig:
    """Which columns and episodes of another format a LeRobotDataset is made of."""

    map: dict[str, Any] = field(default_factory=dict)
    """Names in the LeRobotDataset for keys of the source, {obs/eef_pos: observation.state, action: action}; the others
    are guessed. Several keys of one name are concatenated in this order, "KEY[0:2]" is a slice, null leaves a key out.
    """
    fps: Positive | None = None
    """Control steps per second (default: what the source says)."""
    task: str = ""
    """Instruction of every episode (default: what the source says)."""
    episodes: Natural | tuple[Natural, ...] = 0
    """Episodes to keep: their numbers, or how many from the first on; 0 for all. Counted through all sources."""
    without: tuple[Natural, ...] = ()
    """Episodes to leave out, by number."""
    trim_start: Natural = 0
    """Steps to cut from the start of every episode."""
    trim_end: Natural = 0
    """Steps to cut from the end of every episode."""
    flip: tuple[str, ...] = ()
    """Cameras whose pictures are stored upside down, by their names in the LeRobotDataset."""
    bgr: tuple[str, ...] = ()
    """Cameras whose pictures are stored in the order blue, green, red."""
    images: Literal["video", "png"] = "video"
    """How pictures are stored: video (H.264, small) or png (exact)."""
