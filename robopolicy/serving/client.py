"""A client for policy servers that speak openpi's protocol; needs numpy, msgpack and websockets, but no torch.

Where a server is: its address, the proxy on the way there, its certificate, and what went wrong. Proxies are those of
the environment, in the order of the websockets library: ws_proxy or wss_proxy, socks_proxy, https_proxy, and http_proxy
for ws:// alone, but for the hosts in no_proxy. This machine is never reached through one.
"""

import ipaddress
import itertools
import os
import secrets
import socket
import ssl
import time
import warnings
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import numpy as np
from websockets.exceptions import (
    ConnectionClosed,
    InvalidMessage,
    InvalidProxy,
    InvalidProxyStatus,
    InvalidStatus,
    WebSocketException,
)
from websockets.frames import CloseCode
from websockets.sync.client import ClientConnection, connect

from robopolicy.core.errors import ConfigError, RobopolicyWarning, ServingError, SpecError
from robopolicy.serving.configuration import ServerAddress, require_key
from robopolicy.serving.described import camera_shapes
from robopolicy.serving.pictures import smaller
from robopolicy.serving.protocol import CHECK, REQUEST, RESET, SESSION, fingerprint, pack, unpack, unsealed

MAXIMUM_ANSWER = 64 * 2**20
"""Bytes of the longest answer that is read."""

BUSY = 1013
"""Close code of a server that has too much to do."""

KEYS = "api_key; of robopolicy drive: drive.api_key, or the environment's ROBOPOLICY_API_KEY"
"""Where a client's key comes from."""

UNASKED = 1000
"""Messages that nobody asked for, before a server is given up."""

AGAIN = 0.05
"""Seconds that an answer may come after one which is the last one's copy, at least."""

DESCRIBED = ("observation", "action", "history", "chunk", "prediction", "chunking", "fps", "instructions", "world")
"""What a server says of its policy, and must say again after a connection was lost."""
PORT = 8000
"""Port of a server where nobody says another."""
SCHEMES = ("ws", "wss")
STARTING = 5.0
"""Seconds that a server may take to start, where its robot has as much patience: a connection says earlier than the
robot gives up that nobody listens."""
SHORTEST = 1.0
"""Seconds that a connection waits for an answer at least; a driver with less patience gives up before."""


def whole_address(host: str, port: int | None, encrypted: bool) -> str:
    """Return the ws:// or wss:// address of a server.

    host: a name, or a whole address; port: None for the one that a whole address says, PORT for a name; encrypted:
    whether a name is one of a wss:// address. Raises ConfigError where the two say different ports, where a whole
    address is of another kind, and where it is ws:// although it has to be encrypted.
    """
    name = f"[{host}]" if host.count(":") > 1 and "://" not in host and "[" not in host else host  # IPv6
    whole = host if "://" in host else f"{'wss' if encrypted else 'ws'}://{name}"
    try:
        parts = urlsplit(whole)
        own = parts.port
    except ValueError as error:
        raise ConfigError(f"{host} is no address of a server: {error}.") from error
    if any(each.isspace() or not each.isprintable() for each in host):
        raise ConfigError(f"{host!r} is no address of a server: it holds a space or a line break.")
    if parts.scheme not in SCHEMES:
        raise ConfigError(f"{host} is no address of a policy server: those begin with ws:// or wss://.")
    if encrypted and parts.scheme == "ws":
        raise ConfigError(f"A certificate is what a wss:// address is checked against, and {host} is none.")
    if port is not None and not 0 < port < 65536:
        raise ConfigError(f"port is {port}: a server listens at one of 1 to 65535.")
    if own is not None and port not in (None, own):
        raise ConfigError(f"{host} says port {own}, and port is {port}: say one of them.")
    if own is not None or (port is None and "://" in host):
        return whole
    return parts._replace(netloc=f"{parts.netloc}:{PORT if port is None else port}").geturl()


def trusting(certificate: Path | str | None) -> ssl.SSLContext:
    """Return what a server's certificate is checked against: a PEM file, None for the authorities that the system
    trusts. Raises ServingError where it cannot be read.
    """
    try:
        return ssl.create_default_context(cafile=None if certificate is None else str(certificate))
    except (OSError, ssl.SSLError) as error:
        raise ServingError(f"The certificate {certificate} cannot be read: {error}") from error


