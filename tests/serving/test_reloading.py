"""A server in its own process: it records, tells who listens what happens, and takes new checkpoints."""

import asyncio
import json
import os
import shutil
import signal
import threading
import urllib.error
import urllib.request

import numpy as np
import pytest
from served_policies import KEY, ahead
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from robopolicy.client.executed import executed_report
from robopolicy.client.policy_client import PolicyClient
from robopolicy.client.protocol import EXECUTED, POLICY, SESSION
from robopolicy.core.errors import ConfigError
from robopolicy.core.spec import STATE
from robopolicy.core.storage import write_json
from robopolicy.data.lerobot_reading import read_columns, read_dataset
from robopolicy.policies.loading import load_policy, weights_hash
from robopolicy.serving.server import PolicyServer, ServerSettings
from robopolicy.serving.versions import LoadedPolicy
from robopolicy.verbs.serve import require_accepted

pytestmark = pytest.mark.long


def save(folder, change: float = 0.0) -> None:
    policy = ahead()
    for values in policy.parameters():
        values.data += change
    policy.save(folder)


class Server:
    """A server of the checkpoint in `folder`, in a thread; its port, and a function that runs in its event loop."""

    def __init__(self, folder, **settings):
        self.started = threading.Event()

        def load(name: str) -> LoadedPolicy:
            return LoadedPolicy(load_policy(folder), weights_hash(folder)[:8])

        async def main() -> None:
            self.stop, self.loop = asyncio.Event(), asyncio.get_running_loop()
            made = ServerSettings(port=0, **settings)
            self.server = PolicyServer(load(""), made, load=load, paths={"": folder}, others={"other": load("")})
            await self.server.run(self.stop, self.ready)

        self.thread = threading.Thread(target=lambda: asyncio.run(main()))

    def ready(self, port: int) -> None:
        self.port = port
        self.started.set()

    def __enter__(self):
        self.thread.start()
        assert self.started.wait(120)
        return self

    def __exit__(self, *_):
        self.loop.call_soon_threadsafe(self.stop.set)
        self.thread.join()

    def get(self, path: str, key: str = "") -> tuple[int, str]:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}")
        if key:
            request.add_header("Authorization", f"Api-Key {key}")
        try:
            with urllib.request.urlopen(request) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()


def until(events, name: str) -> dict:
    while (event := json.loads(events.recv(timeout=60)))["event"] != name:
        pass
    return event


def state(value: float = 0.1) -> dict:
    return {STATE: np.full(2, value, np.float32)}


def test_a_checkpoint_that_is_replaced_is_served_to_open_connections(tmp_path):
    folder = tmp_path / "checkpoint"
    save(folder)
    with Server(folder, api_key=KEY, reload_on_change=True, probation=0.1) as server:
        with pytest.raises(InvalidStatus, match="401"):
            connect(f"ws://127.0.0.1:{server.port}/events")
        header = {"Authorization": f"Api-Key {KEY}"}
        with (
            connect(f"ws://127.0.0.1:{server.port}/events", additional_headers=header) as events,
            PolicyClient(port=server.port, api_key=KEY) as client,
        ):
            first = weights_hash(folder)[:8]
            assert json.loads(events.recv())["policies"][0]["current"]["version"] == first
            assert client.infer(state())[POLICY] == client.metadata["policy"] == first
            assert until(events, "answer")["policy"] == first
            save(tmp_path / "next", 0.01)
            shutil.rmtree(folder)
            (tmp_path / "next").rename(folder)
            second = weights_hash(folder)[:8]
            assert until(events, "policy on probation")["policy"] == second != first
            assert client.infer(state())[POLICY] == second
            until(events, "policy promoted")
            (folder / "model.safetensors").write_bytes(b"broken")
            assert until(events, "policy refused")["reason"]
            assert server.get("/reload?policy=other", KEY)[0] == 202
            until(events, "policy refused")
            assert client.infer(state())[POLICY] == second
            with PolicyClient(f"ws://127.0.0.1:{server.port}/policies/other", api_key=KEY) as other:
                assert other.infer(state())[POLICY] == f"other {first}"
        described = {each["name"]: each for each in json.loads(server.get("/policies", KEY)[1])}
        assert (described[""]["current"]["version"], described["other"]["candidate"]) == (second, None)
        assert server.get("/reload?policy=nobody", KEY)[0] == 404
        assert f'robopolicy_answers_total{{policy="",version="{second}"}} 2.0' in server.get("/metrics", KEY)[1]


