"""What a client may not do to the others: every limit against a real server in its own process."""

import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress

import msgpack
import numpy as np
import pytest
import websockets.sync.client
from served_policies import FRONT, KEY, Echo, run_one, run_servers
from websockets.exceptions import ConnectionClosed, InvalidStatus

from robopolicy.client.driver import ActionLimits, Driver
from robopolicy.client.images import resize_with_padding
from robopolicy.client.policy_client import PolicyClient, connected
from robopolicy.client.protocol import RESET, SEED, SESSION, Limits, pack, unpack
from robopolicy.core.errors import ServingError, SpecError
from robopolicy.core.spec import STATE
from robopolicy.serving.configuration import ServerAddress
from robopolicy.serving.inputs import Session
from robopolicy.serving.telemetry import Log, json_lines

pytestmark = pytest.mark.long

SERVERS = {
    "odd": ("odd", {}),
    "sessions": ("echo", {"limits": {"sessions": 3, "all_sessions": 4}, "session_expiry": 2.0}),
    "locked": (
        "echo",
        {"api_key": KEY, "limits": {"wrong_keys": 3, "lockout": 1.5}, "origins": ("https://mine.example",)},
    ),
    "unlocked": ("echo", {"api_key": KEY, "limits": {"wrong_keys": 3}}),
    "few": ("echo", {"limits": {"address_connections": 20}}),
    "busy": ("slow", {"max_batch_size": 1, "max_queue_size": 2}),
    "slow": ("slow", {}),
    "noisy": ("noisy", {}),
    "renamed": ("echo", {"rename": {"images/cam_high": FRONT}}),
}
"""Name -> (policy, settings) of servers that share a process."""


