"""Connection limits: open sockets, wrong keys and control frames, enforced before a handshake completes."""

import asyncio
import ipaddress
import math
import ssl
import time
from collections import Counter
from pathlib import Path
from typing import Any, cast

from websockets.asyncio.server import ServerConnection
from websockets.frames import CloseCode, Frame, Opcode
from websockets.protocol import State

from robopolicy.client.protocol import Limits
from robopolicy.core.errors import ServingError
from robopolicy.core.former_names import keep_former_names

READ_BYTES = 32 * 1024
"""Bytes read from a socket at a time: data is processed in parts of this size, so a flood is noticed after the first
part.
"""


def is_loopback(host: str) -> bool:
    """Whether an address to listen on is this machine's alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def server_tls(certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """Return the TLS context of a server, None without a certificate; raises ServingError if it cannot be used."""
    if certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise ServingError(f"The certificate {certificate} (key {key}) cannot be used: {error}") from error
    return context


class ConnectionLimiter:
    """Counts open sockets and wrong keys, in total and by address."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self.open: Counter[str] = Counter()
        self._lanes: dict[str, asyncio.Semaphore] = {}
        self._wrong: dict[str, tuple[float, int]] = {}

    def enter(self, address: str) -> bool:
        """Count a new socket; return whether it exceeds a limit."""
        self.open[address] += 1
        return self.open.total() > self.limits.connections or self.open[address] > self.limits.address_connections

    def leave(self, address: str) -> None:
        """Count a closed socket."""
        self.open[address] -= 1
        if self.open[address] <= 0:
            del self.open[address]
            self._lanes.pop(address, None)

    def lane(self, address: str) -> asyncio.Semaphore:
        """Return the semaphore that limits concurrent decoding for one address, so that others need not wait."""
        return self._lanes.setdefault(address, asyncio.Semaphore(self.limits.reading))

    def locked_out(self, address: str) -> bool:
        """Whether this address recently sent too many wrong keys."""
        began, count = self._wrong.get(address, (0.0, 0))
        if time.monotonic() - began > self.limits.lockout:
            self._wrong.pop(address, None)
            return False
        return count >= self.limits.wrong_keys

    def lockout_left(self, address: str) -> int:
        """Return the seconds, rounded up, during which keys from this address are still ignored."""
        began, _ = self._wrong.get(address, (0.0, 0))
        return max(math.ceil(began + self.limits.lockout - time.monotonic()), 0)

    def wrong_key(self, address: str) -> None:
        """Count a wrong key; a missing key is not counted."""
        now = time.monotonic()
        began, count = self._wrong.get(address, (now, 0))
        if len(self._wrong) > 10_000:  # many addresses: forget those whose time is over
            self._wrong = {key: value for key, value in self._wrong.items() if now - value[0] <= self.limits.lockout}
        self._wrong[address] = (began if now - began <= self.limits.lockout else now), count + 1


class LimitedConnection(ServerConnection):
    """A connection that is closed if the server has too many, or if the client sends too many pings. A message that is
    too large is first answered with an error text, like every refused request.
    """

    def __init__(self, *arguments: Any, door: ConnectionLimiter, **options: Any):
        super().__init__(*arguments, **options)
        self._door = door
        self._fail, self.protocol.fail = self.protocol.fail, self._failed
        self._entered: str | None = None
        self._pings = (0.0, 0)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the socket, and close it if it exceeds a limit."""
        super().connection_made(transport)
        self._entered = address_of(transport)
        cast(Any, transport).max_size = READ_BYTES
        if self._door.enter(self._entered):
            cast(asyncio.Transport, transport).abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Count the socket as closed."""
        super().connection_lost(exc)
        if self._entered is not None:
            self._door.leave(self._entered)
            self._entered = None

    def _failed(self, code: int, reason: str = "") -> None:
        if code == CloseCode.MESSAGE_TOO_BIG and self.protocol.state is State.OPEN:
            byte_limit = self._door.limits.message
            self.protocol.send_text(
                f"This server accepts messages of at most {byte_limit} bytes ({reason}): are images larger than 1280 x "
                "720, and larger than the policy reads? Reduce them before sending.".encode()
            )
        self._fail(code, reason)

    def process_event(self, event: Any) -> None:
        """Close the connection when pings exceed the limit."""
        if isinstance(event, Frame) and _does_nothing(event):
            now = time.monotonic()
            began, count = self._pings
            self._pings = (began, count + 1) if now - began < 1 else (now, 1)
            if self._pings[1] > self._door.limits.pings:
                self.transport.abort()
                return
        super().process_event(event)


def _does_nothing(frame: Frame) -> bool:
    return frame.opcode in (Opcode.PING, Opcode.PONG) or (frame.opcode is Opcode.CONT and not frame.data)


def address_of(transport: asyncio.BaseTransport) -> str:
    """Return the address that a socket came from, "" if unknown (a local socket, or a closed one)."""
    peer = transport.get_extra_info("peername")
    return str(peer[0]) if isinstance(peer, tuple) and peer else ""


keep_former_names(__name__, {"Door": "ConnectionLimiter"})
