"""A policy server."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ServeSection:
    """A policy server."""

    policy: Path | None = None
    """Checkpoint."""
    host: str = "127.0.0.1"
    """Address to listen on; beyond loopback it needs an api_key."""
    port: int = 8000
    """Port to listen on."""
    api_key: str = ""
    """What clients must show, or set the environment's ROBOPOLICY_API_KEY."""
