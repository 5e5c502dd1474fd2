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
    recover_steps: Natural = 0
    """Most control steps of a turn in which the expert first goes back to where it can try again (RaC), 0 for none. It
    ends earlier once the expert says so, or in a state of recover_data.
    """
    recover_data: Path | None = None
    """Demonstrations (LeRobotDataset): the recovery ends in a state of one of them, if it is no later there than the
    state at the takeover.
    """
    frames: Natural = 0
    """Control steps of operators, recoveries included, after which no further episode begins; 0 for no limit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rewind == "adaptive" and self.detector is None:
            raise ConfigError("collect.correct.rewind=adaptive needs a detector: set collect.correct.detector=FOLDER.")
        if min(self.recover_steps, self.frames) < 0:
            raise ConfigError("collect.correct.recover_steps and collect.correct.frames must be at least 0.")
        if self.recover_data is not None and not self.recover_steps:
            raise ConfigError("collect.correct.recover_data ends recoveries: set collect.correct.recover_steps=20.")

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