def test_without_a_key_nobody_reloads_over_the_network(tmp_path):
    save(tmp_path / "checkpoint")
    with Server(tmp_path / "checkpoint") as server:
        assert server.get("/reload")[0] == 403
        with pytest.raises(InvalidStatus, match="403"):
            connect(f"ws://127.0.0.1:{server.port}/events", origin="https://evil.example")


def test_what_robots_report_and_what_others_are_answered_is_recorded(tmp_path):
    save(tmp_path / "checkpoint")

    def step(number: int) -> dict:
        value = 1 + 0.25 * number
        return {
            "observation": state(value),
            "action": np.full(2, value),
            "operator": "anna",
            "actor": 1,
            "step": number,
            "segment": 2,
            "held": number > 2,
            "plan_step": 1,
            "time": 1e9 + number,
        }

    with Server(tmp_path / "checkpoint", record=tmp_path / "data") as server:
        with PolicyClient(port=server.port) as client:
            assert client.metadata["records"]
            for numbers in ([], [0, 1], [1, 2], [3]):  # the second report of a step is skipped
                report = executed_report([step(number) for number in numbers])
                answer = client.infer({**state(), EXECUTED: report})
            client.reset()
            for value in range(2):
                client.infer({**state(value), SESSION: "plain"})
        recorders = dict(server.server.recordings._recorders)
    for recorder in recorders.values():
        recorder._process.wait()
        assert not recorder.error and not recorder.dropped
    episodes = read_dataset(tmp_path / "data")
    assert (episodes.lengths.tolist(), episodes.fps) == ([4], 20.0)
    assert episodes.actions[:, 0].tolist() == episodes.observation[STATE][:4, 0].tolist() == [1.0, 1.25, 1.5, 1.75]
    assert episodes.actor.tolist() == [1] * 4 and episodes.segment.tolist() == [2] * 4
    columns = read_columns(tmp_path / "data", ["held", "plan.step", "latency_ms"])
    assert columns["held"].tolist() == [False, False, False, True] and columns["plan.step"].tolist() == [1] * 4
    assert (columns["latency_ms"] > 0).all()
    decisions = read_dataset(tmp_path / "data-decisions")
    assert (decisions.lengths.tolist(), decisions.fps) == ([2], 5.0)
    plans = read_columns(tmp_path / "data-decisions", ["plan"])["plan"]
    np.testing.assert_array_equal(plans[:, :2], decisions.actions)
    assert answer["actions"].shape == (4, 2)


def test_only_what_the_gate_accepted_is_loaded(tmp_path):
    verdict = {"candidate_weights": "abc", "gate": {"accepted": False, "reasons": ["it is worse"]}}
    with pytest.raises(ConfigError, match="no verdict"):
        require_accepted(tmp_path, "abc")
    write_json(tmp_path / "result.json", verdict)
    with pytest.raises(ConfigError, match="it is worse"):
        require_accepted(tmp_path, "abc")
    verdict["gate"]["accepted"] = True
    write_json(tmp_path / "result.json", verdict)
    require_accepted(tmp_path, "abc")
    with pytest.raises(ConfigError, match="no verdict"):
        require_accepted(tmp_path, "other")


def test_a_signal_loads_the_checkpoint_again(monkeypatch):
    from robopolicy.serving import server as module

    calls = []

    class Fake:
        def __init__(self, *_, **__): ...

        def reload(self):
            calls.append("reload")
            os.kill(os.getpid(), signal.SIGTERM)

        async def run(self, stop, on_ready):
            os.kill(os.getpid(), signal.SIGHUP)
            await stop.wait()

    monkeypatch.setattr(module, "PolicyServer", Fake)
    monkeypatch.setattr(module, "log_to_stderr", lambda: None)
    module.serve(None, ServerSettings(port=0))  # pyright: ignore[reportArgumentType]
    assert calls == ["reload"]