def is_this_machine(host: str) -> bool:
    """Whether `host` is a name or an address of the machine that asks: connections to it leave it through no proxy."""
    name = host.lower().strip("[]").rstrip(".")
    if name in ("localhost", socket.gethostname().lower()) or name.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        try:
            address = ipaddress.ip_address(socket.inet_aton(name))  # short forms such as 127.1
        except (OSError, UnicodeError):
            return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return any(each.is_loopback or each.is_unspecified for each in (address, mapped or address))


@dataclass(frozen=True)
class Proxy:
    """A proxy on the way to a server.

    url: its address, with the login if the user gave one; setting: what names it, such as https_proxy; host: of the
    server.
    """

    url: str
    setting: str
    host: str

    def __str__(self) -> str:
        """Return where it is and who says so; a login is left out."""
        scheme, _, rest = self.url.partition("://")
        return f"the proxy {scheme}://{rest.rpartition('@')[2]} of {self.setting}"

    @property
    def around(self) -> str:
        """What lets connections to the server go without it."""
        return f" no_proxy={self.host} goes around it."


def proxy_for(address: str) -> Proxy | None:
    """Return the proxy that the environment wants between this machine and a ws:// or wss:// address, None for none."""
    parts = urlsplit(address)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "wss" else 80)
    if is_this_machine(host) or proxy_bypass(f"{host}:{port}"):
        return None
    proxies = getproxies()
    for kind in ("wss", "socks", "https") if parts.scheme == "wss" else ("ws", "socks", "https", "http"):
        if url := proxies.get(kind):
            spelt = [name for name in (f"{kind}_proxy", f"{kind}_proxy".upper()) if os.environ.get(name)]
            url = url if "://" in url else f"http://{url}"
            if kind == "socks" and url.startswith("http://"):
                url = url.replace("http", "socks5h", 1)
            return Proxy(url, spelt[0] if spelt else "this computer's settings", host)
    return None


def unreachable(address: str, proxy: Proxy | None, error: Exception) -> ServingError:
    """Return what it means that connecting to `address`, through `proxy`, raised `error`, and what to do about it."""
    said = str(error).rstrip(".") or type(error).__name__
    if isinstance(error, ConnectionClosed):  # within the handshake, when the end comes before the answer is looked at
        said = "did not receive a valid HTTP response"
    if proxy is None:
        if isinstance(error, ConnectionRefusedError | ConnectionResetError):
            return ServingError(f"Nobody listens at {address}. Start the server first: robopolicy serve CHECKPOINT")
        return ServingError(f"Cannot connect to {address}: {said}.{way_out(address, error)}")
    if isinstance(error, ImportError):
        text = f"{address} is reached through {proxy}, and that takes a package: pip install python-socks."
        return ServingError(text + proxy.around)
    if isinstance(error, InvalidProxy):
        text = f"{proxy.setting} names no proxy ({said}): write {proxy.setting}=http://HOST:PORT."
        return ServingError(f"Cannot connect to {address}: {text}{proxy.around}")
    if isinstance(error, InvalidProxyStatus):
        status = error.response.status_code
        login = " It wants a login: http://USER:PASSWORD@HOST:PORT." if status == 407 else ""
        refused = f"{address} cannot be reached: {proxy} does not let the connection through (HTTP {status})."
        return ServingError(refused + login + proxy.around)
    if isinstance(error, ConnectionRefusedError):
        return ServingError(f"Cannot connect to {address}: nobody listens at {proxy}.{proxy.around}")
    return ServingError(f"Cannot connect to {address} through {proxy}: {said}.{proxy.around}")


