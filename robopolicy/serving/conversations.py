"""One connection: its requests are read in order, computed concurrently if possible, and answered in order."""

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from websockets.asyncio.server import ServerConnection

from robopolicy.client.executed import ACTING
from robopolicy.client.protocol import (
    EXECUTED,
    FAILURE,
    POLICY,
    REQUEST,
    RESET,
    SEED,
    Limits,
    checksum,
    pack,
    pack_with_checksum,
    unpack,
)
from robopolicy.core.errors import RobopolicyError, SpecError
from robopolicy.core.spec import TASK, Observation
from robopolicy.serving.batching import Asker
from robopolicy.serving.connections import ConnectionLimiter
from robopolicy.serving.executed import pop_executed
from robopolicy.serving.sessions import Answer, RemainingActions, RobotSession, Sessions
from robopolicy.serving.telemetry import Log, Metrics
from robopolicy.serving.versions import PolicyVersions, ServedPolicy

LARGE = 64 * 1024
"""Size in bytes above which a message is decoded off the event loop."""


class Host(Protocol):
    """What a conversation needs of its server."""

    metrics: Metrics
    log: Log
    limits: Limits
    door: ConnectionLimiter

    @property
    def sessions(self) -> Mapping[str, Sessions]:
        """Sessions of every policy by its name."""
        ...

    def note(
        self, session: RobotSession, served: ServedPolicy, observation: Observation, answer: Answer, seconds: float
    ) -> None:
        """Record an answer and hand it to the readers of events."""
        ...

    def record_executed(self, session: RobotSession, step: Mapping[str, Any]) -> None:
        """Record a control step that a robot reports."""
        ...

    def end_episode(self, session: RobotSession) -> None:
        """End the recording of a session's episode."""
        ...


class Conversation:
    """One connection: requests are read in order, computed concurrently if possible, and answered in order."""

    def __init__(self, server: Host, versions: PolicyVersions, connection: ServerConnection, asker: Asker):
        self.server, self.versions = server, versions
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
            self.server.metrics.requests.inc()
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
            session = self.server.sessions[self.versions.name].take(self.asker[1], request, self.asker[0])
            served = self.versions.choose(session)
            request_id = request.pop(REQUEST, None)
            if SEED in request:
                session.seed(request.pop(SEED), served.device)
            if self._pop_executed(session, request) and not request:
                return _settled(_packed({EXECUTED: True}, request_id))
            if _said(request.pop(RESET, False)):
                self.server.end_episode(session)
                session.reset()
                if not request:
                    return _settled(_packed({RESET: True}, request_id))
            remaining = session.pop_remaining(request, served.plans is not None)
            observation = await asyncio.to_thread(session.observe, request) if large else session.observe(request)
        except RobopolicyError as error:  # its trace and its cause hold the message until the collector comes by
            error.__cause__ = error.__context__ = None
            return _settled(error.with_traceback(None))
        except Exception as error:
            return _settled(error)
        self._compare(session, served, observation)
        return asyncio.create_task(self._answer(session, observation, remaining, arrived, request_id))

    def _pop_executed(self, session: RobotSession, request: dict[Any, Any]) -> bool:
        """Take the control steps that a robot reports; return whether it does."""
        is_report = EXECUTED in request
        if is_report:
            session.reports = True
            for step in pop_executed(request, session.spec, self.server.limits):
                number = step.pop("step")
                if step["time"] <= session.reported_until:  # a repeated report
                    continue
                if number != session.last_step + 1:  # some were lost
                    self.server.end_episode(session)
                session.last_step, session.reported_until = number, step["time"]
                session.acting = {name: step[name] for name in ACTING}
                self.server.record_executed(session, step)
        return is_report

    def _compare(self, session: RobotSession, served: ServedPolicy, observation: Observation) -> None:
        """Hold the newest frames against the training data; log the elements that are far outside once a session."""
        session.outside = served.ranges.far({key: value[0, -1] for key, value in observation.items() if key != TASK})
        for element in session.outside:
            self.server.metrics.outside.labels(element).inc()
        new = session.outside.keys() - session.logged
        if new:
            session.logged |= new
            texts = [text for element, text in session.outside.items() if element in new]
            self.server.log("outside training data", logging.WARNING, session=session.name, elements=texts[:10])

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
        session: RobotSession,
        observation: Observation,
        left: RemainingActions | None,
        arrived: float,
        request: int | None,
    ) -> bytes:
        start = time.perf_counter()
        answer, served = await self.versions.infer(session, observation, left, self.asker)
        timing: dict[str, float] = {"infer_ms": 1e3 * (time.perf_counter() - start)}
        if self._previous is not None:
            timing["prev_total_ms"] = 1e3 * self._previous
        seconds = self._previous = time.perf_counter() - arrived
        self.server.metrics.latency.observe(seconds)
        reply: dict[str, Any] = {
            "actions": answer.actions,
            "policy_timing": {"infer_ms": 1e3 * answer.seconds},
            "server_timing": timing,
            POLICY: served.label,
        }
        if answer.failure is not None:
            reply[FAILURE] = {"index": answer.failure.index, "alarms": list(answer.failure.alarms)}
        self.server.note(session, served, observation, answer, seconds)
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
