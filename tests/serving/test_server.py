"""A real client against a real server in its own process."""

import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import websockets.sync.client
from served_policies import FRONT, KEEPALIVE, KEY, PLAIN, Echo, run_serve, run_servers
from websockets.exceptions import ConnectionClosedError

from robopolicy.client.policy_client import PolicyClient
from robopolicy.client.protocol import DELAY, PLAN, SEED, SESSION, pack, unpack
from robopolicy.core.errors import ConfigError, ServingError
from robopolicy.core.spec import STATE
from robopolicy.serving.server import ServerSettings, serve

pytestmark = pytest.mark.long


def observation(value: float, level: int = 7, **more):
    return {STATE: np.array([value, 0.0]), FRONT: np.full((4, 6, 3), level, np.uint8), **more}


@pytest.fixture(scope="module")
def ports():
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=run_servers, args=(there, PLAIN), daemon=True)
    process.start()
    assert here.poll(120), "the servers did not start"
    yield here.recv()
    here.send("stop")
    process.join(20)
    assert process.exitcode == 0


def get(port: int, path: str, key: str | None = None) -> tuple[int, str]:
    headers = {"Authorization": f"Api-Key {key}"} if key else {}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
        ) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def metric(port: int, name: str) -> float:
    lines = get(port, "/metrics")[1].splitlines()
    return float(next(line for line in lines if line.startswith(f"robopolicy_{name} ")).split()[1])