def way_out(address: str, error: Exception) -> str:
    """Return what to do about an error that came of connecting to `address`, "" where nobody knows."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if "mismatch" in error.verify_message.lower():
            return " Connect by a name that its certificate holds, or make one that holds this name (subjectAltName)."
        return " Name the file of a certificate to trust, such as a self-signed one: certificate (drive.certificate)."
    if isinstance(error, ssl.SSLError):
        return " If it serves without encryption, its address begins with ws://."
    if isinstance(error, InvalidMessage) and address.startswith("ws://"):
        return (
            " If it serves with a certificate, its address begins with wss://, and one that is self-signed has to be "
            "trusted: certificate (drive.certificate)."
        )
    if isinstance(error, TimeoutError):
        return " Something listens there and does not answer: does it hang?"
    return ""


class RefusedError(ServingError):
    """The server refuses what this client sends: asking the same again is no use."""


class PolicyClient:
    """A blocking connection to one server; use it as a context manager.

    host: name, or a whole ws:// or wss:// address; port: 8000 for None, of a whole address its own; timeout: seconds to
    wait for an answer; patience: seconds to keep trying while the server starts; session: name of this robot's history;
    certificate: PEM file of what a wss:// address is checked against (None: the authorities that the system trusts); a
    name is that of a wss:// address then. A proxy that the environment names is used, with a
    RobopolicyWarning where it can read along, but never to reach this machine. A connection that was lost between two
    requests is opened again once, and the server's history then begins anew; a server that describes another policy
    than before (`DESCRIBED`) is refused. Pictures that are larger than the policy reads are made smaller before they
    are sent, as the server would. A server of ours seals its answers: one that is damaged, or belongs to another
    request, is not returned, and the connection is given up. Raises ConfigError on an address that contradicts itself,
    ServingError: nobody listens, refused observation, no answer in time, one that cannot be trusted; RefusedError,
    which is one: wrong API key, another policy. thrown_away: answers that came without being asked for, and were not
    used.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int | None = None,
        api_key: str | None = None,
        *,
        timeout: float = 30.0,
        patience: float = 5.0,
        session: str | None = None,
        certificate: Path | str | None = None,
    ):
        self.address = whole_address(host, port, encrypted=certificate is not None)
        self.timeout = timeout
        self.patience = patience
        self.session = session
        require_key(api_key or "")
        self._headers = {"Authorization": f"Api-Key {api_key}"} if api_key else {}
        self._tls = trusting(certificate) if self.address.startswith("wss://") else None
        self._connection: ClientConnection | None = None
        self._stack = ExitStack()
        self._numbers = itertools.count(secrets.randbits(48))
        self._sealed = self._known = False
        self._cameras: dict[str, tuple[int, ...]] = {}
        self._last = b""
        self._took = 0.0
        self.thrown_away = 0
        self.metadata: dict[str, Any] = {}
        self.trouble: ServingError | None = None  # why it cannot connect, while it goes on trying
        proxy = proxy_for(self.address)
        if proxy is not None and self._tls is None:
            key = " and your API key" if api_key else ""
            warnings.warn(
                f"{self.address} is reached through {proxy}, which can read everything, what cameras show{key}: a "
                f"wss:// address is encrypted.{proxy.around}",
                RobopolicyWarning,
                stacklevel=2,
            )
        self._open()

    def infer(self, observation: Mapping[str, Any]) -> dict[str, Any]:
        """Send one observation and return the answer; "actions" is [C, A] float32, read-only."""
        return self._exchange(dict(observation))

    def reset(self) -> None:
        """Begin an episode: the server forgets this session's history."""
        self._exchange({RESET: True})

    def close(self) -> None:
        """Close the connection; the next `infer` would open it again."""
        self._connection = None
        self._stack.close()

    def __enter__(self) -> "PolicyClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        if self.session is not None:
            message[SESSION] = self.session
        asked = time.monotonic()
        connection, data = self._sent(message)
        answer = self._received(connection, "an answer", message)
        if not self._sealed:
            answer = self._not_the_last(connection, answer)
        self._took = time.monotonic() - asked
        found = self._decoded(answer)
        if self._sealed and found.pop(REQUEST, None) != fingerprint(data):
            self.close()
            raise ServingError(f"{self.address} answered another request than the one it was sent; it is not used.")
        return found

    def _sent(self, message: dict[str, Any]) -> tuple[ClientConnection, bytes]:
        """Send a message, over a new connection where the old one was lost; return the connection and what was sent."""
        lost: ConnectionClosed | None = None
        for _ in range(2):
            connection = self._connection if self._connection is not None else self._open()
            fitted = _fitted(message, self._cameras)
            data = pack(fitted | {REQUEST: next(self._numbers)} if self._sealed else fitted)
            most = self.metadata.get("message_bytes")
            if self._sealed and isinstance(most, int) and len(data) > most:
                raise RefusedError(
                    f"The message has {len(data)} bytes, and {self.address} reads {most} at most.{_largest(fitted)}"
                )
            try:
                self._throw_away(connection)
                connection.send(data)
                return connection, data
            except ConnectionClosed as error:
                lost = error
                self.close()
        raise ServingError(f"{self.address} closes every connection before it is asked ({lost}).") from lost

    def _throw_away(self, connection: ClientConnection) -> None:
        """Take what lies there before a request is sent: it answers none, and would shift all later answers by one."""
        with suppress(TimeoutError):
            for _ in range(UNASKED):
                connection.recv(timeout=0)
                self.thrown_away += 1
            self.close()
            raise ServingError(f"{self.address} sends more than {UNASKED} messages that nobody asked for.")

    def _not_the_last(self, connection: ClientConnection, answer: bytes) -> bytes:
        """Return an answer that is not the last one come twice, which would be one and the same to the last byte.

        A policy may answer the same again, without timings: then nothing comes after it, for twice as long as it takes.
        """
        for _ in range(UNASKED):
            if answer != self._last:
                break
            try:
                later = connection.recv(timeout=max(AGAIN, 2 * self._took))
            except (TimeoutError, ConnectionClosed):
                break
            if isinstance(later, str):
                raise self._refused(connection, later)
            self.thrown_away += 1
            answer = later
        self._last = answer
        return answer

    def _received(self, connection: ClientConnection, what: str, asked: Mapping[str, Any]) -> bytes:
        """Return the next message; asked: the request that it answers."""
        try:
            message = connection.recv(timeout=self.timeout)
        except TimeoutError as error:
            self.close()
            raise ServingError(
                f"{self.address} sent no {what.split()[-1]} within {self.timeout:g} s: is its machine overloaded? "
                f"Raise the client's timeout if the policy is that slow."
            ) from error
        except ConnectionClosed as error:
            self.close()
            large = error.rcvd is not None and error.rcvd.code == CloseCode.MESSAGE_TOO_BIG
            raise (RefusedError if large else ServingError)(
                f"{self.address} closed the connection before {what} came ({error}).{_largest(asked) if large else ''}"
            ) from error
        if isinstance(message, str):
            raise self._refused(connection, message)
        return message

    def _refused(self, connection: ClientConnection, text: str) -> ServingError:
        busy = self._close_code(connection) == BUSY
        self.close()
        return (ServingError if busy else RefusedError)(f"{self.address} refused the request: {text}")

    def _decoded(self, message: bytes) -> dict[str, Any]:
        try:
            return self._read(message)
        except SpecError as error:
            self.close()
            raise ServingError(f"What {self.address} sent cannot be read: {error}") from error

    def _read(self, message: bytes) -> dict[str, Any]:
        """Decode what a server sent; one of ours seals all of it, beginning with what it says of itself."""
        if self._sealed:
            return unsealed(message)
        found = unpack(message)
        if not isinstance(found, dict):
            raise SpecError("it is no mapping.")
        if CHECK in found or found.get("server") == "robopolicy":
            found, self._sealed = unsealed(message), True
        return found

    @staticmethod
    def _close_code(connection: ClientConnection) -> int | None:
        """Return the code with which the server closes the connection, None where it does not."""
        try:
            connection.recv(timeout=1.0)
        except (ConnectionClosed, TimeoutError):
            return connection.close_code
        return None

    def _open(self) -> ClientConnection:
        """Connect, and learn what is served. Raises RefusedError where that is another policy than before."""
        self.close()
        self._sealed, self._last = False, b""
        self._connection = connection = self._connected()
        said = self._decoded(self._received(connection, "its metadata", {}))
        changed = [key for key in DESCRIBED if pack({key: said.get(key)}) != pack({key: self.metadata.get(key)})]
        if self._known and changed:
            self.close()
            changes = ", ".join(_change(key, self.metadata.get(key), said.get(key)) for key in changed)
            raise RefusedError(
                f"{self.address} serves another policy since the connection was lost (other {changes}): it is not "
                "obeyed. Connect anew to be driven by that one."
            )
        self.metadata, self._known = said, True
        self._cameras = camera_shapes(said) if self._sealed else {}
        return connection

    def _connected(self) -> ClientConnection:
        deadline = time.monotonic() + self.patience
        while True:
            proxy = proxy_for(self.address)
            try:
                opening = connect(
                    self.address,
                    compression=None,
                    ssl=self._tls,
                    max_size=MAXIMUM_ANSWER,
                    additional_headers=self._headers,
                    proxy=None if proxy is None else proxy.url,
                    open_timeout=self.timeout,
                    close_timeout=min(1.0, self.timeout),
                )
                connection, self.trouble = self._stack.enter_context(opening), None
                return connection
            except InvalidStatus as error:
                raise self._turned_away(error, proxy) from error
            # Of the last two: names that are none, and a SOCKS proxy without its package.
            except (OSError, WebSocketException, ValueError, ImportError) as error:
                self.trouble = unreachable(self.address, proxy, error)
                if not _may_be_starting(error) or time.monotonic() > deadline:
                    raise self.trouble from error
                time.sleep(0.1)

    def _turned_away(self, error: InvalidStatus, proxy: Proxy | None) -> ServingError:
        """Return what an answer to a handshake means that is none of a websocket's."""
        status, headers = error.response.status_code, error.response.headers
        if status == 401:
            wants = "another API key than the one given" if self._headers else "an API key, and none was given"
            return RefusedError(f"{self.address} wants {wants} ({KEYS}).")
        if status == 429:
            seconds = headers.get("Retry-After", "10")
            return ServingError(
                f"{self.address} wants another API key than the one given, and too many wrong ones came from this "
                f"machine: it looks at others in {seconds} s, and at the right one at once ({KEYS})."
            )
        if proxy is not None:
            return ServingError(
                f"What answers for {self.address} at {proxy} is no policy server ({error}).{proxy.around}"
            )
        return ServingError(f"{self.address} is no policy server ({error}).")


