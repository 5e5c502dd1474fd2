"""The client: an answer that is damaged, or belongs to another request, never reaches the robot."""

import ssl
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
from websockets.sync.server import serve

from robopolicy.client.policy_client import PolicyClient, RefusedError, connected, connection_hint, server_url
from robopolicy.client.protocol import REQUEST, checksum, pack, pack_with_checksum, unpack
from robopolicy.core.errors import ConfigError, ServingError
from robopolicy.serving.configuration import ServerAddress

KINDS = {
    "right": lambda request, earlier: pack_with_checksum({"actions": np.ones((1, 1)), REQUEST: checksum(request)}),
    "stale": lambda request, earlier: (
        earlier or pack_with_checksum({"actions": np.ones((1, 1)), REQUEST: checksum(request)})
    ),
    "damaged": lambda request, earlier: (
        pack_with_checksum({"actions": np.ones((1, 1)), REQUEST: checksum(request)})[:-1] + b"?"
    ),
    "unsealed": lambda request, earlier: pack({"actions": np.ones((1, 1)), REQUEST: checksum(request)}),
    "of a damaged request": lambda request, earlier: pack_with_checksum({"actions": np.ones((1, 1)), REQUEST: 1}),
}


@pytest.fixture
def port(request):
    """A server that says it is ours, and answers in the way the test names; `plain`: one that is not ours."""
    kind = getattr(request, "param", "right")

    def talk(connection):
        connection.send(pack({}) if kind == "plain" else pack_with_checksum({"server": "robopolicy"}))
        earlier = b""
        for message in connection:
            if kind == "plain":
                assert REQUEST not in unpack(message)
                connection.send(pack({"actions": np.ones((1, 1))}))
                continue
            answer = KINDS[kind](message, earlier)
            earlier = earlier or answer
            connection.send(answer)

    with serve(talk, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.socket.getsockname()[1]
        server.shutdown()


@pytest.mark.parametrize("port", ["right", "plain"], indirect=True)
def test_right_answers_are_returned_and_servers_of_others_are_asked_for_nothing_of_ours(port):
    with PolicyClient(port=port) as client:
        for _ in range(3):
            assert set(client.infer({"state": np.zeros(1)})) == {"actions"}


@pytest.mark.parametrize("port", ["stale", "damaged", "unsealed", "of a damaged request"], indirect=True)
def test_answers_that_cannot_be_trusted_are_not_returned(port, request):
    with PolicyClient(port=port) as client:
        if "stale" in request.node.name:
            client.infer({"state": np.zeros(1)})
        with pytest.raises(ServingError, match=r"a different request|checksum"):
            client.infer({"state": np.zeros(1)})


def numbered(times, timed, pause=0.0):
    """What an openpi server does that counts its requests, and sends each answer as often as `times` says."""

    def talk(connection):
        connection.send(pack({}))
        for number, _ in enumerate(connection):
            time.sleep(pause)
            timing = {"server_timing": {"infer_ms": 1.0 + number}} if timed else {}
            for _ in range(times(number)):
                connection.send(pack({"actions": np.full((1, 1), number), **timing}))

    return talk


@pytest.mark.parametrize("pause", [0.0, 0.03])
@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize("times", [lambda number: 2, lambda number: 3 if number == 1 else 1], ids=["all", "one"])
def test_an_answer_that_comes_twice_shifts_no_later_one(times, timed, pause):
    with listening(numbered(times, timed, pause)) as port, PolicyClient(port=port) as client:
        answers = [client.infer({"state": np.zeros(1)})["actions"][0, 0] for _ in range(6)]
        assert answers == list(range(6))
        assert client.thrown_away >= 2


def test_a_policy_without_clock_may_answer_the_same_again():
    def talk(connection):
        connection.send(pack({}))
        for _ in connection:
            connection.send(pack({"actions": np.ones((1, 1))}))

    with listening(talk) as port, PolicyClient(port=port) as client:
        assert [client.infer({})["actions"].item() for _ in range(3)] == [1.0] * 3
        assert client.thrown_away == 0


def test_a_server_that_talks_without_being_asked_and_one_that_hangs_up_are_given_up():
    def flood(connection):
        for _ in range(3000):
            connection.send(pack({}))
        connection.recv()

    with listening(flood) as port, PolicyClient(port=port) as client:
        time.sleep(0.3)
        with pytest.raises(ServingError, match=r"more than 1000 messages without a request|closed the connection"):
            for _ in range(10):
                client.infer({})

    with listening(lambda connection: connection.send(pack({}))) as port, PolicyClient(port=port) as client:
        time.sleep(0.1)
        with pytest.raises(ServingError, match=r"closes every connection|closed the connection before"):
            client.infer({"state": np.zeros(1)})


@contextmanager
def listening(talk):
    """Yield the port of a server that talks so."""
    with serve(talk, "127.0.0.1", 0, max_size=2**16) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.socket.getsockname()[1]
        server.shutdown()


def test_a_message_that_is_too_large_names_its_largest_field():
    large = {"state": np.zeros(2), "images": {"top": np.zeros((200, 300, 3), np.uint8)}}

    def ours(connection):
        connection.send(pack_with_checksum({"server": "robopolicy", "message_bytes": 70_000}))
        connection.recv()

    def others(connection):
        connection.send(pack({}))
        connection.recv()

    for talk, text in ((ours, r"has 180\d\d\d bytes, .* accepts at most 70000"), (others, "1009")):
        with (
            listening(talk) as port,
            PolicyClient(port=port) as client,
            pytest.raises(RefusedError, match=text + r".*'images/top' is its largest field, \[200, 300, 3\] uint8"),
        ):
            client.infer(large)


@contextmanager
def describing(said):
    """Yield the port of a server that says `said` of its policy, as it is when a connection is made."""

    def talk(connection):
        connection.send(pack_with_checksum({"server": "robopolicy", **said}))
        for message in connection:
            connection.send(pack_with_checksum({"actions": np.ones((1, 1)), REQUEST: checksum(message)}))

    with serve(talk, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.socket.getsockname()[1]
        server.shutdown()


POLICY = {"action": {"shape": [1], "names": ["a"], "high": [1.0]}, "fps": 20.0, "world": {"name": "push_t"}}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"fps": 5.0}, r"fps, 20\.0 -> 5\.0"),
        ({"action": POLICY["action"] | {"names": ["b"]}}, "action"),
        ({"action": POLICY["action"] | {"high": [100.0]}}, "action"),
        ({"world": {"name": "push_cube"}}, "world"),
    ],
)
def test_a_server_that_comes_back_with_another_policy_is_refused_and_one_with_the_same_is_not(changes, text):
    metadata = dict(POLICY)
    with describing(metadata) as port, PolicyClient(port=port) as client:
        for _ in range(2):
            client.infer({"state": np.zeros(1)})
            client.close()
        metadata |= changes
        for _ in range(2):
            with pytest.raises(
                RefusedError, match=rf"another policy since .*\(different {text}\): its actions are not executed"
            ):
                client.infer({"state": np.zeros(1)})
        assert client.metadata["fps"] == 20.0 and client.metadata["world"] == POLICY["world"]
        metadata |= POLICY
        client.infer({"state": np.zeros(1)})


