"""A robot, simulated or LeRobot's, that asks a policy server."""

from dataclasses import dataclass

from robopolicy.serving.attached import AttachedRobot
from robopolicy.serving.configuration import RobotSettings


@dataclass(frozen=True)
class DriveSection(AttachedRobot, RobotSettings):
    """A robot in its own process, driven by a policy server: a simulated one, or one of LeRobot's."""

    host: str = "127.0.0.1"
    """The server's address."""
    port: int = 8000
    """The server's port."""
    api_key: str = ""
    """The server's key, if it wants one."""
    episodes: int = 10
    """How many are driven."""
    rate: float = 0.0
    """Control steps a second, 0 for the world's own (a LeRobot robot's: the policy's), -1 for as fast as the server
    answers.
    """
