"""Client for policy servers with openpi's protocol; needs numpy, msgpack and websockets, but not torch.

Connection details of a server: its address, a proxy, its certificate, and error messages. Proxies are read from the
environment in the order of the websockets library: ws_proxy or wss_proxy, socks_proxy, https_proxy, and for ws:// also
http_proxy, except for hosts in no_proxy. Connections to this machine never use one.
"""

from __future__ import annotations

import inspect
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
from websockets import exceptions
from websockets.exceptions import ConnectionClosed, InvalidMessage, InvalidStatus, WebSocketException
from websockets.frames import CloseCode
from websockets.sync.client import ClientConnection, connect

from .errors import ConfigError, RobopolicyWarning, ServingError, SpecError
from .images import downscale
from .policy_description import camera_shapes
from .protocol import CHECK, EXECUTED, REQUEST, RESET, SESSION, checksum, pack, unpack, unpack_with_checksum
from .settings import ServerAddress, require_key

InvalidProxy: Any = getattr(exceptions, "InvalidProxy", ())
InvalidProxyStatus: Any = getattr(exceptions, "InvalidProxyStatus", ())
USES_PROXIES = "proxy" in inspect.signature(connect).parameters
"""Whether this version of websockets does: since 15, for Python 3.9 and newer."""

MAXIMUM_ANSWER = 64 * 2**20
"""Maximum bytes of an answer."""

BUSY = 1013
"""Close code of an overloaded server."""

KEYS = "api_key; for robopolicy drive: drive.api_key, or the environment variable ROBOPOLICY_API_KEY"
"""Sources of a client's API key, for error messages."""

UNASKED = 1000
"""Maximum unsolicited messages before the connection is closed."""

AGAIN = 0.05
"""Minimum seconds to wait for another message after an answer that duplicates the last one."""

DESCRIBED = ("observation", "action", "history", "chunk", "prediction", "chunking", "fps", "instructions", "world")
"""Metadata keys of the policy that must be unchanged after a reconnection."""
PORT = 8000
"""Default port of a server."""
SCHEMES = ("ws", "wss")
STARTING = 5.0
"""Seconds that a server may take to start, if the robot's patience allows it: the connection error then comes before
the robot gives up.
"""
SHORTEST = 1.0
"""Minimum seconds that a connection waits for an answer; a driver with less patience gives up earlier."""


def server_url(host: str, port: int | None, encrypted: bool) -> str:
    """Return the ws:// or wss:// URL of a server.

    host: a host name or a full URL; port: None for the port in the URL, or PORT for a host name; encrypted: whether a
    host name uses wss://. Raises ConfigError when URL and port disagree, when the URL has another scheme, and when it
    is ws:// although encryption is required.
    """
    name = f"[{host}]" if host.count(":") > 1 and "://" not in host and "[" not in host else host  # IPv6
    url = host if "://" in host else f"{'wss' if encrypted else 'ws'}://{name}"
    try:
        parts = urlsplit(url)
        url_port = parts.port
    except ValueError as error:
        raise ConfigError(f"{host} is not a server address: {error}.") from error
    if any(each.isspace() or not each.isprintable() for each in host):
        raise ConfigError(f"{host!r} is not a server address: it contains a space or a line break.")
    if parts.scheme not in SCHEMES:
        raise ConfigError(f"{host} is not a policy server address: addresses start with ws:// or wss://.")
    if encrypted and parts.scheme == "ws":
        raise ConfigError(f"A certificate applies only to a wss:// address, and {host} is not one.")
    if port is not None and not 0 < port < 65536:
        raise ConfigError(f"port={port} must be from 1 to 65535.")
    if url_port is not None and port not in (None, url_port):
        raise ConfigError(f"{host} contains port {url_port}, but port={port}: set only one of them.")
    if url_port is not None or (port is None and "://" in host):
        return url
    return parts._replace(netloc=f"{parts.netloc}:{PORT if port is None else port}").geturl()


def tls_context(certificate: Path | str | None) -> ssl.SSLContext:
    """Return the TLS context that verifies a server's certificate: with a PEM file, or with the system's certificate
    authorities for None. Raises ServingError when the file cannot be read.
    """
    try:
        return ssl.create_default_context(cafile=None if certificate is None else str(certificate))
    except (OSError, ssl.SSLError) as error:
        raise ServingError(f"The certificate {certificate} cannot be read: {error}") from error


