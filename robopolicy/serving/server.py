"""Websocket server with openpi's protocol, so that any openpi client can drive a robot with robopolicy's policies.

GET /livez returns 200 while the policy can compute at all (otherwise restart the server), GET /readyz and /healthz
while it accepts requests (503 with the reason otherwise), GET /metrics Prometheus text. With an API key every
connection (and /metrics) must send `Authorization: Api-Key KEY`. Without one the server listens on loopback only.
"""

import asyncio
import functools
import gc
import hmac
import ipaddress
import itertools
import logging
import os
import secrets
import signal
import ssl
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, cast

import numpy as np
import torch
from websockets.asyncio.server import Server, ServerConnection
from websockets.asyncio.server import serve as listen
from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode
from websockets.http11 import Request, Response

from robopolicy.client.protocol import REQUEST, RESET, SEED, Limits, checksum, pack, pack_with_checksum, unpack
from robopolicy.core.errors import NonFiniteError, RobopolicyError, ServingError, SpecError
from robopolicy.core.origin import origin_of
from robopolicy.core.policy import Policy, innermost
from robopolicy.core.randomness import Generators
from robopolicy.core.spec import IMAGE_PREFIX, TASK, Observation
from robopolicy.inference.chunking import Plans, planner_of
from robopolicy.inference.engine import CompilesForRows
from robopolicy.policies.training_ranges import known_ranges
from robopolicy.serving.batching import Answer, Asker, BusyError, InferenceQueue
from robopolicy.serving.configuration import ServerConfig
from robopolicy.serving.connections import ConnectionLimiter, LimitedConnection, address_of
from robopolicy.serving.sessions import RemainingActions, Sessions
from robopolicy.serving.telemetry import Log, Metrics, log_to_stderr

LARGE = 64 * 1024
"""Size in bytes above which a message is decoded off the event loop."""

ACCEPTED = 8
"""Maximum connections accepted in one turn of the event loop; a hundred handshakes at once would delay robots."""

SHORT_KEY = 16
"""Length in characters below which an API key can be guessed by trying a thousand per second for long enough."""

SHUTDOWN = 3.0
"""Maximum seconds that a stopping server waits for its clients and the forward pass in progress, in total."""


@dataclass(frozen=True)
class ServerSettings(ServerConfig):
    """Settings of a server, with seed: of the policy's noise; deterministic: no exploration noise; keepalive: seconds
    between pings, and maximum silence of a client; limits: None for those that follow from the policy; device: device
    of the policy, None for its weights' present device.
    """

    seed: int = 0
    deterministic: bool = True
    keepalive: float = 20.0
    limits: Limits | None = None
    device: torch.device | None = None


def serve(policy: Policy, settings: ServerSettings, on_ready: Callable[[int], None] = lambda port: None) -> None:
    """Serve `policy` until SIGINT or SIGTERM; `on_ready` is called with the port once clients can connect.

    A second signal ends the process at once. Raises ServingError when the port is in use, a certificate cannot be read,
    or the address would be reachable from the network without an API key.
    """
    require_safe_address(settings)
    log_to_stderr()
    gc.collect()
    gc.freeze()  # what is loaded stays: collections look at what clients leave alone, and hold nobody up

    async def main() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        def signalled() -> None:
            if stop.is_set():
                os._exit(1)
            stop.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, signalled)
        watching = asyncio.create_task(_stop_with_parent(stop)) if settings.exit_with_parent else None
        await PolicyServer(policy, settings).run(stop, on_ready)
        if watching is not None:
            watching.cancel()

    asyncio.run(main())


async def _stop_with_parent(stop: asyncio.Event) -> None:
    """Set `stop` when the parent of this process changes, which means that the original parent has ended."""
    parent = os.getppid()
    while os.getppid() == parent:
        await asyncio.sleep(0.5)
    stop.set()


