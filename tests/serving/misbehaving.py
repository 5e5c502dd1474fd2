"""A server, a network and a policy that misbehave when told to; each runs in a process of its own.

What robots ought to do is known at every step: the action of robot r at its step n is `wanted(r, n)`, whichever
observation it was made for, so that an answer to another request, another robot or a damaged one shows in the action.
"""

import asyncio
import random
from collections import Counter
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from robopolicy.core.errors import CheckpointError
from robopolicy.core.policy import Decision
from robopolicy.core.spec import STATE, Field, PolicySpec
from robopolicy.serving.server import PolicyServer, ServerSettings, serve
from robopolicy.serving.versions import LoadedPolicy

LOW, HIGH, CHANGE = -0.8, 0.8, 0.25
CHUNK, FPS, HISTORY = 8, 20.0, 2
OUTSIDE = 1e6
"""What a policy answers that ignores its bounds."""

SOON = 30
"""Calls after which a failing version fails: more than the checks before it serves, fewer than a probation has."""
PROBATION = 4.0
"""Seconds after which a new version is taken for good."""

RELOADS = ("good", "failing", "unreadable")
POLICY_FAULTS = ("none", "nan", "outside", "shape", "rows", "exception", "slow", "busy", "hang")
NETWORK_FAULTS = ("none", "delay", "cut", "swallow", "stale", "corrupt")


def wanted(robot: np.ndarray | float, step: np.ndarray | float) -> np.ndarray:
    """Return the actions [..., 2] of robots at their steps: another one at every step, never still."""
    phase = np.asarray(robot) * 2.4 + np.asarray(step) * 0.15
    return np.stack([0.3 + 0.3 * np.sin(phase), -0.3 + 0.3 * np.cos(1.3 * phase)], -1)


class Moody:
    """A policy that answers `wanted`, or has the fault whose place in POLICY_FAULTS `mood` holds, every second time."""

    spec = PolicySpec({STATE: Field((2,))}, Field((2,), low=-0.9, high=0.9), HISTORY, CHUNK, CHUNK, 1, FPS)

    def __init__(self, mood: Any):
        self.mood, self.random = mood, random.Random(0)

    def act(self, observation: dict[str, Any], generator: torch.Generator, *, deterministic: bool = False) -> Decision:
        state = observation[STATE]
        assert state.shape[1:] == (HISTORY, 2) and bool((state[:, 0, 1] <= state[:, 1, 1]).all())
        robot, step = (state[:, -1, place].numpy()[:, None] for place in (0, 1))
        actions = torch.from_numpy(wanted(robot, step + np.arange(CHUNK)))
        return self._spoiled(actions.float(), POLICY_FAULTS[self.mood.value] if self.random.random() < 0.5 else "none")

    def _spoiled(self, actions: torch.Tensor, fault: str, every: bool = False) -> Decision:
        import time

        rows = len(actions)
        if every:
            actions[:] = torch.nan
        elif fault == "nan":
            actions[self.random.randrange(rows), self.random.randrange(CHUNK), 0] = torch.nan
        elif fault == "outside":
            actions[:] = OUTSIDE
        elif fault == "shape":
            actions = torch.cat([actions, actions], -1)
        elif fault == "rows":
            actions = actions.repeat(2, 1, 1)
        elif fault == "exception":
            raise RuntimeError("the policy exploded")
        elif fault in ("slow", "busy"):
            time.sleep(0.4)
        elif fault == "hang":
            time.sleep(10_000)
        return Decision(actions, {}, torch.zeros(rows, 1), torch.ones(rows, 1, dtype=torch.bool))

    def reset(self, rows: Any = None) -> None: ...


class Failing(Moody):
    """A new version that passes every check, and soon answers NaN alone."""

    calls = 0

    def act(self, observation: dict[str, Any], generator: torch.Generator, *, deterministic: bool = False) -> Decision:
        self.calls += 1
        decision = super().act(observation, generator, deterministic=deterministic)
        return decision if self.calls < SOON else self._spoiled(decision.actions, "nan", every=True)


class Base(Moody):
    """Tells an arm to reach out and the base below it to drive, or has the fault of its mood every time."""

    NAMES = ("shoulder.pos", "x.vel")
    spec = PolicySpec(
        {STATE: Field((2,), names=NAMES)}, Field((2,), low=-50.0, high=50.0, names=NAMES), 1, 2, 2, 1, 50.0
    )

    def act(self, observation: dict[str, Any], generator: torch.Generator, *, deterministic: bool = False) -> Decision:
        actions = torch.tensor([20.0, 0.3]).expand(len(observation[STATE]), 2, 2).clone()
        return self._spoiled(actions, POLICY_FAULTS[self.mood.value])


