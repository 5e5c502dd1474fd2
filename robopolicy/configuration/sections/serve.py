"""Sections for a policy server and for a robot, simulated or LeRobot's, that uses it."""

import math
import re
from dataclasses import dataclass, field, fields
from pathlib import Path

from robopolicy.core.errors import ConfigError
from robopolicy.core.ranges import Count, Positive
from robopolicy.core.structured import REGISTRY
from robopolicy.operators.configuration import AssistConfig
from robopolicy.serving.configuration import AttachedRobot, ConsoleConfig, RobotSettings, ServerAddress, ServerConfig


@dataclass(frozen=True)
class ServeSection(ServerConfig):
    """A policy server."""

    policy: Path | None = None
    """Checkpoint of the policy, or a link to it."""
    policies: dict[str, Path] = field(default_factory=dict)
    """Further policies by the name that clients ask for, drive.host=ws://HOST/policies/NAME: {careful: CHECKPOINT}."""
    console: ConsoleConfig = field(default_factory=ConsoleConfig)

    def __post_init__(self) -> None:
        """Raise ConfigError for invalid server settings, and names that are no part of a URL."""
        super().__post_init__()
        for name in self.policies:
            if not re.fullmatch(r"[\w.-]+", name):
                raise ConfigError(f"policies has the name '{name}': use letters, digits, '.', '_' and '-'.")


@dataclass(frozen=True)
class DriveAssist(AssistConfig):
    """Operators who take over when an alarm calls them: of the server's failure detectors, or one of these."""

    operator: str = field(default="", metadata={REGISTRY: "robopolicy.operators:OPERATORS"})
    """Who takes over, such as expert (the world's) or lerobot (a teleoperator); "" for people at the console."""


@dataclass(frozen=True)
class DriveSection(AttachedRobot, RobotSettings, ServerAddress):
    """A robot in its own process, driven by a policy server: simulated, or a LeRobot robot."""

    episodes: Count = 10
    """Number of episodes to run."""
    robots: Count = 1
    """Number of simulated robots that are driven at once, through one connection."""
    assist: DriveAssist = field(default_factory=DriveAssist)
    console: ConsoleConfig = field(default_factory=ConsoleConfig)
    rate: float = 0.0
    """Control frequency in Hz; 0 for the world's own (LeRobot robot: the policy's), -1 for as fast as the server
    answers (simulated robot).
    """
    record: Path | None = None
    """Folder in which every control step is recorded as a LeRobotDataset; an existing one is continued."""
    record_limit: Positive = 50.0
    """Gigabytes of a recording after which nothing more is recorded."""

    def __post_init__(self) -> None:
        """Raise ConfigError for settings that cannot drive a robot, and LeRobot-only settings without drive.robot."""
        super().__post_init__()
        if self.episodes < 1:
            raise ConfigError(f"drive.episodes={self.episodes} must be at least 1.")
        if not (math.isfinite(self.rate) and (self.rate >= 0 or self.rate == -1)):
            raise ConfigError(
                f"drive.rate={self.rate:g} must be above 0, 0 (the policy's own rate) or -1 (as fast as possible)."
            )
        if self.robot and (self.robots > 1 or self.assist != DriveAssist() or self.console.port is not None):
            raise ConfigError(
                "drive.robots, drive.assist and drive.console apply to simulated robots only: unset them, or unset "
                "drive.robot."
            )
        if self.supervisor and (self.assist != DriveAssist() or self.console.port is not None):
            raise ConfigError("drive.supervisor names a console elsewhere: unset drive.console and drive.assist.")
        if not self.robot:
            defaults = AttachedRobot()
            names = [each.name for each in fields(AttachedRobot)]
            robot_settings = [f"drive.{name}" for name in names if getattr(self, name) != getattr(defaults, name)]
            if robot_settings:
                raise ConfigError(
                    f"{', '.join(robot_settings)} apply only to a LeRobot robot (drive.robot=TYPE), not to the "
                    "simulated robot: unset them."
                )
            return
        if self.rate < 0:
            raise ConfigError("drive.rate=-1 is only for simulated robots: a LeRobot robot needs a fixed control rate.")
        for name in ("seconds", "robot_timeout", "frozen_camera_timeout"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"drive.{name}={getattr(self, name):g} must be more than 0 seconds.")