def require_safe_address(settings: ServerSettings) -> None:
    """Raise ServingError if the server would listen beyond this machine without an API key."""
    try:
        loopback = settings.host == "localhost" or ipaddress.ip_address(settings.host).is_loopback
    except ValueError:
        loopback = False
    if not loopback and not settings.api_key:
        raise ServingError(
            f"Listening on {settings.host} lets anyone on the network control your robot. Set an API key with "
            "ROBOPOLICY_API_KEY=SECRET (or serve.api_key=SECRET), or listen on 127.0.0.1."
        )


class PolicyServer:
    """Serves one policy to many clients; each connection has its own sessions, all share one inference thread."""

    def __init__(self, policy: Policy, settings: ServerSettings):
        self.policy, self.settings = policy, settings
        self.limits = settings.limits or Limits.of(policy.spec)
        self.metrics = Metrics()
        self.log = Log()
        self.door = ConnectionLimiter(self.limits)
        self.device = settings.device or _device(policy)
        self.plans: Plans | None = planner_of(policy, settings.chunking, settings.chunking_options)
        self.sessions = Sessions(policy.spec, self.limits, settings.rename, settings.session_expiry)
        self.queue = InferenceQueue(
            policy,
            Generators(settings.seed, self.device)["serve"],
            max_batch_size=settings.max_batch_size,
            max_queue_size=settings.max_queue_size,
            deadline=settings.request_timeout,
            stall=settings.hang_timeout,
            deterministic=settings.deterministic,
            on_batch=self._count_batch,
            plans=self.plans,
        )
        self._numbers = itertools.count(1)

    async def run(self, stop: asyncio.Event, on_ready: Callable[[int], None] = lambda port: None) -> None:
        """Serve until `stop` is set, then close all connections cleanly, within SHUTDOWN seconds."""
        self.queue.start()
        try:
            if not await warmed_up(self.queue, self.log, stop):
                return
            server = await self._listen()
            port = next(iter(server.sockets)).getsockname()[1]
            self.log("listening", host=self.settings.host, port=port)
            if 0 < len(self.settings.api_key) < SHORT_KEY:  # wrong ones are answered, not held back
                self.log("short key", logging.WARNING, text=f"Use {SHORT_KEY} random characters: openssl rand -hex 16")
            on_ready(port)
            await stop.wait()
            self.log("stopping", connections=self.metrics.connections)
            server.close()
            with suppress(TimeoutError):
                await asyncio.wait_for(server.wait_closed(), SHUTDOWN / 2)
        finally:
            await self.queue.stop(SHUTDOWN / 2)

    async def _listen(self) -> Server:
        settings = self.settings
        try:
            return await listen(
                self._handle,
                settings.host,
                settings.port,
                compression=None,
                max_size=self.limits.message,
                max_queue=4,
                backlog=ACCEPTED,
                process_request=self._process_request,
                ping_interval=settings.keepalive,
                ping_timeout=settings.keepalive,
                close_timeout=min(settings.keepalive, SHUTDOWN / 4),
                open_timeout=10.0,
                origins=cast(Any, [None, *settings.origins]),
                ssl=_tls(settings),
                create_connection=cast(Any, functools.partial(LimitedConnection, door=self.door)),
            )
        except OSError as error:
            raise ServingError(
                f"Cannot listen on {settings.host}:{settings.port} ({error.strerror or error}). Is another server "
                f"running there? Stop it or choose another port with serve.port=PORT."
            ) from error

    def _process_request(self, connection: ServerConnection, request: Request) -> Response | None:
        if request.path in ("/livez", "/readyz", "/healthz"):
            trouble = self.queue.trouble if request.path == "/livez" else self._unready()
            status = HTTPStatus.OK if trouble is None else HTTPStatus.SERVICE_UNAVAILABLE
            return connection.respond(status, f"{trouble or 'OK'}\n")
        refusal = self._key_refused(connection, request) if self.settings.api_key else None
        if refusal is not None:
            self.metrics.refused["key"] += 1
            return refusal
        if request.path == "/metrics":
            return connection.respond(HTTPStatus.OK, self._metrics())
        return None

    def _key_refused(self, connection: ServerConnection, request: Request) -> Response | None:
        """Return the response to a request without the right key, None if the key is right: the right key is accepted
        even if others at its address (behind one router, on one machine) have tried wrong ones.
        """
        address = address_of(connection.transport)
        header = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape").strip()
        if hmac.compare_digest(header, f"Api-Key {self.settings.api_key}".encode()):
            return None
        if header not in (b"", b"Api-Key"):
            if self.door.locked_out(address):
                seconds = self.door.lockout_left(address)
                refusal = connection.respond(HTTPStatus.TOO_MANY_REQUESTS, f"Too many wrong keys: wait {seconds} s.\n")
                refusal.headers["Retry-After"] = str(seconds)
                return refusal
            self.door.wrong_key(address)
            self.log("wrong key", logging.WARNING, address=address)
        return connection.respond(HTTPStatus.UNAUTHORIZED, "Send the header 'Authorization: Api-Key KEY'.\n")

    def _unready(self) -> str | None:
        """Return the reason why the next request would be refused, None if it would be accepted."""
        if self.queue.trouble is None and len(self.queue) >= self.settings.max_queue_size:
            return "Busy: the maximum number of requests is waiting."
        return self.queue.trouble

    def _metrics(self) -> str:
        self.metrics.sessions = len(self.sessions)
        ready = float(self._unready() is None)
        return self.metrics.text(
            {"requests_waiting": len(self.queue), "inference_pass_seconds": self.queue.pass_age, "ready": ready}
        )

    async def _handle(self, connection: ServerConnection) -> None:
        number, address = next(self._numbers), address_of(connection.transport)
        conversation = _Conversation(self, connection, (address, number))
        self.metrics.connections += 1
        self.log("connected", connection=number, address=address)
        try:
            await connection.send(pack_with_checksum(self.metadata()))
            await conversation.hold()
        except ConnectionClosed as closed:  # the client went away; its sessions go with this call
            if closed.sent is not None and closed.sent.code == CloseCode.MESSAGE_TOO_BIG:
                self.metrics.refused["observation"] += 1
                self.log("refused", logging.WARNING, connection=number, reason="observation", text=closed.sent.reason)
        except Exception as error:  # told to this client, as the protocol wants; the others go on
            await self._refuse(connection, number, error)
        finally:
            self.sessions.drop(number)
            self.metrics.connections -= 1
            if conversation.large:  # errors, here and in websockets, keep its last message in a circle
                asyncio.get_running_loop().call_later(1.0, gc.collect)
            self.log("disconnected", connection=number, address=address, requests=conversation.requests)

    async def _refuse(self, connection: ServerConnection, number: int, error: Exception) -> None:
        """Send the error as text and close, as openpi's server does; the traceback of an unexpected error goes to the
        log.
        """
        code, kind = 1011, "wrong observation"
        if isinstance(error, BusyError):
            code, kind = 1013, "busy"
        elif not isinstance(error, SpecError | NonFiniteError):
            kind = "internal error"
        if isinstance(error, RobopolicyError):
            text = str(error)
        else:  # foreign code: even its text may raise
            mark = secrets.token_hex(4)
            text = f"The policy failed ({type(error).__name__}); see the server's log for error {mark}."
            self.log("error", logging.ERROR, connection=number, error=mark, trace=_trace(error))
        reason = {"wrong observation": "observation", "busy": "busy"}.get(kind, "policy")
        self.metrics.refused[reason] += 1
        self.log("refused", logging.WARNING, connection=number, reason=reason, text=text[:500])
        with suppress(ConnectionClosed):
            await connection.send(text[:4000])
            await connection.close(code, f"{kind}; see the previous text message")

    def metadata(self) -> dict[str, Any]:
        """Metadata sent to a connecting client: fields, history, chunk, length and chunking of predictions, rate,
        instructions, accepted names, image format and maximum size, the training world (None if unknown), and the range
        of each vector in the training data.
        """
        spec, origin = self.policy.spec, origin_of(self.policy)
        return {
            "server": "robopolicy",
            "observation": {key: field.to_json() for key, field in spec.observation.items()},
            "action": spec.action.to_json(),
            "history": spec.history,
            "chunk": spec.chunk,
            "prediction": spec.prediction,
            "chunking": "" if self.plans is None else self.settings.chunking,
            "fps": spec.fps,
            "instructions": list(spec.instructions),
            "rename": dict(self.settings.rename),
            "images": {"color": "rgb", "dtype": "uint8", "layout": "hwc", "pixels": self.limits.image // 3},
            "message_bytes": self.limits.message,
            "world": None if origin is None else origin.to_json(),
            "known": {
                key: {"low": low.tolist(), "high": high.tolist()}
                for key, (low, high) in known_ranges(self.policy).items()
            },
        }

    def _count_batch(self, size: int) -> None:
        self.metrics.batches += 1
        self.metrics.batch_size.observe(size)


class _Conversation:
    """One connection: requests are read in order, computed concurrently if possible, and answered in order."""

    def __init__(self, server: PolicyServer, connection: ServerConnection, asker: Asker):
        self.server = server
        self.connection = connection
        self.asker = asker
        self.requests, self.large = 0, False
        self._replies: asyncio.Queue[asyncio.Future[bytes]] = asyncio.Queue(server.limits.pipelined)
        self._previous: float | None = None

    async def hold(self) -> None:
        """Read and answer until the client disconnects. Raises the first error that concerns this client."""
        reader, writer = asyncio.create_task(self._read()), asyncio.create_task(self._write())
        try:
            await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
            if reader.done() and reader.result():
                await writer  # answers on their way, and last the error
            if writer.done():
                writer.result()
        finally:
            for task in (reader, writer, *self._under_way()):
                task.cancel()

    async def _read(self) -> bool:
        """Read messages until the client disconnects (False) or a message is invalid (True)."""
        async for message in self.connection:
            self.requests += 1
            self.server.metrics.requests += 1
            async with self.server.door.lane(self.asker[0]):
                await asyncio.sleep(0)  # others' messages come first where many of this address wait
                reply = await self._begin(message)
            await self._replies.put(reply)
            if reply.done() and reply.exception() is not None:
                return True
        return False

    async def _write(self) -> None:
        """Send the replies in the order of their requests. Raises the error of the first failed one."""
        while True:
            await self.connection.send(await (await self._replies.get()))

    def _under_way(self) -> list[asyncio.Future[bytes]]:
        return [self._replies.get_nowait() for _ in range(self._replies.qsize())]

    async def _begin(self, message: str | bytes) -> asyncio.Future[bytes]:
        """Process a message and return its pending reply; an invalid message gives a reply that raises the error."""
        arrived = time.perf_counter()
        try:
            if isinstance(message, str):
                raise SpecError("Send observations as binary msgpack messages, not text.")
            large = len(message) > LARGE
            self.large |= large
            request = await asyncio.to_thread(self._unpacked, message) if large else self._unpacked(message)
            session = self.server.sessions.take(self.asker[1], request, self.asker[0])
            request_id = request.pop(REQUEST, None)
            if SEED in request:
                session.seed(request.pop(SEED), self.server.device)
            if _said(request.pop(RESET, False)):
                session.reset()
                if not request:
                    return _settled(_packed({RESET: True}, request_id))
            remaining = session.pop_remaining(request, self.server.plans is not None)
            observation = await asyncio.to_thread(session.observe, request) if large else session.observe(request)
        except RobopolicyError as error:  # its trace and its cause hold the message until the collector comes by
            error.__cause__ = error.__context__ = None
            return _settled(error.with_traceback(None))
        except Exception as error:
            return _settled(error)
        return asyncio.create_task(self._answer(observation, remaining, session.generator, arrived, request_id))

    def _unpacked(self, message: bytes) -> dict[Any, Any]:
        request = unpack(message, self.server.limits)
        if not isinstance(request, dict):
            raise SpecError(f"An observation must be a mapping from names to arrays, not {type(request).__name__}.")
        request = {key.decode("utf-8", "replace") if isinstance(key, bytes) else key: request[key] for key in request}
        if REQUEST in request:
            request[REQUEST] = checksum(message)
        return request

    async def _answer(
        self,
        observation: Observation,
        left: RemainingActions | None,
        generator: torch.Generator | None,
        arrived: float,
        request: int | None,
    ) -> bytes:
        start = time.perf_counter()
        answer: Answer = await self.server.queue.infer(observation, generator, left, self.asker)
        timing: dict[str, float] = {"infer_ms": 1e3 * (time.perf_counter() - start)}
        if self._previous is not None:
            timing["prev_total_ms"] = 1e3 * self._previous
        self._previous = time.perf_counter() - arrived
        self.server.metrics.latency.observe(self._previous)
        reply = {
            "actions": answer.actions,
            "policy_timing": {"infer_ms": 1e3 * answer.seconds},
            "server_timing": timing,
        }
        return _packed(reply, request)


def _said(value: Any) -> bool:
    """Return the value of RESET in a request. Raises SpecError if it is neither true nor false."""
    if value is not None and (not isinstance(value, bool | int | np.bool_ | np.integer) or value not in (0, 1)):
        raise SpecError(f"'{RESET}' must be true or false, not {type(value).__name__}.")
    return bool(value)


def _packed(answer: dict[str, Any], request: int | None) -> bytes:
    """Encode an answer; if the client asked for it, with the fingerprint of its request and a checksum."""
    return pack(answer) if request is None else pack_with_checksum({**answer, REQUEST: request})


def _settled(outcome: bytes | Exception) -> asyncio.Future[bytes]:
    """Return a completed reply, or a reply that raises the given error."""
    reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    if isinstance(outcome, Exception):
        reply.set_exception(outcome)
    else:
        reply.set_result(outcome)
    return reply


def _tls(settings: ServerSettings) -> ssl.SSLContext | None:
    if settings.certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(settings.certificate, settings.certificate_key)
    except (OSError, ssl.SSLError) as error:
        label = f"{settings.certificate} (key {settings.certificate_key})"
        raise ServingError(f"The certificate {label} cannot be used: {error}") from error
    return context


def _trace(error: Exception) -> list[str]:
    return "".join(traceback.format_exception(error)).splitlines()


def _device(policy: Policy) -> torch.device:
    if isinstance(policy, torch.nn.Module):
        parameter = next(policy.parameters(), None)
        if parameter is not None:
            return parameter.device
    return torch.device("cpu")


async def warmed_up(queue: InferenceQueue, log: Log, stop: asyncio.Event) -> bool:
    """Run the policy once before requests arrive; return False if the server was stopped meanwhile.

    If the policy, or one that it wraps, compiles for specific batch sizes, all batch sizes that may occur are compiled,
    however long that takes. Predictions that continue remaining actions are computed too, if the server offers them.
    Raises the policy's errors, and BusyError when a policy call exceeds the request deadline.
    """
    deciding, stopping = asyncio.ensure_future(_decide(queue, log)), asyncio.ensure_future(stop.wait())
    await asyncio.wait([deciding, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if stop.is_set():
        deciding.cancel()
        return False
    await deciding
    return True


async def _decide(queue: InferenceQueue, log: Log) -> None:
    policy = queue.policy
    observation, deciding = blank_observation(policy), innermost(policy)
    if isinstance(deciding, CompilesForRows):
        # Who asks several times for each row asks so for more of these sizes, which are powers of one number: all of
        # them have been asked for once each of the first has.
        for rows in deciding.sizes(queue.max_batch_size):
            log("compiling", rows=rows)
            await queue.first(observation, rows)
    if queue.plans is not None:  # guided plans load code that nothing else does, for ten seconds on a busy machine
        spec = policy.spec
        for steps in (0, spec.prediction - spec.chunk):
            await queue.first(observation, 1, RemainingActions(np.zeros((steps, *spec.action.shape), np.float32), 0, 1))
    await queue.infer(observation)


def blank_observation(policy: Policy) -> Observation:
    """Return an all-zero observation [1, H, ...] that fits the policy."""
    spec = policy.spec
    observation: Observation = {
        key: np.zeros((1, spec.history, *field.shape), np.uint8 if key.startswith(IMAGE_PREFIX) else np.float32)
        for key, field in spec.observation.items()
    }
    observation[TASK] = np.array([spec.instructions[0] if spec.instructions else ""])
    return observation
