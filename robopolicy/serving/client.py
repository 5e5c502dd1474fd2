"""A client for policy servers that speak openpi's protocol; needs numpy, msgpack and websockets, but no torch."""

import itertools
import secrets
import ssl
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI
from websockets.sync.client import ClientConnection, connect

from robopolicy.core.errors import ServingError, SpecError
from robopolicy.serving.protocol import CHECK, REQUEST, RESET, SESSION, fingerprint, pack, unpack, unsealed

MAXIMUM_ANSWER = 64 * 2**20
"""Bytes of the longest answer that is read."""

BUSY = 1013
"""Close code of a server that has too much to do."""


class RefusedError(ServingError):
    """The server refuses what this client sends: asking the same again is no use."""


class PolicyClient:
    """A blocking connection to one server; use it as a context manager.

    host: name, or a whole ws:// or wss:// address; timeout: seconds to wait for an answer; patience: seconds to keep
    trying while the server starts; session: name of this robot's history; certificate: PEM file of what a wss://
    address is checked against (None: the authorities that the system trusts). A connection that was lost between two
    requests is opened again once, and the server's history then begins anew. A server of ours seals its answers: one
    that is damaged, or belongs to another request, is not returned, and the connection is given up. Raises
    ServingError: nobody listens, wrong API key, refused observation, no answer in time, one that cannot be trusted.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 8000,
        api_key: str | None = None,
        *,
        timeout: float = 30.0,
        patience: float = 5.0,
        session: str | None = None,
        certificate: Path | str | None = None,
    ):
        self.address = host if host.startswith(("ws://", "wss://")) else f"ws://{host}:{port}"
        self.timeout, self.patience, self.session = timeout, patience, session
        self._headers = {"Authorization": f"Api-Key {api_key}"} if api_key else {}
        self._tls = None
        if self.address.startswith("wss://"):
            self._tls = ssl.create_default_context(cafile=None if certificate is None else str(certificate))
        self._connection: ClientConnection | None = None
        self._stack = ExitStack()
        self._numbers = itertools.count(secrets.randbits(48))
        self._sealed = False
        self.metadata: dict[str, Any] = {}
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
        connection = self._connection if self._connection is not None else self._open()
        if self._sealed:
            message[REQUEST] = next(self._numbers)
        data = pack(message)
        try:
            connection.send(data)
        except ConnectionClosed:
            connection = self._open()
            connection.send(data)
        answer = self._receive(connection, "an answer")
        if self._sealed and answer.pop(REQUEST, None) != fingerprint(data):
            self.close()
            raise ServingError(f"{self.address} answered another request than the one it was sent; it is not used.")
        return answer

    def _receive(self, connection: ClientConnection, what: str) -> dict[str, Any]:
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
            raise ServingError(f"{self.address} closed the connection before {what} came ({error}).") from error
        if isinstance(message, str):
            busy = self._close_code(connection) == BUSY
            self.close()
            raise (ServingError if busy else RefusedError)(f"{self.address} refused the request: {message}")
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
        self.close()
        self._sealed = False
        deadline = time.monotonic() + self.patience
        while True:
            try:
                opening = connect(
                    self.address,
                    compression=None,
                    ssl=self._tls,
                    max_size=MAXIMUM_ANSWER,
                    additional_headers=self._headers,
                    open_timeout=self.timeout,
                    close_timeout=min(1.0, self.timeout),
                )
                self._connection = self._stack.enter_context(opening)
                break
            except InvalidStatus as error:
                if error.response.status_code == 401:
                    wants = "another API key than the one given" if self._headers else "an API key, and none was given"
                    raise ServingError(f"{self.address} wants {wants} (api_key).") from error
                raise ServingError(f"{self.address} is no policy server ({error}).") from error
            except (ConnectionRefusedError, ConnectionResetError) as error:
                if time.monotonic() > deadline:
                    raise ServingError(
                        f"Nobody listens at {self.address}. Start the server first: robopolicy serve CHECKPOINT"
                    ) from error
                time.sleep(0.1)
            except (OSError, InvalidHandshake, InvalidURI, ValueError) as error:  # the last: of the port
                raise ServingError(f"Cannot connect to {self.address}: {error}.") from error
        self.metadata = self._receive(self._connection, "its metadata")
        return self._connection