def is_this_machine(host: str) -> bool:
    """Whether `host` is a name or an address of this machine: connections to it use no proxy."""
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
    """A proxy between client and server.

    url: its URL, including credentials if given; setting: name of the setting that defines it, such as https_proxy;
    host: the server's host.
    """

    url: str
    setting: str
    host: str

    def __str__(self) -> str:
        """Return the proxy's URL without credentials, and the setting that defines it."""
        scheme, _, host_part = self.url.partition("://")
        return f"the proxy {scheme}://{host_part.rpartition('@')[2]} from {self.setting}"

    @property
    def around(self) -> str:
        """Advice for bypassing the proxy."""
        return f" no_proxy={self.host} bypasses it."


def proxy_for(address: str) -> Proxy | None:
    """Return the environment's proxy for a ws:// or wss:// address, None for a direct connection."""
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
    """Return a ServingError that explains why connecting to `address` through `proxy` raised `error`, and a remedy."""
    reason = str(error).rstrip(".") or type(error).__name__
    if isinstance(error, ConnectionClosed):  # within the handshake, when the end comes before the answer is looked at
        reason = "did not receive a valid HTTP response"
    if proxy is None:
        if isinstance(error, (ConnectionRefusedError, ConnectionResetError)):
            return ServingError(f"No server listens at {address}. Start it first: robopolicy serve CHECKPOINT")
        return ServingError(f"Cannot connect to {address}: {reason}.{connection_hint(address, error)}")
    if isinstance(error, ImportError):
        text = f"{address} is reached through {proxy}, which needs a package: pip install python-socks."
        return ServingError(text + proxy.around)
    if isinstance(error, InvalidProxy):
        text = f"{proxy.setting} is not a proxy address ({reason}): write {proxy.setting}=http://HOST:PORT."
        return ServingError(f"Cannot connect to {address}: {text}{proxy.around}")
    if status := _proxy_status(error):
        login = " It requires a login: http://USER:PASSWORD@HOST:PORT." if status == 407 else ""
        prefix = f"{address} cannot be reached: {proxy} refuses the connection (HTTP {status})."
        return ServingError(prefix + login + proxy.around)
    if isinstance(error, ConnectionRefusedError):
        return ServingError(f"Cannot connect to {address}: no proxy listens at {proxy}.{proxy.around}")
    return ServingError(f"Cannot connect to {address} through {proxy}: {reason}.{proxy.around}")


def connection_hint(address: str, error: Exception) -> str:
    """Return the remedy for a connection error at `address`, "" if none is known."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if "mismatch" in error.verify_message.lower():
            return (
                " Connect with a host name that its certificate contains, or create a certificate with this name "
                "(subjectAltName)."
            )
        return " To trust a certificate, such as a self-signed one, set its file: certificate (drive.certificate)."
    if isinstance(error, ssl.SSLError):
        return " If the server does not use encryption, its address starts with ws://."
    if isinstance(error, InvalidMessage) and address.startswith("ws://"):
        return (
            " If the server uses a certificate, its address starts with wss://; to trust a self-signed certificate, "
            "set: certificate (drive.certificate)."
        )
    if isinstance(error, (TimeoutError, socket.timeout)):
        return " A process listens there but does not answer: does it hang?"
    return ""


class RefusedError(ServingError):
    """The server rejects this client's request: retrying is useless."""


