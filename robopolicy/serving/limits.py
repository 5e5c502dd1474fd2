"""What one client may ask for, so that none can stall or starve the others; most limits follow from the policy.

A server that reads megabytes of text, counts ten million numbers or keeps a gigabyte of history for one client makes
every other robot wait. Nothing honest comes near these limits.
"""

from dataclasses import dataclass

from robopolicy.core.spec import IMAGE_PREFIX, PolicySpec

IMAGE_BYTES = 3 * 1280 * 720
"""Most bytes of one image that is sent to be resized."""

NUMBER_BYTES = 8
"""Most bytes of one number of a vector, as float64."""


@dataclass(frozen=True)
class Limits:
    """Of what a client may send, and of how much of it is kept.

    message: bytes of one message; text: characters of an instruction; names: fields of one mapping; name: characters of
    a field's or a session's name; length: elements of one list; elements: of all lists and mappings of a message
    together; depth: of nested mappings; image: bytes of one frame of a camera; sessions, address_sessions,
    all_sessions: robots behind one connection, behind one address, and in all; connections, address_connections: open
    sockets in all, and from one address; pipelined: requests of one connection that are under way at once; reading:
    messages of one address that are decoded at once; pings: a second and connection; wrong_keys: from one address
    within `lockout` seconds, after which its other ones are not looked at for as long.
    """

    message: int = 64 * 2**20
    text: int = 10_000
    names: int = 100
    name: int = 128
    length: int = 1000
    elements: int = 10_000
    depth: int = 8
    image: int = IMAGE_BYTES
    sessions: int = 256
    address_sessions: int = 768
    all_sessions: int = 1024
    connections: int = 512
    address_connections: int = 128
    pipelined: int = 16
    reading: int = 2
    pings: int = 50
    wrong_keys: int = 10
    lockout: float = 10.0

    @classmethod
    def of(cls, spec: PolicySpec) -> "Limits":
        """Return the limits for clients of a policy: twice the largest honest message, lists as long as its vectors."""
        vectors = [field.size for key, field in spec.observation.items() if not key.startswith(IMAGE_PREFIX)]
        images = [field.size for key, field in spec.observation.items() if key.startswith(IMAGE_PREFIX)]
        frames = sum(vectors) * NUMBER_BYTES + sum(max(size, IMAGE_BYTES) for size in images)
        longest = max([spec.history, 16, *vectors])
        return cls(
            message=2 * spec.history * frames + 64 * 1024,
            length=longest,
            elements=2 * spec.history * (sum(vectors) + 100) + 1000,
            image=max([IMAGE_BYTES, *images]),
        )
