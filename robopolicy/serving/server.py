"""Websocket server with openpi's protocol, so that any openpi client can drive a robot with robopolicy's policies.

GET /livez returns 200 while the policy can compute at all (otherwise restart the server), GET /readyz and /healthz
while it accepts requests (503 with the reason otherwise), GET /metrics Prometheus text, GET /policies the versions of
the policies, GET /reload[?policy=NAME] loads a checkpoint again. A websocket to /events receives what happens; one to
/policies/NAME is served by that policy, any other by the default one. With an API key every connection (and all but
the health) must send `Authorization: Api-Key KEY`. Without one the server listens on loopback only.
"""

import asyncio
import functools
import gc
import hmac
import itertools
import json
import logging
import os
import secrets
import signal
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

from websockets.asyncio.server import Server, ServerConnection
from websockets.asyncio.server import serve as listen
from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode
from websockets.http11 import Request, Response

from robopolicy.client.protocol import POLICIES, Limits, pack_with_checksum
from robopolicy.core.errors import NonFiniteError, RobopolicyError, ServingError, SpecError
from robopolicy.core.policy import Policy
from robopolicy.core.spec import Observation, PolicySpec
from robopolicy.inference.chunking import Plans
from robopolicy.serving.batching import BusyError, InferenceQueue
from robopolicy.serving.connections import ConnectionLimiter, LimitedConnection, address_of, is_loopback, server_tls
from robopolicy.serving.conversations import Conversation
from robopolicy.serving.session_recording import Recordings
from robopolicy.serving.sessions import Answer, RobotSession, Sessions
from robopolicy.serving.telemetry import Events, Log, Metrics, Traces, log_to_stderr
from robopolicy.serving.versions import LoadedPolicy, PolicyVersions, ServedPolicy, ServerSettings
from robopolicy.serving.warmup import warmed_up

ACCEPTED = 8
"""Maximum connections accepted in one turn of the event loop; a hundred handshakes at once would delay robots."""

SHORT_KEY = 16
"""Length in characters below which an API key can be guessed by trying a thousand per second for long enough."""

SHUTDOWN = 3.0
"""Maximum seconds that a stopping server waits for its clients and the forward pass in progress, in total."""

WATCH_SECONDS = 1.0
"""Seconds between two looks at the checkpoints on the disk."""


