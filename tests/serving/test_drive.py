"""The simulated robot: histories at the control rate, prefetching, deadlines, refusals."""

import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from robopolicy.cli import main
from robopolicy.client.holding import holding, with_served_hold
from robopolicy.client.protocol import SESSION
from robopolicy.configuration.sections.serve import DriveSection
from robopolicy.core.errors import ConfigError, NonFiniteError, RobopolicyWarning, ServingError, SpecError
from robopolicy.core.spec import IMAGE_PREFIX, QUEUE, STATE, TASK, Field, WorldSpec
from robopolicy.core.world import Step
from robopolicy.serving.configuration import RobotSettings
from robopolicy.serving.drive import drive
from robopolicy.verbs.drive import _figures, _settings

FRONT = IMAGE_PREFIX + "top"


class Counter:
    """State counts control steps; success if every action equals the state it was meant for; 9 steps an episode."""

    def __init__(self, batch_size=1):
        self.spec = WorldSpec("counter", {STATE: Field((1,))}, Field((1,)), 5.0, 9)
        self.batch_size = batch_size
        self.count, self.right = np.zeros(batch_size), np.ones(batch_size, bool)

    def _observe(self):
        return {STATE: self.count[:, None, None].astype(np.float32), TASK: np.array(["count"] * self.batch_size)}

    def reset(self, rows=None, seeds=None, options=None):
        self.count[:], self.right[:] = 0, True
        return self._observe()

    def step(self, actions):
        live = self.count < 9
        self.right &= ~live | (actions[:, 0, 0] == self.count)
        self.count += live
        over = self.count >= 9
        return Step(self._observe(), {}, {}, live[:, None], over, np.zeros_like(over), over & self.right)

    def close(self):
        pass


class Forecaster:
    """Answers the next five states; checks that it is shown three consecutive frames."""

    def __init__(self, delay=0.0, bad=False):
        fields = {STATE: Field((1,)).to_json()}
        self.metadata = {"observation": fields, "history": 3, "chunk": 5, "fps": 5.0, "action": Field((1,)).to_json()}
        self.delay, self.bad, self.seen = delay, bad, []

    def infer(self, observation):
        time.sleep(self.delay)
        frames = observation[STATE][:, 0]
        assert observation[TASK] == "count"
        assert frames.tolist() == [max(0, frames[-1] - 2), max(0, frames[-1] - 1), frames[-1]]
        self.seen.append(int(frames[-1]))
        return {"actions": (frames[-1] + np.arange(5.0))[:, None] * (np.nan if self.bad else 1.0)}


@pytest.mark.parametrize(("prefetch", "seen"), [(0, [0, 5]), (2, [0, 3, 6])])
@pytest.mark.parametrize("rows", [1, 3])
def test_actions_arrive_for_the_frame_they_were_made_for(prefetch, seen, rows):
    client = Forecaster()
    result = drive(Counter(rows), client, np.arange(4), robot=RobotSettings(prefetch=prefetch))
    assert (result["episodes"], result["successes"], result["steps"]) == (4, 4, 36)
    assert sorted(set(client.seen)) == seen
    assert result["requests"] == 4 * len(seen)
    assert set(result["latency_ms"]) == {"p50", "p90", "p99", "max"}


def test_a_robot_that_asks_too_late_holds_still_and_one_that_asks_ahead_does_not():
    late = drive(Counter(), Forecaster(delay=0.3), [1], rate=5.0, robot=RobotSettings(max_observation_age=10.0))
    ahead = drive(
        Counter(), Forecaster(delay=0.3), [1], rate=5.0, robot=RobotSettings(prefetch=4, max_observation_age=10.0)
    )
    assert late["held"] >= 1
    assert late["successes"] == 0
    assert ahead["held"] == 0
    assert ahead["successes"] == 1
    assert late["wall_seconds"] > 9 / 5


def test_what_is_held_lets_nothing_go():
    names, last = ("x", "y", "gripper"), np.array([0.3, -0.2, 0.9])
    held = lambda **chosen: holding(RobotSettings(**chosen), names, 3)({}, last).tolist()  # noqa: E731
    assert held() == [0.0, 0.0, 0.9]
    assert held(positions=("y",)) == [0.0, -0.2, 0.0]
    assert held(hold="last") == last.tolist()
    assert holding(RobotSettings(), names, 3)({}, None).tolist() == [0.0] * 3  # nothing was done yet
    assert holding(RobotSettings(), (), 3)({}, last).tolist() == [0.0] * 3
    assert holding(RobotSettings(hold="last"), (), 3)({}, last).tolist() == last.tolist()