@pytest.fixture(scope="module")
def ports(tmp_path_factory):
    certificate, key = (tmp_path_factory.getbasetemp() / name for name in ("cert.pem", "key.pem"))
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject]
    subprocess.run([*make, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    servers = SERVERS | {"tls": ("echo", {"certificate": certificate, "certificate_key": key})}
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=run_servers, args=(there, servers), daemon=True)
    process.start()
    assert here.poll(120), "the servers did not start"
    yield here.recv() | {"certificate": certificate}
    here.send("stop")
    process.join(20)
    assert process.exitcode == 0


def observation(value=1.0, **more):
    return {STATE: np.array([value, 0.0]), FRONT: np.full((4, 6, 3), 7, np.uint8), **more}


def status(port, path):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def told(port, data):
    """Send raw bytes; return the text that the server answers, and its close code."""
    with websockets.sync.client.connect(f"ws://127.0.0.1:{port}", compression=None, max_size=None) as connection:
        connection.recv()
        text = ""
        try:
            connection.send(data)
            text = connection.recv(timeout=20)
            connection.recv(timeout=20)
        except ConnectionClosed as closed:
            return text, closed.rcvd.code if closed.rcvd else None
        raise AssertionError("the connection stayed open")


def array(dtype, data=b"", shape=(0,)):
    """Pack a state in openpi's form, with any dtype."""
    return msgpack.packb({STATE: {b"__ndarray__": True, b"data": data, b"dtype": dtype, b"shape": shape}})


def nested(depth):
    """Return a mapping in a mapping, `depth` times."""
    value = 0
    for _ in range(depth):
        value = {"a": value}
    return value


FLOODS = {
    "dtype": (array("f4," * 9000), "str_len"),
    "short dtype list": (array("f4," * 300), "are refused"),
    "names": (msgpack.packb({f"name{index}": 0 for index in range(5000)}), "map_len"),
    "nested names": (
        msgpack.packb({f"group{index}": {f"name{field}": 0 for field in range(90)} for index in range(5)}),
        "at most 100 fields",
    ),
    "long name": (msgpack.packb({"n" * 5000: 0}), "at most 128 characters"),
    "deep": (msgpack.packb(nested(40)), "nested 8 deep"),
    "list": (msgpack.packb({STATE: [0] * 50_000}), "array_len"),
    "lists of lists": (msgpack.packb({STATE: [[[0] * 16] * 16] * 16}), "contains more than"),
    "headers": (b"\x91" * 400 + b"\xdd\x00\xff\xff\xff", "array_len"),
    "prompt": (pack(observation(prompt="x" * 20_000)), "str_len"),
    "scalar": (msgpack.packb({STATE: {b"__npgeneric__": True, b"data": 2**63, b"dtype": "<i1"}}), "OverflowError"),
    "ragged": (pack(observation() | {STATE: [[1.0], [1.0, 2.0]]}), "is not an array"),
    "frames": (pack(observation() | {STATE: np.zeros((3, 2), np.int8)}), "reads at most 2"),
    "session": (pack(observation() | {SESSION: "x" * 300}), "at most 128 characters"),
    "session of bytes": (pack(observation() | {SESSION: 5}), "must be text"),
    "reset as an array": (pack(observation() | {RESET: np.array([True, False])}), "true or false, not ndarray"),
    "reset as text": (pack(observation() | {RESET: "yes"}), "true or false, not str"),
    "misspelt": (pack(observation() | {RESET + "s": True}), "Did you mean 'robopolicy.reset'?"),
    "nested name of ours": (pack(observation() | {"robopolicy": {"reset": True}}), "at the top level of a message"),
    "seed": (pack(observation() | {SEED: "x"}), "must be an integer"),
    "image": (pack(observation() | {FRONT: np.zeros((700, 1, 3), np.uint8)[:, :0]}), "has shape"),
    "list for a mapping": (msgpack.packb([1, 2]), "mapping"),
}


@pytest.mark.parametrize("flood", FLOODS)
def test_what_goes_beyond_a_limit_is_refused_in_a_sentence(ports, flood):
    port = ports["odd"]
    data, expected = FLOODS[flood]
    text, code = told(port, data)
    assert code == 1011
    assert expected in text
    assert len(text) < 1000
    with PolicyClient(port=port) as client:
        assert client.infer(observation(3.0))["actions"][0, 0] == 3.0


def test_a_message_larger_than_anything_honest_is_cut_off(ports):
    port, large = ports["odd"], pack(observation() | {FRONT: np.zeros((2, 1080, 1920, 3), np.uint8)})
    for data in (b"\0" * (Limits.of(Echo().spec).message + 1), large):
        before = refusals(port)
        text, code = told(port, data)
        assert (
            code == 1009 and "This server accepts messages of at most" in text and "Reduce them before sending" in text
        )
        until = time.monotonic() + 10  # the server counts it once the connection is closed
        while refusals(port) == before and time.monotonic() < until:
            time.sleep(0.05)
        assert refusals(port) == before + 1


def refusals(port):
    """How many observations a server has refused."""
    match = re.search(r'refused_total{reason="observation"} (\d+)', status(port, "/metrics")[1])
    return int(match[1]) if match else 0


def test_a_robot_with_a_large_camera_is_driven(ports):
    with PolicyClient(port=ports["odd"]) as client:
        assert client.metadata["images"] == {"color": "rgb", "dtype": "uint8", "layout": "hwc", "pixels": 1280 * 720}
        with Driver(client, hold=np.zeros(1), limits=ActionLimits(unbounded=True)) as driver:
            shown = {STATE: np.array([3.0, 0.0]), FRONT: np.full((1080, 1920, 3), 60, np.uint8)}
            for _ in range(2):
                assert driver.step(shown | {"task": "go"}).tolist() == [3.0]
        assert driver.counts["held"] == 0
        means = client.infer(shown | {"task": "go"})["actions"][2, 0]
        assert 2040 <= means < 2060, "black above and below, as the server resizes"
    text, code = told(ports["odd"], pack(shown))
    assert code == 1011 and "is 1920 x 1080, more than 1280 x 720 pixels" in text


def test_limits_follow_from_the_policy():
    limits = Limits.of(Echo().spec)
    assert limits.message < 20 * 2**20
    assert limits.elements < 2000
    honest = {STATE: [[0.5] * 2] * 2, FRONT: np.zeros((2, 720, 1280, 3), np.uint8), "task": "x" * 10_000}
    assert set(unpack(pack(honest), limits)) == {STATE, FRONT, "task"}


def test_histories_keep_frames_and_not_the_messages_they_came_in():
    session = Session(Echo().spec)
    message = unpack(pack(observation() | {FRONT: np.zeros((2, 4, 6, 3), np.uint8)}))
    session.observe(message)
    assert all(frames.base is None for frames in session._frames.values())


def test_sessions_are_bounded_and_idle_ones_make_room(ports):
    port = ports["sessions"]
    with PolicyClient(port=port) as first, PolicyClient(port=port) as second:
        for name in "abc":
            first.infer(observation(**{SESSION: name}))
        second.infer(observation(**{SESSION: "a"}))
        with pytest.raises(ServingError, match="has at most 4 sessions"):
            second.infer(observation(**{SESSION: "b"}))
    with PolicyClient(port=port) as client:
        for name in "abc":
            client.infer(observation(float(ord(name)), **{SESSION: name}))
        with pytest.raises(ServingError, match="at most 3 sessions"):
            client.infer(observation(**{SESSION: "d"}))
    with PolicyClient(port=port) as client:
        for name in "abc":
            client.infer(observation(2.0, **{SESSION: name}))
        time.sleep(2.3)
        client.infer(observation(**{SESSION: "d"}))
        assert client.infer(observation(9.0, **{SESSION: "a"}))["actions"][:2, 0].tolist() == [9.0, 9.0]


def test_keys_cannot_be_guessed_fast_and_foreign_pages_are_refused(ports):
    port = ports["locked"]
    for _ in range(3):
        with pytest.raises(ServingError, match="another API key"):
            PolicyClient(port=port, api_key="guess")
    with pytest.raises(ServingError, match=r"too many wrong .* in [12] s, .*drive\.api_key.*ROBOPOLICY_API_KEY"):
        PolicyClient(port=port, api_key="guess")
    assert status(port, "/metrics")[0] == 401
    with PolicyClient(port=port, api_key="secret") as client:
        assert client.infer(observation(2.0))["actions"][0, 0] == 2.0
    key = {"Authorization": "Api-Key secret"}
    with pytest.raises(InvalidStatus, match="403"):
        websockets.sync.client.connect(f"ws://127.0.0.1:{port}", origin="https://evil.example", additional_headers=key)
    with websockets.sync.client.connect(
        f"ws://127.0.0.1:{port}", origin="https://mine.example", additional_headers=key
    ) as connection:
        assert unpack(connection.recv())["server"] == "robopolicy"


def test_no_key_is_no_guess(ports):
    port = ports["unlocked"]
    for _ in range(5):
        assert status(port, "/metrics")[0] == 401
        with pytest.raises(ServingError, match="requires an API key, and none was given"):
            PolicyClient(port=port)
    for key in ("gu\xe9ss", "guess"):
        with pytest.raises(ServingError, match="another API key than the one given"):
            PolicyClient(port=port, api_key=key)


def test_a_policy_that_ends_programs_does_not_end_the_server(ports):
    port = ports["odd"]
    with PolicyClient(port=port) as robot:
        robot.infer(observation(1.0))
        for state in (-5.0, -6.0):
            with PolicyClient(port=port) as other, pytest.raises(ServingError, match="The policy failed"):
                other.infer(observation(state))
        assert robot.infer(observation(2.0))["actions"][:2, 0].tolist() == [2.0, 1.0]
    assert status(port, "/livez")[0] == 200


def test_names_of_ours_as_bytes_are_read(ports):
    with PolicyClient(port=ports["noisy"]) as client:
        drawn = [client.infer(observation(**{SEED: 5}))["actions"][0, 0] for _ in range(2)]
        assert client.infer({**observation(), b"robopolicy.seed": 5})["actions"][0, 0] == drawn[0] == drawn[1]


def test_idle_sockets_and_floods_of_pings_are_cut_and_robots_go_on(ports):
    port = ports["few"]
    with PolicyClient(port=port) as robot:
        robot.infer(observation(1.0))
        idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(60)]
        time.sleep(0.3)
        cut = 0
        for each in idle:
            each.settimeout(0.2)
            with suppress(TimeoutError):
                try:
                    cut += each.recv(1) == b""
                except ConnectionResetError:
                    cut += 1
        assert cut >= 40
        assert robot.infer(observation(2.0))["actions"][:2, 0].tolist() == [2.0, 1.0]
        for each in idle:
            each.close()
        time.sleep(0.3)
        with websockets.sync.client.connect(f"ws://127.0.0.1:{port}", compression=None, ping_interval=None) as flood:
            flood.recv()
            with pytest.raises(ConnectionClosed):
                for _ in range(5000):
                    flood.ping()
                flood.recv(timeout=10)
        assert robot.infer(observation(3.0))["actions"][:2, 0].tolist() == [3.0, 2.0]


