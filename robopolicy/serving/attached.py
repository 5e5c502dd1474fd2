"""What can be set about a robot that is attached to this computer, without importing it."""

from dataclasses import dataclass, field
from typing import Any

from robopolicy.core.ranges import Positive


@dataclass(frozen=True)
class AttachedRobot:
    """A robot of LeRobot's."""

    robot: str = ""
    """A LeRobot robot to drive instead of a world: its type, such as so101_follower (built in, or of an installed
    lerobot_robot_* package), or the dotted path of its RobotConfig.
    """
    robot_options: dict[str, Any] = field(default_factory=dict)
    """The fields of its configuration: {port: /dev/ttyACM0, id: mine, cameras: {front: {type: opencv, ...}}}."""
    rename: dict[str, str] = field(default_factory=dict)
    """The robot's motors and cameras -> the policy's elements and fields, where names differ:
    {shoulder_pan.pos: shoulder_pan_position, front: observation.images.top}.
    """
    scale: dict[str, float] = field(default_factory=dict)
    """The robot's motors -> the policy's units in one of the robot's, 1 unless set: {shoulder_pan.pos: 0.0174533}
    where the policy learned radians and the robot counts degrees.
    """
    task: str = ""
    """The robot's instruction, empty for the policy's only one."""
    seconds: Positive = 30.0
    """How long an episode of the robot lasts."""
    answers_within: Positive = 1.0
    """Seconds that the robot may take for an observation or an action before it is stopped."""
    camera_age: Positive = 1.0
    """Seconds that a camera may show one and the same picture while the robot moves, before it counts as frozen."""