def wait_for(condition, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def test_answers_with_history_metadata_and_timing(ports):
    with PolicyClient(port=ports["open"]) as client:
        assert client.metadata["history"] == 2
        assert client.metadata["observation"][STATE]["shape"] == [2]
        first = client.infer(observation(3.0))
        assert first["actions"].shape == (4, 1)
        assert first["actions"].dtype == np.float32
        assert first["actions"][:, 0].tolist() == [3.0, 3.0, 7.0 + 1000 * len("push the cube"), 1.0]
        second = client.infer(observation(4.0, prompt="go"))
        assert second["actions"][:3, 0].tolist() == [4.0, 3.0, 2007.0]
        assert {"infer_ms", "prev_total_ms"} <= set(second["server_timing"])
        client.reset()
        assert client.infer(observation(2.0))["actions"][:2, 0].tolist() == [2.0, 2.0]
        whole = {**observation(0.0), STATE: np.array([[8.0, 0], [1.0, 0]])}
        assert client.infer(whole)["actions"][:2, 0].tolist() == [1.0, 8.0]


def test_sessions_keep_their_own_history(ports):
    with PolicyClient(port=ports["open"]) as client:
        client.infer(observation(1.0, **{SESSION: "left"}))
        client.infer(observation(2.0, **{SESSION: "right"}))
        answer = client.infer(observation(3.0, **{SESSION: "left"}))
        assert answer["actions"][:2, 0].tolist() == [3.0, 1.0]


def test_a_plan_follows_on_from_the_one_that_the_robot_executes(ports):
    state = {STATE: np.zeros(2)}
    with PolicyClient(port=ports["going_on"]) as client:
        assert (client.metadata["chunking"], client.metadata["prediction"]) == ("rtc", 8)
        assert client.infer(state)["actions"].shape == (4, 2)  # whoever says nothing of a plan gets chunks
        plan = client.infer({**state, PLAN: np.zeros((0, 2)), DELAY: 0, SEED: 1})["actions"]
        left = np.full((4, 2), 0.5)
        bound = client.infer({**state, PLAN: left, DELAY: 3, SEED: 1})["actions"]
        assert plan.shape == bound.shape == (8, 2)
        assert np.abs(bound[:3] - 0.5).mean() < 0.5 * np.abs(plan[:3] - 0.5).mean()
    with PolicyClient(port=ports["going_on"]) as client, pytest.raises(ServingError, match="from 0 to 4"):
        client.infer({**state, PLAN: left, DELAY: 5})
    with PolicyClient(port=ports["steady"]) as client, pytest.raises(ServingError, match=r"serve\.chunking=rtc"):
        client.infer({**state, PLAN: left, DELAY: 0})


def test_health_metrics_and_key(ports):
    assert get(ports["open"], "/healthz") == (200, "OK\n")
    assert get(ports["locked"], "/healthz") == (200, "OK\n")
    assert get(ports["locked"], "/metrics")[0] == 401
    assert "robopolicy_requests_total" in get(ports["locked"], "/metrics", KEY)[1]
    for wrong, message in ((None, "an API key, and none was given"), ("guess", "another API key")):
        with pytest.raises(ServingError, match=message):
            PolicyClient(port=ports["locked"], api_key=wrong)
    with PolicyClient(port=ports["locked"], api_key=KEY) as client:
        assert client.infer(observation(1.0))["actions"][0, 0] == 1.0
    before = metric(ports["open"], "requests_total")
    with PolicyClient(port=ports["open"]) as client:
        client.infer(observation(1.0))
    assert metric(ports["open"], "requests_total") == before + 1


BAD = {
    "missing camera": ({STATE: np.zeros(2)}, r"no camera 'front'.*images/front"),
    "misspelt field": ({STATE + "s": np.zeros(2)}, r"no field 'observation.state'.*Did you mean 'observation/states'"),
    "scalar state": (observation(0) | {STATE: 0}, r"observation/state' has shape \[\]"),
    "wrong size": (observation(0, level=0) | {FRONT: np.zeros((5, 6, 4), np.uint8)}, r"has shape \[5, 6, 4\]"),
    "float image": (observation(0) | {FRONT: np.full((4, 6, 3), 7.0)}, "float64 up to 7; .* needs uint8"),
    "not finite": (observation(np.nan), "not finite"),
    "policy error": (
        observation(-1.0),
        r"The policy failed \(RuntimeError\); see the server's log for error [0-9a-f]{8}",
    ),
    "non-finite answer": (observation(-2.0), "NaN or infinity"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_observations_are_told_to_their_client_only(ports, case):
    message, text = BAD[case]
    with PolicyClient(port=ports["open"]) as good, PolicyClient(port=ports["open"]) as bad:
        good.infer(observation(1.0))
        with pytest.raises(ServingError, match=text):
            bad.infer(message)
        assert good.infer(observation(2.0))["actions"][:2, 0].tolist() == [2.0, 1.0]
        assert bad.infer(observation(6.0))["actions"][0, 0] == 6.0


@pytest.mark.parametrize("data", [b"\xc1garbage", b"", "text", pack({"a": {"b": {}}})[:3], b"\x93\x01\x02\x03"])
def test_malformed_messages_close_with_1011(ports, data):
    with websockets.sync.client.connect(f"ws://127.0.0.1:{ports['open']}", compression=None) as connection:
        connection.recv()
        connection.send(data)
        assert isinstance(connection.recv(), str)
        with pytest.raises(ConnectionClosedError) as closed:
            connection.recv()
        assert closed.value.rcvd.code == 1011
    with PolicyClient(port=ports["open"]) as client:
        assert client.infer(observation(1.0))["actions"][0, 0] == 1.0


def test_slow_inference_neither_blocks_others_nor_kills_keepalive(ports):
    address = f"ws://127.0.0.1:{ports['slow']}"
    with websockets.sync.client.connect(address, compression=None, ping_interval=0.3, ping_timeout=0.3) as connection:
        connection.recv()
        connection.send(pack(observation(5.0)))
        started = time.monotonic()
        assert get(ports["slow"], "/healthz")[0] == 200
        assert time.monotonic() - started < 1.0
        assert unpack(connection.recv(timeout=20))["actions"][0, 0] == 5.0


def test_requests_that_wait_together_are_answered_together(ports):
    answers: dict[int, np.ndarray] = {}

    def ask(index: int) -> None:
        with PolicyClient(port=ports["slow"]) as client:
            answers[index] = client.infer(observation(5.0 + index))["actions"][:, 0]

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answers[index][0] for index in range(6)] == [5, 6, 7, 8, 9, 10]
    assert max(answer[3] for answer in answers.values()) > 1


def test_a_killed_client_and_a_silent_one_are_cleaned_up(ports):
    port = ports["slow"]
    wait_for(lambda: metric(port, "connections") == 0)
    program = (
        "import numpy as np; from robopolicy.client.policy_client import PolicyClient; "
        f"client = PolicyClient(port={port}); print('ready', flush=True); "
        f"client.infer({{'observation.state': np.array([5.0, 0]), '{FRONT}': np.zeros((4, 6, 3), np.uint8)}})"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.2)
        process.send_signal(signal.SIGKILL)
    silent = socket.create_connection(("127.0.0.1", port))
    silent.sendall(
        b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    assert b"101" in silent.recv(4096)
    assert metric(port, "connections") >= 1
    wait_for(lambda: metric(port, "connections") == 0, 20 * KEEPALIVE + 5)
    silent.close()
    with PolicyClient(port=port) as client:
        assert client.infer(observation(1.0))["actions"][0, 0] == 1.0


def test_client_timeout_reconnect_and_absent_server(ports):
    with PolicyClient(port=ports["slow"], timeout=0.3) as client:
        with pytest.raises(ServingError, match=r"no answer within 0\.3 s"):
            client.infer(observation(5.0))
        client.timeout = 20
        assert client.infer(observation(1.0))["actions"][0, 0] == 1.0
    with pytest.raises(ServingError, match="robopolicy serve CHECKPOINT"):
        PolicyClient(port=free_port(), patience=0.1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_serve_stops_in_order_and_clients_reconnect_after_a_restart():
    context = multiprocessing.get_context("spawn")
    port = free_port()
    client = None
    for number in (signal.SIGTERM, signal.SIGINT):
        here, there = context.Pipe()
        process = context.Process(target=run_serve, args=(there, port), daemon=True)
        process.start()
        assert here.poll(120)
        assert here.recv() == port
        if client is None:
            client = PolicyClient(port=port)
        assert client.infer(observation(3.0))["actions"][0, 0] == 3.0
        os.kill(process.pid, number)
        assert here.poll(20)
        assert here.recv() == "stopped"
        process.join(20)
        assert process.exitcode == 0
    client.close()


def test_a_server_ends_with_the_process_that_started_it_even_if_that_is_killed():
    program = (
        "import multiprocessing, sys, time; sys.path[:0] = sys.argv[1:2]; from served_policies import run_with_parent\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('spawn'); here, there = context.Pipe()\n"
        "    process = context.Process(target=run_with_parent, args=(there,)); process.start()\n"
        "    print(here.recv(), process.pid, flush=True); time.sleep(100)\n"
    )
    command = [sys.executable, "-c", program, os.path.dirname(__file__)]  # noqa: PTH120
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        port, server = map(int, parent.stdout.readline().split())
        assert get(port, "/livez")[0] == 200
        parent.kill()

    def gone() -> bool:
        try:
            os.kill(server, 0)
        except ProcessLookupError:
            return True
        return False

    wait_for(gone, 30)


def test_a_certificates_key_without_the_certificate_is_refused():
    with pytest.raises(ConfigError, match=r"certificate_key=key\.pem.*serve\.certificate=FILE"):
        ServerSettings(certificate_key=Path("key.pem"))
    with pytest.raises(ConfigError, match="line break"):
        ServerSettings(api_key="secret\n")


def test_taken_port_and_open_address_are_refused(ports):
    with pytest.raises(ServingError, match=r"Cannot listen on 127\.0\.0\.1:\d+.*serve\.port=PORT"):
        serve(Echo(), ServerSettings(port=ports["open"]))
    with pytest.raises(ServingError, match="Set an API key"):
        serve(Echo(), ServerSettings(host="0.0.0.0", port=0))


def test_the_driver_of_the_tutorial_drives(ports, capsys):
    text = (Path(__file__).parents[2] / "docs" / "tutorials" / "serve.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    code, removed = re.subn(r"^class Robot:.*?^robot = Robot\(\)$", "", code, flags=re.DOTALL | re.MULTILINE)
    assert removed == 1

    class Robot:
        sent: list[np.ndarray] = []  # noqa: RUF012

        def observe(self):
            return {STATE: np.zeros(2)}

        def send(self, action):
            self.sent.append(action)
            time.sleep(0.05)

    robot = Robot()
    exec(code, {"port": ports["steady"], "robot": robot})  # noqa: S102
    assert len(robot.sent) == 20
    assert np.abs(np.diff(robot.sent, axis=0)).max() <= 0.1 + 1e-9
    assert np.max(robot.sent, axis=0).tolist() == [0.5, 0.5]
    assert "None" in capsys.readouterr().out


def test_the_client_needs_no_torch():
    program = (
        "import sys, robopolicy.client.policy_client, robopolicy.client.driver; "
        "assert 'torch' not in sys.modules; assert 'rich' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
