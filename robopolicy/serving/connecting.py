"""A connection to the policy server that the settings of a robot name."""

import os

from robopolicy.serving.client import PolicyClient
from robopolicy.serving.configuration import ServerAddress

STARTING = 5.0
"""Seconds that a server may take to start, where its robot has as much patience: a connection says earlier than the
robot gives up that nobody listens."""

SHORTEST = 1.0
"""Seconds that a connection waits for an answer at least; a driver with less patience gives up before."""


def connected(server: ServerAddress, patience: float) -> PolicyClient:
    """Return a connection to `server`, with the environment's ROBOPOLICY_API_KEY unless it names a key.

    patience: seconds after which a robot gives its server up; what it asked is given up then too. Raises as
    `PolicyClient` does.
    """
    return PolicyClient(
        server.host,
        server.port,
        api_key=server.api_key or os.environ.get("ROBOPOLICY_API_KEY") or None,
        timeout=max(patience, SHORTEST),
        patience=min(STARTING, patience / 2),
        certificate=server.certificate,
    )
