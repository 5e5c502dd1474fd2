"""A simulated robot that asks a policy server."""

from dataclasses import dataclass

from robopolicy.serving.configuration import RobotSettings


@dataclass(frozen=True)
class DriveSection(RobotSettings):
    """A simulated robot in its own process, driven by a policy server."""

    host: str = "127.0.0.1"
    """The server's address."""
    port: int = 8000
    """The server's port."""
    api_key: str = ""
    """The server's key, if it wants one."""
    episodes: int = 10
    """How many are driven."""
    rate: float = 0.0
    """Control steps a second, 0 for the world's own, -1 for as fast as the server answers."""
