"""Settings of recording and conversion; imports nothing heavy."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from robopolicy.core.errors import ConfigError
from robopolicy.core.ranges import Natural, Positive
from robopolicy.core.structured import FormerNames
from robopolicy.operators.configuration import AssistConfig


@dataclass(frozen=True)
class CorrectConfig(AssistConfig):
    """Alarms on which an operator takes over from a policy, the operators, and the number of actions undone first."""

    RENAMED: ClassVar[Mapping[str, str]] = {"patience": "no_progress_steps", "budget": "max_policy_steps"}

    detector: Path | None = None
    """Folder of a calibrated failure detector (`robopolicy detect`), such as detectors/float, whose alarm calls the
    operator. The parent folder stands for all detectors in it, of which any alarm counts.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rewind == "adaptive" and self.detector is None:
            raise ConfigError("collect.correct.rewind=adaptive needs a detector: set collect.correct.detector=FOLDER.")

    @property
    def wanted(self) -> bool:
        """Whether an operator can take over at all."""
        return super().wanted or self.detector is not None


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
