"""A client for policy servers that speak openpi's protocol; needs numpy, msgpack and websockets, but no torch."""

import ssl
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from robopolicy.core.errors import ServingError
from robopolicy.serving.protocol import RESET, SESSION, pack, unpack

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
    requests is opened again once, and the server's history then begins anew. Raises ServingError: nobody listens, wrong
    API key, refused observation, no answer in time.
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
        data = pack(message)
        connection = self._connection if self._connection is not None else self._open()
        try:
            connection.send(data)
        except ConnectionClosed:
            connection = self._open()
            connection.send(data)
        return self._receive(connection, "an answer")

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
        return unpack(message)

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
                )
                self._connection = self._stack.enter_context(opening)
                break
            except InvalidStatus as error:
                if error.response.status_code == 401:
                    raise ServingError(f"{self.address} wants another API key than the one given.") from error
                raise ServingError(f"{self.address} is no policy server ({error}).") from error
            except (ConnectionRefusedError, ConnectionResetError) as error:
                if time.monotonic() > deadline:
                    raise ServingError(
                        f"Nobody listens at {self.address}. Start the server first: robopolicy serve CHECKPOINT"
                    ) from error
                time.sleep(0.1)
            except (OSError, InvalidHandshake) as error:
                raise ServingError(f"Cannot connect to {self.address}: {error}.") from error
        self.metadata = self._receive(self._connection, "its metadata")
        return self._connection