@pytest.mark.parametrize(
    ("host", "port", "encrypted", "address"),
    [
        ("127.0.0.1", None, False, "ws://127.0.0.1:8000"),
        ("robot", 9201, False, "ws://robot:9201"),
        ("robot", None, True, "wss://robot:8000"),
        ("::1", None, False, "ws://[::1]:8000"),
        ("[::1]:9201", None, False, "ws://[::1]:9201"),
        ("wss://robot", 9201, True, "wss://robot:9201"),
        ("wss://robot/arm", 9201, False, "wss://robot:9201/arm"),
        ("wss://robot/arm", None, False, "wss://robot/arm"),
        ("ws://robot:9201", None, False, "ws://robot:9201"),
        ("ws://robot:9201", 9201, False, "ws://robot:9201"),
    ],
)
def test_an_address_says_scheme_and_port_once(host, port, encrypted, address):
    assert server_url(host, port, encrypted) == address


@pytest.mark.parametrize(
    ("host", "port", "encrypted", "text"),
    [
        ("wss://robot:1", 9201, False, "contains port 1, but port=9201"),
        ("http://robot", None, False, "start with ws:// or wss://"),
        ("ws://robot", None, True, "A certificate applies only to a wss:// address"),
        ("robot:port", None, False, "not a server address"),
    ],
)
def test_an_address_that_contradicts_itself_is_refused(host, port, encrypted, text):
    with pytest.raises(ConfigError, match=text):
        server_url(host, port, encrypted)


def test_a_certificate_of_another_name_is_told_from_one_that_nobody_trusts():
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    causes = {"IP address mismatch, certificate is not valid for '10.0.0.1'.": "subjectAltName"}
    for error.verify_message, text in (causes | {"self-signed certificate": "drive.certificate"}).items():
        assert text in connection_hint("wss://10.0.0.1:8000", error)


def test_a_robot_waits_for_answers_as_long_as_it_has_patience_and_knows_the_environments_key(port, monkeypatch):
    monkeypatch.setenv("ROBOPOLICY_API_KEY", "of the environment")
    for own, patience, key in (("", 2.5, "of the environment"), ("own", 0.2, "own")):
        with connected(ServerAddress(port=port, api_key=own), patience) as client:
            assert client.timeout == max(patience, 1.0)
            assert client._headers == {"Authorization": f"Api-Key {key}"}
