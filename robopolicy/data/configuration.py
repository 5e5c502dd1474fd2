"""Settings of recording and conversion; imports nothing heavy."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from robopolicy.core.errors import ConfigError
from robopolicy.core.ranges import Natural, Positive
from robopolicy.core.structured import FormerNames


@dataclass(frozen=True)
class CorrectConfig(FormerNames):
    """Conditions under which the expert takes over from a policy, and the number of actions undone first."""

    RENAMED: ClassVar[Mapping[str, str]] = {"patience": "no_progress_steps", "budget": "max_policy_steps"}

    no_progress_steps: Natural = 0
    """Control steps without a new maximum of the cumulative reward after which the expert takes over, 0 for never."""
    max_policy_steps: Natural = 0
    """Control steps of an episode after which the expert takes over in any case, 0 for never."""
    rewind: Natural = 0
    """Number of the policy's control steps that are undone first (RaC's recovery), starting with the last. Actions are
    mirrored about the middle of their range; grippers stay. Suited to actions that are velocities or steps. 0 corrects
    at once, which gave better policies on push_cube (rl/offline/README.md).
    """

    def __post_init__(self) -> None:
        if min(self.no_progress_steps, self.max_policy_steps, self.rewind) < 0:
            raise ConfigError("collect.correct: no_progress_steps, max_policy_steps and rewind must be at least 0.")

    @property
    def wanted(self) -> bool:
        """Whether the expert can take over at all."""
        return bool(self.no_progress_steps or self.max_policy_steps)


@dataclass(frozen=True)
class ConvertConfig(FormerNames):
    """Columns and episodes of another format to convert to a LeRobotDataset."""

    RENAMED: ClassVar[Mapping[str, str]] = {"without": "exclude_episodes"}

    map: dict[str, Any] = field(default_factory=dict)
    """Mapping from source keys to names in the LeRobotDataset, {obs/eef_pos: observation.state, action: action}; the
    others are guessed. Several keys with one name are concatenated in this order, "KEY[0:2]" is a slice, null drops a
    key.
    """
    fps: Positive | None = None
    """Control frequency in Hz (default: the source's)."""
    task: str = ""
    """Instruction of every episode (default: the source's)."""
    episodes: Natural | tuple[Natural, ...] = 0
    """Episodes to keep: a list of indices, or the number of first episodes; 0 for all. Counted over all sources."""
    exclude_episodes: tuple[Natural, ...] = ()
    """Indices of episodes to exclude."""
    trim_start: Natural = 0
    """Steps to cut from the start of every episode."""
    trim_end: Natural = 0
    """Steps to cut from the end of every episode."""
    flip: tuple[str, ...] = ()
    """Cameras whose images are stored upside down, by their names in the LeRobotDataset."""
    bgr: tuple[str, ...] = ()
    """Cameras whose images are stored in BGR order."""
    images: Literal["video", "png"] = "video"
    """Image storage format: video (H.264, small) or png (exact)."""
