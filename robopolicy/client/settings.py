"""Settings of robots that use a policy server, attached or simulated, and of its address."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .element_kinds import POSITIONS
from .errors import ConfigError
from .ranges import Natural, NonNegative, Positive

LONGEST_KEY = 4096
"""Maximum characters of an API key: servers refuse headers of twice this length."""


def require_key(key: str) -> None:
    """Raise ConfigError, without printing the key, when an API key cannot be sent in a header; "" is allowed."""
    if not key.isprintable():
        problem = "contains a line break or control character"
    elif key != key.strip():
        problem = "starts or ends with a space"
    elif any(ord(each) > 255 for each in key):
        problem = "contains characters outside Latin-1"
    elif len(key) > LONGEST_KEY:
        problem = f"has {len(key)} characters, more than {LONGEST_KEY}"
    else:
        return
    raise ConfigError(
        f"The API key {problem} and cannot be sent in an HTTP header. Create one with: openssl rand -hex 16"
    )


@dataclass(frozen=True)
class ServerAddress:
    """Address of a robot's policy server."""

    host: str = "127.0.0.1"
    """Host name of the server, or its complete URL: wss://robot.example:8000."""
    port: Natural | None = None
    """Port of the server; default: the URL's port, else 8000."""
    api_key: str = ""
    """API key of the server, if required; it can also be set by the environment variable ROBOPOLICY_API_KEY."""
    certificate: Path | None = None
    """PEM file of a certificate to trust, such as a server's self-signed one (serve.certificate); the connection then
    uses wss://.
    """


@dataclass(frozen=True)
class RobotSettings:
    """Settings for driving a robot."""

    prefetch: Natural = 0
    """Request the next chunk when this many steps are left, if the server takes longer than half a step. Success falls
    because observations are then this many steps old.
    """
    latency_steps: Natural = 0
    """Simulated server latency: control steps by which every answer but an episode's first is delayed."""
    blend: Natural = 0
    """Number of steps over which a new chunk is blended with the old one. Angles such as yaw take the shorter way;
    grippers and toggles switch at once.
    """
    periods: dict[str, NonNegative] = field(default_factory=dict)
    """Mapping from periodic action elements to the size of one turn, in the policy's units: {yaw: 6.2832}. 0 marks
    elements that are neither periodic nor toggles despite their names.
    """
    unblended: tuple[str, ...] = ()
    """Action elements that switch at once instead of being blended."""
    hold: Literal["auto", "zero", "last"] = "auto"
    """Holding value of action elements whose name and unit do not imply one: zero (velocities, differences) or last
    (positions). auto uses the latency_hold of the served policy's world; without it, a simulated robot uses zero and an
    attached robot requires a choice.
    """
    positions: tuple[str, ...] = POSITIONS
    """Names of action elements that keep their position while the robot holds still, regardless of unit."""
    hold_values: dict[str, float] = field(default_factory=dict)
    """Mapping from action elements to the value they take instead while the robot holds still, in the policy's units:
    {x.vel: 0, throttle: 0.5}.
    """
    max_observation_age: NonNegative | None = None
    """Maximum age in seconds of an observation to act on; default: the duration of two chunks."""
    max_action_change: Positive | None = None
    """Maximum change of an action from the previous one, in the policy's units; an episode's first is compared with the
    robot's position.
    """
    bounds: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Minimum and maximum of action elements, in the policy's units: {x.vel: [-0.2, 0.2]}. An attached robot requires
    bounds or max_action_change if the policy has no bounds of its own (LeRobot's have none).
    """
    unbounded: bool = False
    """Allow an attached robot to receive any action when no bounds apply."""
    supervisor: str = ""
    """Address of a console that can take this robot over and stop it (serve.console.port): ws://server:8080. The robot
    holds still while it does not hear from it.
    """
    name: str = "robot"
    """Name of the robot at that console."""
    server_timeout: NonNegative = 5.0
    """Seconds for which the server may fail or not answer before the drive ends; the robot holds still meanwhile."""

    def __post_init__(self) -> None:
        """Raise ConfigError for settings that cannot drive a robot."""
        if self.max_action_change is not None and not 0 < self.max_action_change < math.inf:
            raise ConfigError(
                f"max_action_change={self.max_action_change} must be more than 0 (the largest change "
                f"between consecutive actions), or null."
            )
        if not all(math.isfinite(value) for value in self.hold_values.values()):
            raise ConfigError(
                f"hold_values={self.hold_values}: each value must be a finite number, in the policy's units."
            )
        if not all(0 <= value < math.inf for value in self.periods.values()):
            raise ConfigError(
                f"periods={self.periods}: each must be the length of one turn, more than 0, or 0 for none."
            )
        for name, bound in self.bounds.items():
            if len(bound) != 2 or not all(map(math.isfinite, bound)) or bound[0] > bound[1]:
                raise ConfigError(
                    f"bounds has {name}: {list(bound)}, but must be [LOW, HIGH], finite and LOW at most HIGH."
                )
        if self.max_observation_age is not None and not self.max_observation_age > 0:
            raise ConfigError(f"max_observation_age={self.max_observation_age} must be more than 0 seconds, or null.")
        if min(self.prefetch, self.latency_steps, self.blend) < 0:
            raise ConfigError(
                f"prefetch={self.prefetch}, latency_steps={self.latency_steps} and blend={self.blend} must be at "
                "least 0 control steps."
            )
        if not 0 < self.server_timeout < math.inf:
            raise ConfigError(f"server_timeout={self.server_timeout} must be more than 0 seconds.")


@dataclass(frozen=True)
class AttachedRobot:
    """A LeRobot robot."""

    robot: str = ""
    """LeRobot robot to drive instead of a world: its type, such as so101_follower (built in, or from an installed
    lerobot_robot_* package), or the import path of its RobotConfig.
    """
    robot_options: dict[str, Any] = field(default_factory=dict)
    """Fields of the robot's configuration: {port: /dev/ttyACM0, id: mine, cameras: {front: {type: opencv, ...}}}."""
    rename: dict[str, str] = field(default_factory=dict)
    """Mapping from the robot's motors and cameras to the policy's elements and fields, where names differ:
    {shoulder_pan.pos: shoulder_pan_position, front: observation.images.top}.
    """
    scale: dict[str, float] = field(default_factory=dict)
    """Mapping from motors to the policy's units per unit of the robot, 1 by default: {shoulder_pan.pos: 0.0174533} for
    a policy in radians and a robot in degrees.
    """
    task: str = ""
    """Instruction for the robot; empty for the policy's only one."""
    seconds: Positive = 30.0
    """Duration of an episode of the robot in seconds."""
    robot_timeout: Positive = 1.0
    """Timeout in seconds of the robot's observations and actions, after which the robot is stopped."""
    frozen_camera_timeout: Positive = 1.0
    """Seconds of identical images while the robot moves after which a camera counts as frozen."""