def test_elements_that_are_not_there_cannot_keep_their_value():
    for names, text in ((("x", "gripper"), "Did you mean 'gripper'"), ((), "have no names")):
        with pytest.raises(
            ConfigError, match=f"positions contains 'griper', which is not an element of the action.*{text}"
        ):
            holding(RobotSettings(positions=("griper",)), names, 2)
    with pytest.raises(ConfigError, match="positions contains 'nonsense'"):
        drive(Carrier(), Forecaster(), [1], robot=RobotSettings(positions=("nonsense",)))


def test_what_is_held_is_what_the_policy_was_trained_with():
    metadata = {"world": {"name": "arm", "options": {"latency_steps": 3, "latency_hold": "last"}}}
    assert with_served_hold(RobotSettings(), metadata).hold == "last"
    assert with_served_hold(RobotSettings(hold="zero"), metadata).hold == "zero"
    for unsaid in ({}, {"world": None}, {"world": {"name": "arm", "options": {}}}, {"world": "arm"}):
        assert (
            with_served_hold(RobotSettings(), unsaid).hold == "auto"
        )  # zero in a simulator, and an attached robot asks


class Carrier(Counter):
    """Succeeds where its gripper was closed at every step."""

    def __init__(self):
        super().__init__()
        self.closed = np.ones(1, bool)
        self.spec = WorldSpec("carrier", {STATE: Field((1,))}, Field((1,), names=("gripper",)), 5.0, 9)

    def step(self, actions):
        self.closed &= actions[:, 0, 0] >= 0.5
        step = super().step(actions)
        return replace(step, success=step.terminated & self.closed)


def test_a_gripper_stays_closed_while_its_server_thinks():
    for positions, held in ((("gripper",), 1), ((), 0)):
        server = Forecaster(delay=0.3)
        server.infer = lambda observation, slow=server.infer: {"actions": np.ones_like(slow(observation)["actions"])}
        settings = RobotSettings(max_observation_age=10.0, positions=positions)
        result = drive(Carrier(), server, [1], rate=5.0, robot=settings)
        assert result["held"] >= 1
        assert result["successes"] == held


def test_a_server_quicker_than_half_a_control_step_needs_no_asking_ahead():
    result = drive(Counter(), Forecaster(delay=0.02), [1], rate=5.0, robot=RobotSettings())
    assert (result["held"], result["successes"], result["requests"]) == (0, 1, 2)


@pytest.mark.parametrize("rate", [0.0, 5.0])
def test_a_server_that_falls_silent_ends_the_drive_after_patience(rate):
    silent, server = threading.Event(), Forecaster()
    answer = server.infer
    server.infer = lambda message: silent.wait(20) if server.seen else answer(message)
    started = time.monotonic()
    with pytest.raises(ServingError, match=r"not answered for more than 0\.5 s \(drive\.server_timeout\)"):
        drive(Counter(), server, [1], rate=rate, robot=RobotSettings(server_timeout=0.5))
    assert 0.4 < time.monotonic() - started < 5.0
    silent.set()


def test_a_world_that_the_policy_was_not_trained_for_is_told_from_the_one_that_it_was():
    client = Forecaster()
    client.metadata["observation"] = {STATE: Field((3,)).to_json()}
    with pytest.raises(SpecError, match=r"with shape \[3\], but 'counter' outputs \[1\].*Set the world .* world=NAME"):
        drive(Counter(), client, [1])
    client.metadata["world"] = {"name": "push_t", "options": {}}
    with pytest.raises(SpecError, match="It was trained in 'push_t', which is used if no world is set"):
        drive(Counter(), client, [1])
    client = Forecaster()
    client.metadata["action"] = Field((2,)).to_json()
    with pytest.raises(SpecError, match=r"have shape \[2\].*world=NAME"):
        drive(Counter(), client, [1])


def test_failures_of_the_server_are_printed():
    client, failed = Forecaster(), []
    answer = client.infer

    def infer(message):
        if not failed:
            failed.append(message)
            raise ServingError("a moment, please")
        return answer(message)

    client.infer = infer
    result = drive(Counter(), client, [1])
    assert result["failures"] == 1
    assert _figures(result).endswith("; 1 server failures")