def _may_be_starting(error: Exception) -> bool:
    """Whether a server that is about to listen would be the end of this error."""
    if isinstance(error, InvalidProxyStatus):
        return error.response.status_code in (502, 503, 504)  # what proxies say of servers that do not listen
    return isinstance(error, ConnectionRefusedError | ConnectionResetError)


def _fitted(message: Mapping[Any, Any], cameras: Mapping[str, tuple[int, ...]], prefix: str = "") -> dict[Any, Any]:
    """Return a message whose pictures are no larger than the policy reads them; cameras: name in it -> that shape."""
    fitted = {}
    for key, value in message.items():
        name = prefix + str(key).replace(".", "/")
        if isinstance(value, Mapping):
            fitted[key] = _fitted(value, cameras, name + "/")
        else:
            known = name in cameras and isinstance(value, np.ndarray)
            fitted[key] = smaller(value, cameras[name]) if known else value
    return fitted


def _largest(message: Mapping[Any, Any]) -> str:
    """Return which field of a message is the largest, and what to do about it; "" where none is an array."""
    waiting, arrays = [("", message)], dict[str, np.ndarray]()
    while waiting:
        prefix, part = waiting.pop()
        for key, value in part.items():
            if isinstance(value, Mapping):
                waiting.append((f"{prefix}{key}/", value))
            elif isinstance(value, np.ndarray):
                arrays[f"{prefix}{key}"] = value
    if not arrays:
        return ""
    name = max(arrays, key=lambda each: arrays[each].nbytes)
    largest = arrays[name]
    return f" '{name}' is its largest field, {list(largest.shape)} {largest.dtype}: make it smaller before sending."


def _change(key: str, before: Any, now: Any) -> str:
    """Return what has changed of a policy's description, with the values where they are short."""
    short = all(isinstance(value, int | float | str) for value in (before, now))
    return f"{key}, {str(before)[:40]} -> {str(now)[:40]}" if short else key


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
