"""A policy server."""

from dataclasses import dataclass
from pathlib import Path

from robopolicy.serving.configuration import ServerConfig


@dataclass(frozen=True)
class ServeSection(ServerConfig):
    """A policy server."""

    policy: Path | None = None
    """Checkpoint."""
