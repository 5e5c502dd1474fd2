"""Proxies of the environment: this machine is never reached through one, and their faults are not the server's."""

import os
import re
import socket
import threading
import warnings
from contextlib import contextmanager

import numpy as np
import pytest
from websockets.sync.server import serve

from robopolicy.client.policy_client import PolicyClient, is_this_machine, proxy_for
from robopolicy.client.protocol import REQUEST, checksum, pack_with_checksum
from robopolicy.core.errors import ConfigError, RobopolicyError, RobopolicyWarning, ServingError
from robopolicy.serving.configuration import ServerConfig

FAR = "192.0.2.1"
"""An address that belongs to nobody (RFC 5737)."""


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch):
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def port():
    """A policy server on 127.0.0.1."""

    def talk(connection):
        connection.send(pack_with_checksum({"server": "robopolicy"}))
        for message in connection:
            connection.send(pack_with_checksum({"actions": np.ones((1, 1)), REQUEST: checksum(message)}))

    with serve(talk, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.socket.getsockname()[1]
        server.shutdown()


@contextmanager
def proxy(answer: bytes, to: int | None = None):
    """Yield the address of a proxy that answers every connection so, and then passes on what is said to port `to`."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def passed(one, other):
            while data := one.recv(65536):
                other.sendall(data)

        def run():
            while True:
                try:
                    client, _ = listening.accept()
                except OSError:
                    return
                with client:
                    asked.append(client.recv(65536).splitlines()[0].decode())
                    client.sendall(answer)
                    if to is not None:
                        with socket.create_connection(("127.0.0.1", to)) as server:
                            back = threading.Thread(target=passed, args=(server, client), daemon=True)
                            back.start()
                            passed(client, server)

        asked: list[str] = []
        threading.Thread(target=run, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", asked
        listening.shutdown(socket.SHUT_RDWR)


def refused(**options) -> str:
    """What a client says that does not come through, its patience short."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RobopolicyWarning)
        with pytest.raises(ServingError) as caught:
            PolicyClient(**{"host": FAR, "patience": 0.2, "timeout": 2.0, **options})
    return str(caught.value)


NAMES = ("https_proxy", "HTTPS_PROXY", "http_proxy", "all_proxy", "ws_proxy", "wss_proxy", "socks_proxy", "SOCKS_PROXY")


@pytest.mark.parametrize("name", NAMES)
def test_this_machine_is_reached_through_no_proxy_whatever_the_environment_says(port, name, monkeypatch):
    monkeypatch.setenv(name, "socks5h://127.0.0.1:9" if "socks" in name.lower() else "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "example.org")
    for host in ("127.0.0.1", "localhost", f"ws://LOCALHOST:{port}/"):
        with PolicyClient(host, port) as client:
            assert client.infer({"state": np.zeros(1)})["actions"].tolist() == [[1.0]]


@pytest.mark.parametrize(
    ("host", "own"),
    [
        *((each, True) for each in ("127.0.0.1", "127.8.9.1", "127.1", "::1", "[::1]", "::ffff:127.0.0.1", "0.0.0.0")),
        *((each, True) for each in ("localhost", "LocalHost.", "arm.localhost", socket.gethostname())),
        *(
            (each, False)
            for each in ("192.168.0.7", "10.127.0.1", "robot", "localhost.example", "127.example", "fe80::1%a")
        ),
        *((each, False) for each in ("128.0.0.1", "", "::2")),
    ],
)
def test_what_this_machine_is(host, own):
    assert is_this_machine(host) == own


def test_which_proxy_is_used_and_what_goes_around_it(monkeypatch):
    assert proxy_for(f"ws://{FAR}:8000") is None
    monkeypatch.setenv("HTTP_PROXY", "web:3128")
    assert str(proxy_for(f"ws://{FAR}:8000")) == "the proxy http://web:3128 from HTTP_PROXY"
    assert proxy_for(f"wss://{FAR}:8000") is None
    monkeypatch.setenv("https_proxy", "http://me:secret@web:3128")
    assert str(proxy_for(f"wss://{FAR}")) == "the proxy http://web:3128 from https_proxy"
    assert "secret" in proxy_for(f"wss://{FAR}").url
    monkeypatch.setenv("socks_proxy", "http://web:1080")
    assert str(proxy_for(f"ws://{FAR}")) == "the proxy socks5h://web:1080 from socks_proxy"
    monkeypatch.setenv("no_proxy", f"example.org,{FAR}")
    assert proxy_for(f"ws://{FAR}:8000") is None


def test_a_server_is_reached_through_a_proxy_and_whoever_can_read_along_is_named(port, monkeypatch):
    with proxy(b"HTTP/1.1 200 OK\r\n\r\n", port) as (address, asked):
        monkeypatch.setenv("https_proxy", address)
        with pytest.warns(RobopolicyWarning, match=rf"{address} from https_proxy, .* your API key.*no_proxy={FAR}"):
            client = PolicyClient(FAR, api_key="key")
        with client:
            assert client.infer({"state": np.zeros(1)})["actions"].tolist() == [[1.0]]
    assert asked == [f"CONNECT {FAR}:8000 HTTP/1.1"]


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n", r"from https_proxy refuses .* \(HTTP 403\)"),
        (b"HTTP/1.1 407 Login\r\nContent-Length: 0\r\n\r\n", r"requires a login: http://USER:PASSWORD@HOST:PORT"),
        (b"HTTP/1.1 502 Bad\r\nContent-Length: 0\r\n\r\n", r"HTTP 502"),
        (b"nonsense\r\n\r\n", "HTTP response from proxy"),
        (b"", "HTTP response from proxy"),
        (
            b"HTTP/1.1 200 OK\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
            r"through the proxy .* did not receive a valid HTTP response\.",
        ),
    ],
    ids=["forbidden", "login", "bad gateway", "nonsense", "closes", "page"],
)
def test_what_a_proxy_does_wrong_is_not_taken_for_the_servers_fault(answer, text, monkeypatch):
    with proxy(answer) as (address, _):
        monkeypatch.setenv("https_proxy", address.replace("//", "//me:secret@"))
        message = refused()
    assert address in message and f"ws://{FAR}:8000" in message and f"no_proxy={FAR} bypasses it" in message
    assert "secret" not in message and "Start it first" not in message
    assert re.search(text, message), message


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("https_proxy", "http://127.0.0.1:9", "no proxy listens at the proxy http://127.0.0.1:9 from https_proxy"),
        ("https_proxy", "ftp://127.0.0.1:9", "https_proxy is not a proxy address"),
        ("https_proxy", "http://127.0.0.1:9/path", "write https_proxy=http://HOST:PORT"),
        ("https_proxy", "http://nobody.invalid:9", "through the proxy http://nobody.invalid:9 from https_proxy"),
        ("https_proxy", "http://127.0.0.1:99999", "https_proxy"),
        ("socks_proxy", "socks5h://127.0.0.1:9", "socks_proxy"),
    ],
)
def test_a_proxy_that_is_none_is_named(name, value, text, monkeypatch):
    monkeypatch.setenv(name, value)
    message = refused()
    assert text in message and f"no_proxy={FAR} bypasses it" in message and "Start it first" not in message