def run_moody(pipe: Any, mood: Any, port: int, policy: type[Moody] = Moody, version: Any = None) -> None:
    """Serve a moody policy on `port` until a signal comes; at most four requests may wait.

    version: number of the version that SIGHUP loads; what it is follows from `RELOADS`.
    """
    settings = ServerSettings(
        port=port, max_queue_size=4, max_batch_size=2, request_timeout=2.0, hang_timeout=2.0, probation=PROBATION
    )

    def load(name: str) -> LoadedPolicy:
        kind = RELOADS[version.value % len(RELOADS)]
        if kind == "unreadable":
            raise CheckpointError("model.safetensors is cut off.")
        return LoadedPolicy(Failing(mood) if kind == "failing" else policy(mood), f"{version.value}")

    loaded = LoadedPolicy(policy(mood), "first")
    serve(loaded, settings, pipe.send, load=None if version is None else load)


class Network:
    """A proxy before a server at `port`: passes everything on, or spoils it as `state` (a shared number) says."""

    def __init__(self, port: int, state: Any, counts: Counter[str]):
        self.port, self.state, self.counts = port, state, counts
        self.random = random.Random(1)

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection."""
        try:
            there = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            writer.transport.abort()
            return
        ways = [self._carry(reader, there[1], False), self._carry(there[0], writer, True)]
        tasks = [asyncio.ensure_future(way) for way in ways]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for each in (writer, there[1]):
            with suppress(OSError, RuntimeError):
                each.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answers: bool) -> None:
        """Carry one direction; of answers, whole frames, so that one can be repeated in the place of the next."""
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(head)
        earlier = b""
        while data := await (_frame(reader) if answers else reader.read(65536)):
            fault = NETWORK_FAULTS[self.state.value] if self.random.random() < 0.2 else "none"
            if fault == "stale" and (not answers or not earlier):
                fault = "none"
            self.counts[fault] += 1
            if fault == "delay":
                await asyncio.sleep(self.random.choice((0.05, 0.2, 1.0)))
            elif fault == "cut":
                writer.write(data[: self.random.randrange(len(data))])
                await writer.drain()
                return
            elif fault == "swallow":
                continue
            elif fault == "corrupt":
                damaged = bytearray(data)
                for _ in range(self.random.randrange(1, 4)):
                    damaged[self.random.randrange(len(damaged))] ^= 1 << self.random.randrange(8)
                writer.write(bytes(damaged))
                await writer.drain()
                continue
            elif fault == "stale":
                writer.write(self.random.choice((earlier, earlier + data)))
                await writer.drain()
                continue
            writer.write(data)
            await writer.drain()
            earlier = data


async def _frame(reader: asyncio.StreamReader) -> bytes:
    """Read one frame that a websocket server sent; b"" at the end."""
    try:
        head = await reader.readexactly(2)
        size = head[1] & 127
        if size > 125:
            more = await reader.readexactly(2 if size == 126 else 8)
            head, size = head + more, int.from_bytes(more, "big")
        return head + await reader.readexactly(size)
    except asyncio.IncompleteReadError:
        return b""


def run_network(pipe: Any, states: list[tuple[int, Any]]) -> None:
    """Run a proxy before each server: (its port, its state). Sends their ports; when told, what they did, and ends."""

    async def main() -> None:
        counts: Counter[str] = Counter()
        listening = [
            await asyncio.start_server(Network(port, state, counts).take, "127.0.0.1", 0) for port, state in states
        ]
        pipe.send([each.sockets[0].getsockname()[1] for each in listening])
        told = asyncio.Event()
        asyncio.get_running_loop().add_reader(pipe.fileno(), told.set)
        await told.wait()
        pipe.send(dict(counts))

    asyncio.run(main())


def run_served(pipe: Any, policy: Any, settings: dict[str, Any]) -> None:
    """Serve `policy()` in this process until told to stop."""

    async def main() -> None:
        stop = asyncio.Event()
        asyncio.get_running_loop().add_reader(pipe.fileno(), stop.set)
        await PolicyServer(policy(), ServerSettings(port=0, **settings)).run(stop, pipe.send)

    asyncio.run(main())