def serve(
    policy: Policy | LoadedPolicy,
    settings: ServerSettings,
    on_ready: Callable[[int], None] = lambda port: None,
    *,
    others: Mapping[str, LoadedPolicy] | None = None,
    load: Callable[[str], LoadedPolicy] | None = None,
    paths: Mapping[str, Path] | None = None,
) -> None:
    """Serve policies (see `PolicyServer`) until SIGINT or SIGTERM; SIGHUP loads their checkpoints again.

    on_ready: called with the port once clients can connect. A second signal ends the process at once. Raises
    ServingError when the port is in use, a certificate cannot be read, or the address would be reachable from the
    network without an API key.
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
        server = PolicyServer(policy, settings, others=others, load=load, paths=paths)
        loop.add_signal_handler(signal.SIGHUP, server.reload)
        watching = asyncio.create_task(_stop_with_parent(stop)) if settings.exit_with_parent else None
        await server.run(stop, on_ready)
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
    if not is_loopback(settings.host) and not settings.api_key:
        raise ServingError(
            f"Listening on {settings.host} lets anyone on the network control your robot. Set an API key with "
            "ROBOPOLICY_API_KEY=SECRET (or serve.api_key=SECRET), or listen on 127.0.0.1."
        )


class PolicyServer:
    """Serves policies to many clients; each connection has its own sessions, each version one inference thread.

    policy: the default one; others: by the name by which clients ask for them (path /policies/NAME); load: name ("" for
    the default one) -> the policy in its checkpoint now, for hot reloads; paths: name -> checkpoint.
    """

    def __init__(
        self,
        policy: Policy | LoadedPolicy,
        settings: ServerSettings,
        *,
        others: Mapping[str, LoadedPolicy] | None = None,
        load: Callable[[str], LoadedPolicy] | None = None,
        paths: Mapping[str, Path] | None = None,
    ):
        self.settings = settings
        self.metrics, self.events = Metrics(), Events()
        self.log = Log(self.events)
        self.traces = Traces() if settings.opentelemetry else None
        loaded = {"": policy if isinstance(policy, LoadedPolicy) else LoadedPolicy(policy), **(others or {})}
        paths, loaders = paths or {}, {} if load is None else {name: partial(load, name) for name in loaded}
        self.versions = {
            name: PolicyVersions(name, each, settings, self.metrics, self.log, loaders.get(name), paths.get(name))
            for name, each in loaded.items()
        }
        limits = [settings.limits or Limits.of(each.policy.spec) for each in loaded.values()]
        message = max(each.message for each in limits)
        if settings.record is not None:  # requests then contain the steps since the last one, too
            message += max(_reported_bytes(each.policy.spec) for each in loaded.values())
        self.limits = replace(limits[0], message=message)
        self.door = ConnectionLimiter(self.limits)
        self.sessions = {
            name: Sessions(
                each.policy.spec, replace(limit, message=message), settings.rename, settings.session_expiry, name
            )
            for (name, each), limit in zip(loaded.items(), limits, strict=True)
        }
        described = {name: self.metadata(name) for name in loaded}
        self.recordings = Recordings(settings.record, 1e9 * settings.record_limit, described, self.log)
        self._numbers, self._reloading = itertools.count(1), set[asyncio.Task[str]]()

    @property
    def queue(self) -> InferenceQueue:
        """Queue of the default policy's current version."""
        return self.versions[""].current.queue

    @property
    def plans(self) -> Plans | None:
        """What continues remaining actions for the default policy, None for independent chunks."""
        return self.versions[""].current.plans

    async def run(self, stop: asyncio.Event, on_ready: Callable[[int], None] = lambda port: None) -> None:
        """Serve until `stop` is set, then close all connections cleanly, within SHUTDOWN seconds."""
        watching: list[asyncio.Task[None]] = []
        try:
            for each in self.versions.values():
                each.current.queue.start()
                if not await warmed_up(each.current.queue, self.log, stop):
                    return
                if self.settings.reload_on_change and each.path is not None:
                    watching.append(asyncio.create_task(each.watch(WATCH_SECONDS)))
            server = await self._listen()
            port = next(iter(server.sockets)).getsockname()[1]
            self.log("listening", host=self.settings.host, port=port)
            if 0 < len(self.settings.api_key) < SHORT_KEY:  # wrong ones are answered, not held back
                self.log("short key", logging.WARNING, text=f"Use {SHORT_KEY} random characters: openssl rand -hex 16")
            on_ready(port)
            await stop.wait()
            self.log("stopping")
            server.close()
            with suppress(TimeoutError):
                await asyncio.wait_for(server.wait_closed(), SHUTDOWN / 2)
        finally:
            for task in watching:
                task.cancel()
            self.recordings.close()
            if self.traces is not None:
                await asyncio.to_thread(self.traces.close)
            await asyncio.gather(*(each.stop(SHUTDOWN / 2) for each in self.versions.values()))

    def reload(self, name: str | None = None) -> None:
        """Load the checkpoint of a policy again, None for all, and serve it if it is sound; returns at once."""
        for each in [self.versions[name]] if name is not None else self.versions.values():
            task = asyncio.ensure_future(each.reload())
            self._reloading.add(task)
            task.add_done_callback(self._reloading.discard)

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
                ssl=server_tls(settings.certificate, settings.certificate_key),
                create_connection=cast(Any, functools.partial(LimitedConnection, door=self.door)),
            )
        except OSError as error:
            raise ServingError(
                f"Cannot listen on {settings.host}:{settings.port} ({error.strerror or error}). Is another server "
                f"running there? Stop it or choose another port with serve.port=PORT."
            ) from error

    def _process_request(self, connection: ServerConnection, request: Request) -> Response | None:
        url = urlsplit(request.path)
        if url.path in ("/livez", "/readyz", "/healthz"):
            trouble = self._trouble() if url.path == "/livez" else self._unready()
            status = HTTPStatus.OK if trouble is None else HTTPStatus.SERVICE_UNAVAILABLE
            return connection.respond(status, f"{trouble or 'OK'}\n")
        refusal = self._key_refused(connection, request) if self.settings.api_key else None
        if refusal is not None:
            self.metrics.refuse("key")
            return refusal
        if url.path == "/metrics":
            return connection.respond(HTTPStatus.OK, self._metrics())
        if url.path == "/policies":
            described = [each.describe() for each in self.versions.values()]
            return connection.respond(HTTPStatus.OK, json.dumps(described, indent=2) + "\n")
        name = parse_qs(url.query).get("policy", [""])[0] if url.path == "/reload" else policy_name(url.path)
        if name not in self.versions:
            names = ", ".join(each for each in self.versions if each) or "none has a name"
            return connection.respond(HTTPStatus.NOT_FOUND, f"There is no policy '{name[:100]}' here: {names}.\n")
        if url.path == "/reload":
            if not self.settings.api_key:
                text = "Reloading over the network needs a key: set serve.api_key, or send SIGHUP to the process.\n"
                return connection.respond(HTTPStatus.FORBIDDEN, text)
            self.reload(name)
            return connection.respond(HTTPStatus.ACCEPTED, "Loading; GET /policies says what became of it.\n")
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

    def _trouble(self) -> str | None:
        """Return the reason why a policy cannot answer, None if all can."""
        return next((each for served in self.versions.values() if (each := served.current.queue.trouble)), None)

    def _unready(self) -> str | None:
        """Return the reason why the next request would be refused, None if it would be accepted."""
        queues = [each.current.queue for each in self.versions.values()]
        if any(len(queue) >= self.settings.max_queue_size for queue in queues) and self._trouble() is None:
            return "Busy: the maximum number of requests is waiting."
        return self._trouble()

    def _metrics(self) -> str:
        queues = [each.current.queue for each in self.versions.values()]
        return self.metrics.text(
            sessions=sum(map(len, self.sessions.values())),
            requests_waiting=sum(map(len, queues)),
            inference_pass_seconds=max(queue.pass_age for queue in queues),
            ready=float(self._unready() is None),
            **self.recordings.figures(),
        )

    async def _handle(self, connection: ServerConnection) -> None:
        path = urlsplit(connection.request.path if connection.request else "").path
        if path == "/events":
            await self._show_events(connection)
            return
        number, address = next(self._numbers), address_of(connection.transport)
        name = policy_name(path)
        conversation = Conversation(self, self.versions[name], connection, (address, number))
        self.metrics.connections.inc()
        self.log("connected", connection=number, address=address)
        try:
            await connection.send(pack_with_checksum(self.metadata(name)))
            await conversation.hold()
        except ConnectionClosed as closed:  # the client went away; its sessions go with this call
            if closed.sent is not None and closed.sent.code == CloseCode.MESSAGE_TOO_BIG:
                self.metrics.refuse("observation")
                self.log("refused", logging.WARNING, connection=number, reason="observation", text=closed.sent.reason)
        except Exception as error:  # told to this client, as the protocol wants; the others go on
            await self._refuse(connection, number, error)
        finally:
            for session in self.sessions[name].drop(number):
                self.end_episode(session)
            self.metrics.connections.dec()
            if conversation.large:  # errors, here and in websockets, keep its last message in a circle
                asyncio.get_running_loop().call_later(1.0, gc.collect)
            self.log("disconnected", connection=number, address=address, requests=conversation.requests)

    async def _show_events(self, connection: ServerConnection) -> None:
        """Send the present state, then every event, one JSON object a message, until the reader leaves."""
        reader, leaving = self.events.open(), asyncio.ensure_future(connection.wait_closed())
        try:
            sessions = [each.state() for sessions in self.sessions.values() for each in sessions.all()]
            policies = [each.describe() for each in self.versions.values()]
            await connection.send(json.dumps({"event": "state", "sessions": sessions, "policies": policies}))
            while not leaving.done():
                event = asyncio.ensure_future(reader.get())
                await asyncio.wait({event, leaving}, return_when=asyncio.FIRST_COMPLETED)
                if event.done():
                    await connection.send(json.dumps(event.result(), default=str))
                else:
                    event.cancel()
        except ConnectionClosed:
            pass
        finally:
            leaving.cancel()
            self.events.close(reader)

    def note(
        self, session: RobotSession, served: ServedPolicy, observation: Observation, answer: Answer, seconds: float
    ) -> None:
        """Record an answer and hand it to the readers of events."""
        session.answered(served.label, answer, seconds)
        if self.traces is not None:
            alarms = () if answer.failure is None else answer.failure.alarms
            told = {"session": session.name, "policy": served.label, "inference_seconds": answer.seconds}
            self.traces.answered(seconds, **told, alarms=alarms)
        if self.recordings.active:
            self.recordings.decided(session, observation, answer)
        if self.events:
            self.events.add("answer", session.state())

    def record_executed(self, session: RobotSession, step: Mapping[str, Any]) -> None:
        """Record a control step that a robot reports."""
        if self.recordings.active:
            self.recordings.executed(session, step)

    def end_episode(self, session: RobotSession) -> None:
        """End the recording of a session's episode."""
        if self.recordings.active:
            self.recordings.end(session)

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
        self.metrics.refuse(reason)
        self.log("refused", logging.WARNING, connection=number, reason=reason, text=text[:500])
        with suppress(ConnectionClosed):
            await connection.send(text[:4000])
            await connection.close(code, f"{kind}; see the previous text message")

    def metadata(self, name: str = "") -> dict[str, Any]:
        """Metadata sent to a connecting client: fields, history, chunk, length and chunking of predictions, rate,
        instructions, accepted names, image format and maximum size, the training world (None if unknown), the range of
        each vector in the training data, the policy's name and version, and whether executed steps are recorded.
        """
        served = self.versions[name].current
        return {
            "server": "robopolicy",
            **served.metadata(self.settings),
            "rename": dict(self.settings.rename),
            "images": {"color": "rgb", "dtype": "uint8", "layout": "hwc", "pixels": self.limits.image // 3},
            "message_bytes": self.limits.message,
            "known": {
                key: {"low": low.tolist(), "high": high.tolist()} for key, (low, high) in served.ranges.known.items()
            },
            "policy": served.label,
            "records": self.settings.record is not None,
        }


def policy_name(path: str) -> str:
    """Return the name of the policy that a connection to this path asks for, "" for the default one."""
    return path.removeprefix(POLICIES) if path.startswith(POLICIES) else ""


def _reported_bytes(spec: PolicySpec) -> int:
    """Return the bytes that the steps of two chunks may have, images at the policy's size."""
    sizes = [field.size * (1 if field.dtype == "uint8" else 8) for field in spec.observation.values()]
    return 2 * spec.prediction * sum(sizes)


def _trace(error: Exception) -> list[str]:
    return "".join(traceback.format_exception(error)).splitlines()
