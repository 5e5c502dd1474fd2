"""Ten thousand broken messages: each is refused by a sentence, or is an observation; the server goes on."""

import numpy as np
import pytest
import websockets.sync.client
from innocent import Innocent, memory, served
from served_policies import FRONT, Echo
from websockets.exceptions import ConnectionClosed

from robopolicy.client.protocol import RESET, SEED, SESSION, Limits, pack, unpack
from robopolicy.core.errors import RobopolicyError
from robopolicy.core.spec import STATE
from robopolicy.serving.inputs import Session


def observation():
    return {STATE: np.array([1.0, 0.0]), FRONT: np.full((4, 6, 3), 7, np.uint8)}


def broken(random):
    """Return a message that was honest once: bytes flipped, cut, doubled, or fields of other kinds."""
    odd = [
        None,
        -1,
        2**63,
        1e300,
        float("nan"),
        "text",
        b"bytes",
        [],
        {},
        [[1, 2], [3]],
        np.zeros((0, 2)),
        np.full(2, np.inf),
        np.zeros((2, 2), np.int8),
        np.zeros(3, bool),
        {"a": {"b": np.zeros(2)}},
    ]
    message = observation()
    for _ in range(random.integers(0, 3)):
        key = [STATE, FRONT, "task", "prompt", SESSION, RESET, SEED, "observation", "images", "x" * 50][
            random.integers(10)
        ]
        message[key] = odd[random.integers(len(odd))]
    data = bytearray(pack(message))
    for _ in range(random.integers(0, 6)):
        kind, place = random.integers(4), int(random.integers(len(data)))
        if kind == 0:
            data[place] = random.integers(256)
        elif kind == 1:
            del data[place:]
            data = data or bytearray(b"\x80")
        elif kind == 2:
            data[place:place] = random.bytes(random.integers(1, 9))
        else:
            data += data[place : place + 20]
    return bytes(data)


@pytest.mark.long
def test_a_broken_message_is_refused_or_is_an_observation():
    random, limits = np.random.default_rng(0), Limits.of(Echo().spec)
    refused = 0
    for _ in range(10_000):
        try:
            request = unpack(broken(random), limits)
            if isinstance(request, dict):
                shown = Session(Echo().spec).observe(request)
                assert shown[STATE].shape == (1, 2, 2)
                assert np.isfinite(shown[STATE]).all()
            else:
                refused += 1
        except RobopolicyError as error:
            refused += 1
            assert len(str(error)) < 5000
    assert 5000 < refused < 10_000


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_server_survives_ten_thousand_of_them_and_a_robot_beside_them_notices_nothing():
    random = np.random.default_rng(1)
    refused, answered = 0, 0
    with served("echo") as (port, process), Innocent(port) as robot:
        calm = robot.waits(seconds=5)
        before = memory(process)
        for _ in range(10_000):
            with websockets.sync.client.connect(f"ws://127.0.0.1:{port}", compression=None) as connection:
                connection.recv()
                try:
                    connection.send(broken(random))
                    answer = connection.recv(timeout=20)
                    assert isinstance(answer, bytes) or "Traceback" not in answer
                    answered += isinstance(answer, bytes)
                    refused += isinstance(answer, str)
                except ConnectionClosed:
                    refused += 1
        waits = robot.waits()
        grown = memory(process) - before
    over = [wait for wait in waits if wait > max(0.1, 2 * max(calm))]
    print(
        f"{refused} refused, {answered} answered, memory +{grown:.1f} MiB; {len(waits)} waits of the robot, beyond its "
        f"inference: worst {1e3 * max(waits):.0f} ms, calm {1e3 * max(calm):.0f} ms; over the bound: {len(over)}"
    )
    assert refused + answered == 10_000 and refused > 5000
    assert len(over) <= len(waits) / 1000
    assert grown < 30