class PolicyClient:
    """A blocking connection to one server; use it as a context manager.

    host: host name, or a full ws:// or wss:// URL; port: default 8000, or the URL's own; timeout: seconds to wait for
    an answer; patience: seconds to keep retrying while the server starts; session: name of this robot's history;
    certificate: PEM file to verify a wss:// server (None: the system's certificate authorities); with one, a host name
    means wss://. A proxy from the environment is used, with a RobopolicyWarning if it can read the traffic, but never
    to reach this machine. A connection lost between two requests is reopened once, and the server's history then starts
    empty. A server that then describes another policy (`DESCRIBED`) is rejected. Images larger than the policy's input
    are resized before sending, exactly as the server would. Robopolicy servers add a checksum to answers: a damaged
    answer, or one to another request, is discarded and the connection closed. Raises ConfigError on a contradictory
    address; ServingError when no server listens, an observation is refused, no answer arrives in time, or it fails
    verification; and its subclass RefusedError on a wrong API key or another policy. thrown_away: number of unsolicited
    answers that were discarded.
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
        self.address = server_url(host, port, encrypted=certificate is not None)
        self.timeout = timeout
        self.patience = patience
        self.session = session
        require_key(api_key or "")
        self._headers = {"Authorization": f"Api-Key {api_key}"} if api_key else {}
        self._tls = tls_context(certificate) if self.address.startswith("wss://") else None
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
                f"{self.address} is reached through {proxy}, which can read all data, including camera images{key}: "
                f"a wss:// address is encrypted.{proxy.around}",
                RobopolicyWarning,
                stacklevel=2,
            )
        self._open()

    def infer(self, observation: Mapping[str, Any]) -> dict[str, Any]:
        """Send one observation and return the answer; "actions" is [C, A] float32, read-only."""
        return self._exchange(dict(observation))

    def reset(self) -> None:
        """Start an episode: the server clears this session's history."""
        self._exchange({RESET: True})

    def close(self) -> None:
        """Close the connection; the next `infer` would open it again."""
        self._connection = None
        self._stack.close()

    def __enter__(self) -> PolicyClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        if self.session is not None:
            message[SESSION] = self.session
        start = time.monotonic()
        connection, data = self._sent(message)
        answer = self._received(connection, "an answer", message)
        if not self._sealed:
            answer = self._not_the_last(connection, answer)
        self._took = time.monotonic() - start
        content = self._decoded(answer)
        if self._sealed and content.pop(REQUEST, None) != checksum(data):
            self.close()
            raise ServingError(
                f"{self.address} answered a different request than the last one; the answer is not used."
            )
        return content

    def _sent(self, message: dict[str, Any]) -> tuple[ClientConnection, bytes]:
        """Send a message, over a new connection if the old one was lost; return the connection and the bytes sent."""
        connection_error: ConnectionClosed | None = None
        for _ in range(2):
            connection = self._connection if self._connection is not None else self._open()
            smaller_message = _fitted(message, self._cameras)
            data = pack({**smaller_message, REQUEST: next(self._numbers)} if self._sealed else smaller_message)
            byte_limit = self.metadata.get("message_bytes")
            if self._sealed and isinstance(byte_limit, int) and len(data) > byte_limit:
                raise RefusedError(
                    f"The message has {len(data)} bytes, but {self.address} accepts at most "
                    f"{byte_limit}.{_largest(smaller_message)}"
                )
            try:
                self._throw_away(connection)
                connection.send(data)
                return connection, data
            except ConnectionClosed as error:
                connection_error = error
                self.close()
        raise ServingError(
            f"{self.address} closes every connection before a request is sent ({connection_error})."
        ) from connection_error

    def _throw_away(self, connection: ClientConnection) -> None:
        """Discard messages received before a request is sent: they are unsolicited and would shift all later answers by
        one.
        """
        with suppress(TimeoutError):
            for _ in range(UNASKED):
                connection.recv(timeout=0)
                self.thrown_away += 1
            self.close()
            raise ServingError(f"{self.address} sends more than {UNASKED} messages without a request.")

    def _not_the_last(self, connection: ClientConnection, answer: bytes) -> bytes:
        """Return an answer that is not a byte-identical duplicate of the last one.

        A policy may legitimately repeat an answer, without timings: then no further message arrives within twice its
        usual time.
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
                f"{self.address} sent no {what.split()[-1]} within {self.timeout:g} s: is the server overloaded? If "
                "the policy is this slow, increase the client's timeout."
            ) from error
        except ConnectionClosed as error:
            self.close()
            large = error.rcvd is not None and error.rcvd.code == CloseCode.MESSAGE_TOO_BIG
            raise (RefusedError if large else ServingError)(
                f"{self.address} closed the connection before {what} arrived "
                f"({error}).{_largest(asked) if large else ''}"
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
            raise ServingError(f"The answer of {self.address} cannot be read: {error}") from error

    def _read(self, message: bytes) -> dict[str, Any]:
        """Decode a server message; robopolicy servers add a checksum to all messages, starting with the metadata."""
        if self._sealed:
            return unpack_with_checksum(message)
        content = unpack(message)
        if not isinstance(content, dict):
            raise SpecError("it is not a mapping.")
        if CHECK in content or content.get("server") == "robopolicy":
            content, self._sealed = unpack_with_checksum(message), True
        return content

    @staticmethod
    def _close_code(connection: ClientConnection) -> int | None:
        """Return the code with which the server closes the connection, None if it stays open."""
        try:
            connection.recv(timeout=1.0)
        except (ConnectionClosed, TimeoutError):
            return connection.protocol.close_code
        return None

    def _open(self) -> ClientConnection:
        """Connect and read the metadata. Raises RefusedError when the server now serves another policy than before."""
        self.close()
        self._sealed, self._last = False, b""
        self._connection = connection = self._connected()
        metadata = self._decoded(self._received(connection, "its metadata", {}))
        changed_keys = [
            key for key in DESCRIBED if pack({key: metadata.get(key)}) != pack({key: self.metadata.get(key)})
        ]
        if self._known and changed_keys:
            self.close()
            changes = ", ".join(_change(key, self.metadata.get(key), metadata.get(key)) for key in changed_keys)
            raise RefusedError(
                f"{self.address} serves another policy since the connection was lost (different {changes}): its "
                "actions are not executed. Start a new connection to use that policy."
            )
        self.metadata, self._known = metadata, True
        self._cameras = camera_shapes(metadata) if self._sealed else {}
        return connection

    def _connected(self) -> ClientConnection:
        deadline = time.monotonic() + self.patience
        while True:
            proxy = proxy_for(self.address)
            if proxy is not None and not USES_PROXIES:
                raise ServingError(
                    f"{self.address} is reached through {proxy}, which needs websockets 15 and Python 3.9 or "
                    f"newer.{proxy.around}"
                )
            route: dict[str, Any] = {"proxy": None if proxy is None else proxy.url} if USES_PROXIES else {}
            try:
                opening = connect(
                    self.address,
                    compression=None,
                    ssl=self._tls,
                    max_size=MAXIMUM_ANSWER,
                    additional_headers=self._headers,
                    open_timeout=self.timeout,
                    close_timeout=min(1.0, self.timeout),
                    **route,
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
        """Return the error for a handshake that was answered with an HTTP status instead of a websocket."""
        status, headers = error.response.status_code, error.response.headers
        if status == 401:
            wants = "another API key than the one given" if self._headers else "an API key, and none was given"
            return RefusedError(f"{self.address} requires {wants} ({KEYS}).")
        if status == 429:
            seconds = headers.get("Retry-After", "10")
            return ServingError(
                f"{self.address} requires another API key than the one given, and too many wrong keys came from this "
                f"machine: it accepts another try in {seconds} s, or the right key at once ({KEYS})."
            )
        if proxy is not None:
            return ServingError(
                f"The server that answers for {self.address} at {proxy} is not a policy server ({error}).{proxy.around}"
            )
        return ServingError(f"{self.address} is not a policy server ({error}).")


def _proxy_status(error: Any) -> int:
    """Return the HTTP status with which a proxy refused the connection, 0 for other errors."""
    return error.response.status_code if isinstance(error, InvalidProxyStatus) else 0


def _may_be_starting(error: Exception) -> bool:
    """Whether this error would disappear once the server has started."""
    if status := _proxy_status(error):
        return status in (502, 503, 504)  # what proxies say of servers that do not listen
    return isinstance(error, (ConnectionRefusedError, ConnectionResetError))


def _fitted(message: Mapping[Any, Any], cameras: Mapping[str, tuple[int, ...]], prefix: str = "") -> dict[Any, Any]:
    """Return a message with images resized to at most the policy's input; cameras: name in the message -> shape of the
    policy's input.
    """
    result = {}
    for key, value in message.items():
        name = prefix + str(key).replace(".", "/")
        if isinstance(value, Mapping):
            result[key] = _fitted(value, cameras, "" if key == EXECUTED else name + "/")
        else:
            is_camera = name in cameras and isinstance(value, np.ndarray)
            result[key] = downscale(value, cameras[name]) if is_camera else value
    return result


def _largest(message: Mapping[Any, Any]) -> str:
    """Return advice that names the largest field of a message; "" if it contains no arrays."""
    waiting: list[tuple[str, Mapping[Any, Any]]] = [("", message)]
    arrays: dict[str, np.ndarray] = {}
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
    """Describe the changes in a policy's description, with the values if they are short."""
    short = all(isinstance(value, (int, float, str)) for value in (before, now))
    return f"{key}, {str(before)[:40]} -> {str(now)[:40]}" if short else key


def connected(server: ServerAddress, patience: float) -> PolicyClient:
    """Return a connection to `server`; the API key defaults to the environment's ROBOPOLICY_API_KEY.

    patience: seconds without an answer after which a robot stops using its server, also used as the answer timeout.
    Raises as `PolicyClient` does.
    """
    return PolicyClient(
        server.host,
        server.port,
        api_key=server.api_key or os.environ.get("ROBOPOLICY_API_KEY") or None,
        timeout=max(patience, SHORTEST),
        patience=min(STARTING, patience / 2),
        certificate=server.certificate,
    )