def test_a_socks_proxy_names_the_package_that_it_needs(monkeypatch):
    def without(*arguments, **options):
        raise ImportError("connecting through a SOCKS proxy requires python-socks")

    monkeypatch.setattr("websockets.sync.client.connect_socks_proxy", without)
    monkeypatch.setenv("socks_proxy", "socks5h://127.0.0.1:9")
    assert "pip install python-socks" in refused()


@pytest.mark.parametrize(
    "options",
    [
        {"port": -1},
        {"port": 99999},
        {"host": "a" * 300},
        {"host": "a b"},
        {"host": "ws://[::1"},
        {"host": "ws://a:99999"},
        {"host": "ws://"},
        {"host": ""},
        {"host": "ä" * 70},
    ],
)
def test_addresses_of_nobody_end_in_a_sentence(options):
    with pytest.raises(RobopolicyError, match=r"\w{4,}.* .*\."):
        PolicyClient(**{"host": "127.0.0.1", "patience": 0.1, "timeout": 2.0, **options})


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("key\r\nX: y", "contains a line break"),
        ("key ", "starts or ends with a space"),
        (" ", "starts or ends with a space"),
        ("鍵" * 8, "outside Latin-1"),
        ("x" * 9000, "has 9000 characters"),
    ],
)
def test_a_key_that_no_header_can_carry_is_refused_on_both_sides(port, key, text):
    """A header's ends are stripped: the right key with a space at its end would count as a wrong one for ever."""
    for made in (lambda: PolicyClient(port=port, api_key=key), lambda: ServerConfig(api_key=key)):
        with pytest.raises(ConfigError, match=f"API key .*{text}"):
            made()


def test_an_address_with_a_space_in_it_is_named():
    """Else what answers nothing sensible is taken for a server with a certificate."""
    for host in ("127.0.0.1/x y", "ws://127.0.0.1:8000/x\n", "127.0.0.1 "):
        with pytest.raises(ConfigError, match="contains a space or a line break"):
            PolicyClient(host)
