"""How long one client can make the others wait, and how much memory one connection can take."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import msgpack
import numpy as np
import pytest
import websockets.sync.client
from innocent import Innocent, memory, served
from served_policies import FRONT, Echo
from websockets.exceptions import ConnectionClosed

from robopolicy.client.protocol import SESSION, Limits, pack, unpack
from robopolicy.core.spec import STATE

LARGEST = Limits.of(Echo().spec).message - 200
SECONDS = 4.0
"""Of each attack."""


@contextmanager
def connected(port: int) -> Iterator[websockets.sync.client.ClientConnection]:
    address = f"ws://127.0.0.1:{port}"
    with websockets.sync.client.connect(address, compression=None, max_size=None, close_timeout=1) as connection:
        connection.recv()
        yield connection


def array(dtype: str) -> bytes:
    return msgpack.packb({STATE: {b"__ndarray__": True, b"data": b"", b"dtype": dtype, b"shape": (0,)}})


def honest(**more) -> bytes:
    return pack({STATE: np.zeros(2), FRONT: np.zeros((4, 6, 3), np.uint8), **more})


MESSAGES = {
    "text of a dtype": array("f4," * (LARGEST // 3)),
    "a million names": msgpack.packb({f"{index:06d}": 0 for index in range(LARGEST // 8)}),
    "a list of millions": msgpack.packb({STATE: [0] * LARGEST}),
    "a prompt of megabytes": honest(prompt="x" * LARGEST),
    "headers of arrays": b"\x91" * 400 + b"\xdd\x00\xff\xff\xff" * (LARGEST // 5 - 100),
    "large images": pack({STATE: np.zeros(2), FRONT: np.zeros((2, 720, 1280, 3), np.uint8)}),
    "nothing but zeros": b"\0" * LARGEST,
    "a session of megabytes": honest(**{SESSION: "x" * LARGEST}),
}
"""Each as large as the server takes at all, 11 MB here."""


def send_again_and_again(data: bytes) -> Callable[[int, float], None]:
    def attack(port: int, until: float) -> None:
        while time.monotonic() < until:
            with suppress(ConnectionClosed, OSError), connected(port) as connection:
                connection.send(data)
                connection.recv(timeout=20)

    return attack


def pings(port: int, until: float) -> None:
    while time.monotonic() < until:
        with suppress(ConnectionClosed, OSError), connected(port) as connection:
            for _ in range(10_000):
                connection.ping()


def idle_sockets(port: int, until: float) -> None:
    with ExitStack() as stack:
        while time.monotonic() < until:
            with suppress(OSError):
                stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))


def garbage(port: int, until: float) -> None:
    while time.monotonic() < until:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as each:
            each.sendall(b"\x16\x03\x01\x02\x00" * 1000)
            each.recv(1000)


def unread(port: int, until: float) -> None:
    """Ask and never read."""
    with suppress(ConnectionClosed, OSError), connected(port) as connection:
        connection.socket.settimeout(0.5)
        while time.monotonic() < until:
            connection.send(honest())


def comings_and_goings(port: int, until: float) -> None:
    while time.monotonic() < until:
        with suppress(ConnectionClosed, OSError), connected(port):
            pass


def busy_by_itself(port: int, until: float) -> None:
    """Take time from the processor, as every attacker on the same machine does, and leave the server alone."""
    while time.monotonic() < until:
        pack({STATE: [0] * 100_000})


ATTACKS: dict[str, Callable[[int, float], None]] = {
    "(a client busy by itself)": busy_by_itself,
    **{name: send_again_and_again(data) for name, data in MESSAGES.items()},
    "pings": pings,
    "idle sockets": idle_sockets,
    "garbage": garbage,
    "answers never read": unread,
    "comings and goings": comings_and_goings,
}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_client_makes_the_others_wait():
    waited: dict[str, float] = {}
    with served("echo") as (port, process), Innocent(port) as robot:
        waited["(nothing)"] = max(robot.waits(seconds=SECONDS))
        for name, attack in ATTACKS.items():
            robot.waits()
            thread = threading.Thread(target=attack, args=(port, time.monotonic() + SECONDS))
            thread.start()
            thread.join(60)
            assert not thread.is_alive(), name
            waited[name] = max(robot.waits())
            time.sleep(1.0)
        grown = memory(process)
    bound = max(0.1, 3 * max(worst for name, worst in waited.items() if name.startswith("(")))
    for name, worst in waited.items():
        print(f"{name:24} {1e3 * worst:6.0f} ms")
    print(f"memory at the end: {grown:.0f} MiB")
    assert not {name: worst for name, worst in waited.items() if worst > bound}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_memory_of_a_connection_is_bounded_and_is_given_back():
    count = 100
    per: dict[str, float] = {}
    with served("echo") as (port, process):
        with connected(port) as first:
            first.send(honest())
            first.recv()
        empty = memory(process)
        with ExitStack() as stack:
            connections = [stack.enter_context(connected(port)) for _ in range(count)]
            per["idle"] = (memory(process) - empty) / count
            for connection in connections:
                connection.send(honest())
                assert unpack(connection.recv(timeout=20))["actions"].shape == (4, 1)
            per["one session"] = (memory(process) - empty) / count
            for connection in connections[:3]:  # of the 768 sessions that one address may have
                for index in range(200):
                    connection.send(honest(**{SESSION: f"{index:0128d}"}))
                    connection.recv(timeout=20)
            per["200 sessions"] = (memory(process) - empty) / 3
        time.sleep(1.0)
        per["after closing, all together"] = memory(process) - empty
        with ExitStack() as stack:
            for _ in range(20):
                half = stack.enter_context(connected(port))
                half.socket.sendall(b"\x82\xff" + LARGEST.to_bytes(8, "big") + bytes(4) + bytes(LARGEST - 1))
            time.sleep(1.0)
            per["a message of which one byte is missing"] = (memory(process) - empty) / 20
        until = time.monotonic() + 30  # a client that is gone is noticed by its silence at the latest
        while memory(process) - empty > 60 and time.monotonic() < until:
            time.sleep(0.5)
        per["after that, all together"] = memory(process) - empty
    for name, size in per.items():
        print(f"{name:40} {size:8.3f} MiB")
    assert per["idle"] < 0.5 and per["one session"] < 0.5 and per["200 sessions"] < 4
    assert per["a message of which one byte is missing"] < 2.5 * LARGEST / 2**20
    assert per["after closing, all together"] < 20 and per["after that, all together"] < 60