def test_a_policy_that_answers_too_many_rows_fails_its_request_only(ports):
    port = ports["odd"]
    with PolicyClient(port=port) as robot:
        robot.infer(observation(1.0))
        with PolicyClient(port=port) as other, pytest.raises(ServingError, match="2 action chunk"):
            other.infer(observation(-3.0))
        assert robot.infer(observation(2.0))["actions"][:2, 0].tolist() == [2.0, 1.0]
    assert status(port, "/livez")[0] == 200


def test_a_policy_that_hangs_is_noticed_and_nobody_holds_up_the_end():
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(
        target=run_one, args=(there, "odd", {"request_timeout": 0.5, "hang_timeout": 1.0}), daemon=True
    )
    process.start()
    assert here.poll(120), "the server did not start"
    port = here.recv()
    with PolicyClient(port=port) as robot, pytest.raises(ServingError, match=r"No answer within 0\.5 s"):
        robot.infer(observation(-4.0))
    time.sleep(1.0)
    for path in ("/livez", "/readyz", "/healthz"):
        code, text = status(port, path)
        assert code == 503
        assert "has been computing for" in text
    with PolicyClient(port=port) as robot, pytest.raises(ServingError, match="has been computing for"):
        robot.infer(observation(1.0))
    silent = socket.create_connection(("127.0.0.1", port))
    silent.sendall(
        b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    assert b"101" in silent.recv(4096)
    slow = socket.create_connection(("127.0.0.1", port))
    slow.sendall(b"GET / HT")
    os.kill(process.pid, signal.SIGTERM)
    process.join(30)
    assert process.exitcode == 0
    silent.close()
    slow.close()


def test_more_requests_than_may_wait_are_told_to_come_back(ports):
    port = ports["busy"]
    answers: list[str] = []

    def ask(index):
        try:
            with PolicyClient(port=port) as client:
                answers.append(str(client.infer(observation(5.0 + index))["actions"][0, 0]))
        except ServingError as error:
            answers.append(str(error))

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    busy = [answer for answer in answers if "requests are waiting already" in answer]
    assert 1 <= len(busy) <= 6
    assert len(answers) == 8
    assert 'refused_total{reason="busy"}' in status(port, "/metrics")[1]


def test_sessions_behind_one_connection_are_computed_together(ports):
    address = f"ws://127.0.0.1:{ports['slow']}"
    with websockets.sync.client.connect(address, compression=None, max_size=None) as connection:
        connection.recv()
        for index in range(9):
            connection.send(pack(observation(5.0 + index, **{SESSION: str(index)})))
        answers = [unpack(connection.recv(timeout=30))["actions"][:, 0] for _ in range(9)]
    assert [answer[0] for answer in answers] == [5 + index for index in range(9)]
    assert max(answer[3] for answer in answers) > 4


def test_a_seeded_session_repeats_whoever_else_is_connected(ports):
    port = ports["noisy"]

    def episode(*, crowd):
        with PolicyClient(port=port) as client, PolicyClient(port=port) as other:
            client.infer(observation(**{SEED: 5, RESET: True}))
            drawn = []
            for _ in range(5):
                if crowd:
                    other.infer(observation())
                drawn.append(float(client.infer(observation())["actions"][0, 0]))
            return drawn

    alone = episode(crowd=False)
    assert episode(crowd=True) == alone
    assert len(set(alone)) == 5


def test_names_of_ones_own_and_images_of_other_sizes(ports):
    with PolicyClient(port=ports["renamed"]) as client:
        assert client.metadata["rename"] == {"images/cam_high": FRONT}
        image = np.zeros((8, 12, 3), np.uint8)
        image[:4] = 200
        for sent in (image, image.transpose(2, 0, 1)):
            answer = client.infer({STATE: np.zeros(2), "images": {"cam_high": sent}})
            assert answer["actions"][2, 0] == pytest.approx(1000 * len("push the cube") + 100, abs=2)
    tall = resize_with_padding(np.full((8, 4, 3), 90, np.uint8), (4, 6))
    assert tall[:, 2:4].min() == 90
    assert tall[:, :2].max() == tall[:, 4:].max() == 0
    with pytest.raises(SpecError, match="not a field of the policy"):
        Session(Echo().spec, {"cam": "observation.images.fron"})


def test_a_certificate_makes_it_wss(ports):
    address = f"wss://127.0.0.1:{ports['tls']}"
    with PolicyClient(address, certificate=ports["certificate"]) as client:
        assert client.infer(observation(4.0))["actions"][0, 0] == 4.0
    with pytest.raises(ServingError, match=r"CERTIFICATE_VERIFY_FAILED.*To trust .*drive\.certificate"):
        PolicyClient(address)
    with connected(ServerAddress(port=ports["tls"], certificate=ports["certificate"]), 5.0) as client:
        assert client.infer(observation(4.0))["actions"][0, 0] == 4.0
    with PolicyClient("wss://127.0.0.1", ports["tls"], certificate=ports["certificate"]) as client:
        assert client.address == address
    with pytest.raises(ServingError, match="uses a certificate, its address starts with wss://"):
        PolicyClient(port=ports["tls"])
    with pytest.raises(ServingError, match="does not use encryption, its address starts with ws://"):
        PolicyClient("wss://127.0.0.1", ports["few"])
    with pytest.raises(ServingError, match="/nowhere cannot be read"):
        PolicyClient(address, certificate="/nowhere")


def test_the_log_is_json_and_bounded(caplog):
    log = Log()
    with caplog.at_level("INFO", logger="robopolicy.serving"):
        for _ in range(500):
            log("wrong key", address="10.0.0.1")
    lines = [json.loads(json_lines().format(record)) for record in caplog.records]
    assert len(lines) == 20
    assert lines[0] | {"time": ""} == {"time": "", "level": "info", "event": "wrong key", "address": "10.0.0.1"}
    time.sleep(1.1)
    with caplog.at_level("INFO", logger="robopolicy.serving"):
        log("wrong key")
    assert json.loads(json_lines().format(caplog.records[-1]))["not_written_before"] == 480
