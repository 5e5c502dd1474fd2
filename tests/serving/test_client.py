"""The client: an answer that is damaged, or belongs to another request, never reaches the robot."""

import ssl
import threading
from contextlib import contextmanager

import numpy as np
import pytest
from websockets.sync.server import serve

from robopolicy.core.errors import ConfigError, ServingError
from robopolicy.serving.addresses import way_out, whole_address
from robopolicy.serving.client import PolicyClient, RefusedError
from robopolicy.serving.configuration import ServerAddress
from robopolicy.serving.connecting import connected
from robopolicy.serving.protocol import REQUEST, fingerprint, pack, sealed, unpack

KINDS = {
    "right": lambda request, earlier: sealed({"actions": np.ones((1, 1)), REQUEST: fingerprint(request)}),
    "stale": lambda request, earlier: earlier or sealed({"actions": np.ones((1, 1)), REQUEST: fingerprint(request)}),
    "damaged": lambda request, earlier: sealed({"actions": np.ones((1, 1)), REQUEST: fingerprint(request)})[:-1] + b"?",
    "unsealed": lambda request, earlier: pack({"actions": np.ones((1, 1)), REQUEST: fingerprint(request)}),
    "of a damaged request": lambda request, earlier: sealed({"actions": np.ones((1, 1)), REQUEST: 1}),
}


@pytest.fixture
def port(request):
    """A server that says it is ours, and answers in the way the test names; `plain`: one that is not ours."""
    kind = getattr(request, "param", "right")

    def talk(connection):
        connection.send(pack({}) if kind == "plain" else sealed({"server": "robopolicy"}))
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
        with pytest.raises(ServingError, match=r"another request|checksum"):
            client.infer({"state": np.zeros(1)})


@contextmanager
def describing(said):
    """Yield the port of a server that says `said` of its policy, as it is when a connection is made."""

    def talk(connection):
        connection.send(sealed({"server": "robopolicy", **said}))
        for message in connection:
            connection.send(sealed({"actions": np.ones((1, 1)), REQUEST: fingerprint(message)}))

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
    said = dict(POLICY)
    with describing(said) as port, PolicyClient(port=port) as client:
        for _ in range(2):
            client.infer({"state": np.zeros(1)})
            client.close()
        said |= changes
        for _ in range(2):
            with pytest.raises(RefusedError, match=rf"another policy since .*\(other {text}\): it is not obeyed"):
                client.infer({"state": np.zeros(1)})
        assert client.metadata["fps"] == 20.0 and client.metadata["world"] == POLICY["world"]
        said |= POLICY
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
    assert whole_address(host, port, encrypted) == address


@pytest.mark.parametrize(
    ("host", "port", "encrypted", "text"),
    [
        ("wss://robot:1", 9201, False, "says port 1, and port is 9201"),
        ("http://robot", None, False, "begin with ws:// or wss://"),
        ("ws://robot", None, True, "A certificate is what a wss:// address"),
        ("robot:port", None, False, "no address of a server"),
    ],
)
def test_an_address_that_contradicts_itself_is_refused(host, port, encrypted, text):
    with pytest.raises(ConfigError, match=text):
        whole_address(host, port, encrypted)


def test_a_certificate_of_another_name_is_told_from_one_that_nobody_trusts():
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    said = {"IP address mismatch, certificate is not valid for '10.0.0.1'.": "subjectAltName"}
    for error.verify_message, text in (said | {"self-signed certificate": "drive.certificate"}).items():
        assert text in way_out("wss://10.0.0.1:8000", error)


def test_a_robot_waits_for_answers_as_long_as_it_has_patience_and_knows_the_environments_key(port, monkeypatch):
    monkeypatch.setenv("ROBOPOLICY_API_KEY", "of the environment")
    for own, patience, key in (("", 2.5, "of the environment"), ("own", 0.2, "own")):
        with connected(ServerAddress(port=port, api_key=own), patience) as client:
            assert client.timeout == max(patience, 1.0)
            assert client._headers == {"Authorization": f"Api-Key {key}"}
