"""The client: an answer that is damaged, or belongs to another request, never reaches the robot."""

import threading

import numpy as np
import pytest
from websockets.sync.server import serve

from robopolicy.core.errors import ServingError
from robopolicy.serving.client import PolicyClient
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
