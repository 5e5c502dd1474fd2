"""A simulated robot that asks a policy server."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class DriveSection:
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
    prefetch: int = 0
    """Ask for the next chunk when so many steps are left, where the server is slower than half a step: acting on what
    was seen so many steps ago costs success.
    """
    blend: int = 0
    """Over so many steps a new chunk takes over from the old one."""
    hold: Literal["zero", "last"] = "zero"
    """What a robot does that has nothing to do: nothing (velocities, differences), or the last action (positions)."""
    max_age: float | None = None
    """Seconds after which an observation is too old to act on; as long as two chunks take, unless set."""
    change: float | None = None
    """Most by which an action may differ from the one before, in the world's units."""
    patience: float = 5.0
    """Seconds that a server may fail before the drive ends; the robot holds still meanwhile."""