SECTION = {
    "drive.rename": {"rename": {"a": "b"}},
    "drive.seconds, drive.frozen_camera_timeout": {"seconds": 3.0, "frozen_camera_timeout": 2.0},
    "drive.task": {"task": "push"},
    "drive.rate=-1 is only for simulated robots": {"rate": -1.0, "robot": "so101_follower"},
    "drive.rate=-2 must be": {"rate": -2.0},
    "drive.rate=nan must be": {"rate": float("nan")},
    "drive.episodes=0 must be at least 1": {"episodes": 0},
    "drive.seconds=0 must be": {"seconds": 0.0, "robot": "so101_follower"},
    "drive.frozen_camera_timeout=-1 must be": {"frozen_camera_timeout": -1.0, "robot": "so101_follower"},
    "server_timeout=0.0 must be": {"server_timeout": 0.0},
}


@pytest.mark.parametrize("text", SECTION)
def test_settings_that_mean_nothing_are_refused_before_anything_is_connected(text):
    with pytest.raises(ConfigError, match=text):
        DriveSection(**SECTION[text])
    DriveSection(robot="so101_follower", rename={"a": "b"}, seconds=3.0, task="push", frozen_camera_timeout=2.0)
    DriveSection(rate=-1.0)


def test_what_does_not_fit_is_refused():
    class Blind(Counter):
        def __init__(self):
            super().__init__()
            self.spec = WorldSpec("blind", {"observation.states": Field((1,))}, Field((1,)), 5.0, 9)

    with pytest.raises(SpecError, match=r"needs 'observation\.state'.*Did you mean"):
        drive(Blind(), Forecaster(), [1])
    with pytest.raises(ConfigError, match="prefetch must be between 0 and 4"):
        drive(Counter(), Forecaster(), [1], robot=RobotSettings(prefetch=5))
    with pytest.raises(NonFiniteError):
        drive(Counter(), Forecaster(bad=True), [1])


def test_robots_behind_one_connection_are_told_apart():
    client = Forecaster()
    named: list[str] = []
    answer, client.infer = client.infer, lambda message: (named.append(message.pop(SESSION, "")), answer(message))[1]
    drive(Counter(2), client, np.arange(2))
    assert set(named) == {"0", "1"}
    named.clear()
    drive(Counter(1), client, np.arange(1))
    assert set(named) == {""}


def test_a_prefetch_that_cannot_be_is_refused_and_one_that_is_not_used_is_named():
    def settings(**said):
        client = Forecaster()
        client.metadata |= said
        config = SimpleNamespace(drive=DriveSection(prefetch=50))
        return client, _settings(cast(Any, config), cast(Any, client))

    client, asked = settings()
    with pytest.raises(ConfigError, match="prefetch must be between 0 and 4: chunks have 5 steps"):
        drive(Counter(), client, [1], robot=asked)
    with pytest.warns(
        RobopolicyWarning, match=r"drive\.prefetch=50 has no effect: .* a chunk of its predicted actions"
    ):
        _, asked = settings(chunking="rtc", prediction=8)
    assert asked.prefetch == 0
    queue = Field((3,)).to_json()
    with pytest.warns(RobopolicyWarning, match="according to the latency that it was trained for"):
        settings(observation={STATE: Field((1,)).to_json(), QUEUE: queue})


@pytest.mark.parametrize(
    ("chosen", "named"),
    [
        ({"hold": "last"}, "drive.hold=last"),
        ({"blend": 2}, "drive.blend=2"),
        ({"max_observation_age": 1.0, "rate": -1.0}, "max_observation_age=1"),
    ],
)
def test_settings_that_change_nothing_are_named(chosen, named):
    client = Forecaster()
    client.metadata["action"] = Field((1,), names=("x.vel",)).to_json()
    config = SimpleNamespace(drive=DriveSection(**chosen))
    with pytest.warns(RobopolicyWarning, match=f"{named} has no effect"):
        _settings(cast(Any, config), cast(Any, client))


class Seeing:
    """A connection to a server whose policy sees by a camera of 16 px."""

    def __init__(self, *address, **options):
        fields = {STATE: Field((6,)).to_json(), FRONT: Field((16, 16, 3), "uint8").to_json()}
        self.metadata = {"observation": fields, "history": 1, "chunk": 5, "fps": 10.0, "action": Field((2,)).to_json()}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def infer(self, observation):
        assert observation[FRONT].shape == (1, 16, 16, 3) and observation[FRONT].any()
        return {"actions": np.zeros((5, 2))}


def test_a_policy_that_sees_brings_its_cameras_to_the_world(monkeypatch, capsys):
    monkeypatch.setattr("robopolicy.client.policy_client.PolicyClient", Seeing)
    assert main(["drive", "world=reach_planar", "drive.episodes=1", "drive.rate=-1"]) == 0, capsys.readouterr().err
