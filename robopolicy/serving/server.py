"""A websocket server that speaks openpi's protocol, so that any openpi client can drive a robot with our policies.

GET /healthz answers "OK", GET /metrics Prometheus text. With an API key every connection (and /metrics) must carry
`Authorization: Api-Key KEY`. Without one the server listens on loopback only.
"""

import asyncio
import hmac
import ipaddress
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import numpy as np
import torch
from websockets.asyncio.server import Server, ServerConnection
from websockets.asyncio.server import serve as listen
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from robopolicy.core.errors import NonFiniteError, RobopolicyError, ServingError, SpecError
from robopolicy.core.policy import Policy
from robopolicy.core.randomness import Generators
from robopolicy.core.spec import IMAGE_PREFIX, TASK, Observation
from robopolicy.serving.batching import InferenceQueue
from robopolicy.serving.inputs import Session
from robopolicy.serving.metrics import Metrics
from robopolicy.serving.protocol import MAXIMUM_MESSAGE, RESET, SESSION, pack, unpack

MAXIMUM_SESSIONS = 256
"""Most robots behind one connection."""


@dataclass(frozen=True)
class ServerSettings:
    """host, port (0: any free one); api_key: None for none; seed: of the policy's noise; deterministic: no exploration
    noise; maximum_batch: most requests answered in one forward pass; keepalive: seconds between pings, and how long a
    silent client is kept.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    seed: int = 0
    deterministic: bool = True
    maximum_batch: int = 16
    keepalive: float = 20.0


def serve(
    policy: Policy,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | None = None,
    seed: int = 0,
    on_ready: Callable[[int], None] = lambda port: None,
) -> None:
    """Serve `policy` until SIGINT or SIGTERM; `on_ready` is called with the port once clients can connect.

    Raises ServingError when the port is taken or the address would be open to the network without an API key.
    """
    settings = ServerSettings(host, port, api_key, seed)
    require_safe_address(settings)

    async def main() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        await PolicyServer(policy, settings).run(stop, on_ready)

    asyncio.run(main())


def require_safe_address(settings: ServerSettings) -> None:
    """Raise ServingError if the server would listen beyond this machine without an API key."""
    try:
        loopback = settings.host == "localhost" or ipaddress.ip_address(settings.host).is_loopback
    except ValueError:
        loopback = False
    if not loopback and not settings.api_key:
        raise ServingError(
            f"Listening on {settings.host} lets the whole network move your robot. Set an API key with "
            f"ROBOPOLICY_API_KEY=SECRET (or serve.api_key=SECRET), or listen on 127.0.0.1."
        )


class PolicyServer:
    """One policy, many clients; each connection has its own history, all share one inference thread."""

    def __init__(self, policy: Policy, settings: ServerSettings):
        self.policy, self.settings = policy, settings
        self.metrics = Metrics()
        generator = Generators(settings.seed, _device(policy))["serve"]
        self.queue = InferenceQueue(
            policy,
            generator,
            maximum_batch=settings.maximum_batch,
            deterministic=settings.deterministic,
            on_batch=self._count_batch,
        )

    async def run(self, stop: asyncio.Event, on_ready: Callable[[int], None] = lambda port: None) -> None:
        """Serve until `stop` is set, then close every connection in order."""
        self.queue.start()
        try:
            await self.queue.infer(blank_observation(self.policy))
            async with await self._listen() as server:
                on_ready(next(iter(server.sockets)).getsockname()[1])
                await stop.wait()
        finally:
            await self.queue.stop()

    async def _listen(self) -> Server:
        settings = self.settings
        try:
            return await listen(
                self._handle,
                settings.host,
                settings.port,
                compression=None,
                max_size=MAXIMUM_MESSAGE,
                process_request=self._process_request,
                ping_interval=settings.keepalive,
                ping_timeout=settings.keepalive,
                close_timeout=settings.keepalive,
            )
        except OSError as error:
            raise ServingError(
                f"Cannot listen on {settings.host}:{settings.port} ({error.strerror or error}). Is another server "
                f"running there? Stop it or choose another port with serve.port=PORT."
            ) from error

    def _process_request(self, connection: ServerConnection, request: Request) -> Response | None:
        if request.path == "/healthz":
            return connection.respond(HTTPStatus.OK, "OK\n")
        key = self.settings.api_key
        given = request.headers.get("Authorization", "")
        if key and not hmac.compare_digest(given.encode(), f"Api-Key {key}".encode()):
            self.metrics.errors += 1
            return connection.respond(HTTPStatus.UNAUTHORIZED, "Send the header 'Authorization: Api-Key KEY'.\n")
        if request.path == "/metrics":
            return connection.respond(HTTPStatus.OK, self.metrics.text())
        return None

    async def _handle(self, connection: ServerConnection) -> None:
        self.metrics.connections += 1
        sessions: dict[str, Session] = {}
        previous: float | None = None
        try:
            await connection.send(pack(self.metadata()))
            async for message in connection:
                started = time.perf_counter()
                reply = await self._reply(message, sessions, previous)
                await connection.send(pack(reply))
                previous = time.perf_counter() - started
                self.metrics.observe(previous)
        except ConnectionClosed:
            return  # the client went away; its histories go with this call
        except Exception as error:  # told to this client, as the protocol wants; the others go on
            self.metrics.errors += 1
            await _refuse(connection, error)
        finally:
            self.metrics.connections -= 1

    async def _reply(self, message: str | bytes, sessions: dict[str, Session], previous: float | None) -> dict:
        self.metrics.requests += 1
        if isinstance(message, str):
            raise SpecError("Send observations as binary msgpack messages, not text.")
        request = unpack(message)
        if not isinstance(request, dict):
            raise SpecError(f"An observation is a mapping from names to arrays, not {type(request).__name__}.")
        name = str(request.pop(SESSION, ""))
        if name not in sessions and len(sessions) >= MAXIMUM_SESSIONS:
            raise SpecError(f"One connection serves at most {MAXIMUM_SESSIONS} sessions: open another.")
        session = sessions.setdefault(name, Session(self.policy.spec))
        if request.pop(RESET, False):
            session.reset()
            if not request:
                return {RESET: True}
        arrived = time.perf_counter()
        answer = await self.queue.infer(session.observe(request))
        timing: dict[str, float] = {"infer_ms": 1e3 * (time.perf_counter() - arrived)}
        if previous is not None:
            timing["prev_total_ms"] = 1e3 * previous
        return {
            "actions": answer.actions,
            "policy_timing": {"infer_ms": 1e3 * answer.seconds},
            "server_timing": timing,
        }

    def metadata(self) -> dict[str, Any]:
        """Return what a client learns on connecting: fields, history, chunk, rate, instructions."""
        spec = self.policy.spec
        return {
            "server": "robopolicy",
            "observation": {key: field.to_json() for key, field in spec.observation.items()},
            "action": spec.action.to_json(),
            "history": spec.history,
            "chunk": spec.chunk,
            "fps": spec.fps,
            "instructions": list(spec.instructions),
        }

    def _count_batch(self) -> None:
        self.metrics.batches += 1


async def _refuse(connection: ServerConnection, error: Exception) -> None:
    """Send the error as text and close with 1011, as openpi's server does; a foreign error comes with its trace."""
    known = isinstance(error, RobopolicyError)
    text = str(error) if known else "".join(traceback.format_exception(error))
    kind = "wrong observation" if isinstance(error, SpecError | NonFiniteError) else "internal error"
    try:
        await connection.send(text)
        await connection.close(1011, f"{kind}; the text message before this says what")
    except ConnectionClosed:
        return  # nobody is left to tell


def blank_observation(policy: Policy) -> Observation:
    """Return a zero observation [1, H, ...] that fits the policy, to warm it up before the first client waits."""
    spec = policy.spec
    observation: Observation = {
        key: np.zeros((1, spec.history, *field.shape), np.uint8 if key.startswith(IMAGE_PREFIX) else np.float32)
        for key, field in spec.observation.items()
    }
    observation[TASK] = np.array([spec.instructions[0] if spec.instructions else ""])
    return observation


def _device(policy: Policy) -> torch.device:
    if isinstance(policy, torch.nn.Module):
        parameter = next(policy.parameters(), None)
        if parameter is not None:
            return parameter.device
    return torch.device("cpu")
