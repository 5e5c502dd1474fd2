"""Robots in other processes that report to a console: who acts, what stops them, what the console refuses."""

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from robopolicy.client.driver import Driver
from robopolicy.client.policy_description import ActionLimits
from robopolicy.client.protocol import FAILURE, pack, unpack
from robopolicy.client.supervision import Supervised
from robopolicy.core.errors import SpecError
from robopolicy.core.spec import IMAGE_PREFIX, STATE, Field
from robopolicy.operators.assistance import Team
from robopolicy.operators.operator import Site
from robopolicy.operators.shared_control import Mode
from robopolicy.serving.configuration import ConsoleConfig
from robopolicy.serving.console.fleet import Fleet
from robopolicy.serving.console.robots import RobotReports
from robopolicy.serving.console.site import Console

ACTION = Field((2,), low=-1.0, high=1.0, names=("x_velocity", "y_velocity"))
FRAMES = {STATE: np.zeros(1, np.float32), IMAGE_PREFIX + "front": np.zeros((400, 640, 3), np.uint8)}


class Server:
    """Answers that the robot should move at a quarter of its speed, and what its detector says."""

    def __init__(self):
        self.failure = {"index": {"float": 0.25}, "alarms": []}
        fields = {STATE: Field((1,)).to_json()}
        self.metadata = {"observation": fields, "history": 1, "chunk": 2, "fps": 20.0, "action": ACTION.to_json()}

    def infer(self, observation):
        return {"actions": np.full((2, 2), 0.25), FAILURE: self.failure}


def fleet() -> Fleet:
    return Fleet(Team(0, {}, time.monotonic), Site(ACTION, 20.0, 1), [])


@pytest.fixture
def console() -> Iterator[Console]:
    with Console(fleet(), ConsoleConfig(port=0)) as running:
        yield running


def until(
    robot: Supervised, wanted: Callable[[np.ndarray], bool], order: Callable[[], object] = lambda: None
) -> np.ndarray:
    """Let the robot take control steps until its action is as wanted; order: is given before each."""
    end = time.monotonic() + 60
    order()
    while not wanted(action := robot.step(FRAMES)):
        order()
        assert time.monotonic() < end, f"the action stays {action}, in mode {robot.mode!r}: {robot.error}"
        time.sleep(0.01)
    return action


def test_a_robot_holds_still_until_it_hears_from_the_console_and_then_does_as_it_is_ordered(console):
    server, view = Server(), console.fleet
    address = console.address.replace("http", "ws")
    limits = ActionLimits(change=0.5)
    with Driver(server, wait=True, limits=limits) as driver, Supervised(driver, address, "arm", timeout=5) as robot:
        assert robot.step(FRAMES).tolist() == [0.0, 0.0]
        until(robot, lambda action: action[0] == 0.25)
        person = view.join()
        assert view.order(person, {"do": "take", "robot": 0}) == ""
        push = {"do": "axes", "axes": [0, -1]}
        first = until(robot, lambda action: action[1] < 0, lambda: view.order(person, push))
        assert first[0] == 0 and first[1] >= -0.5  # a person is bound by the limits, too
        until(robot, lambda action: view.robots[0].reached_ms is not None)  # its next report says so
        view.order(person, {"do": "hand_back", "robot": 0})
        until(robot, lambda action: action[1] == 0.25)
        server.failure = {"index": {"float": 0.9}, "alarms": ["float"]}
        until(robot, lambda action: not action.any())
        assert view.team.control.queue == [0] and view.robots[0].alarms == ("float",)
        assert view.robots[0].images["front"][1].shape == (200, 320, 3)
        view.order(person, {"do": "dismiss", "robot": 0})
        until(robot, lambda action: action[0] == 0.25)
        view.order(person, {"do": "stop"})
        until(robot, lambda action: robot.mode == Mode.STOPPED.label and not action.any())
        view.order(person, {"do": "release"})
        until(robot, lambda action: action[0] == 0.25)
        console.close()
        until(robot, lambda action: not action.any())
        robot.require_server()
    assert driver.counts["overridden"] > 0


def test_what_a_console_refuses(console):
    reports, row = RobotReports(fleet()), 0
    assert reports.join(pack({"name": "arm"})) == row
    for wrong in ({"name": ""}, {"name": "a\nb"}, {"name": 3}, {"name": "arm"}):
        with pytest.raises(SpecError):
            reports.join(pack(wrong))
    fine = {"mode": "autonomous", "action": np.zeros(2)}
    assert reports.exchange(row, pack(fine)) == {"mode": "autonomous"}
    actions = [{"action": np.zeros(3)}, {"action": np.full(2, np.nan)}]
    for each in (*actions, {"plan": np.zeros((1, 3))}, {"images": {"a": np.zeros(3)}}):
        with pytest.raises(SpecError):
            reports.exchange(row, pack({**fine, **each}))
    reports.leave(row)
    assert reports.fleet.robots[0].away
    assert "no connection" in reports.fleet.order(reports.fleet.join(), {"do": "take", "robot": 0})
    assert reports.join(pack({"name": "arm"})) == row and not reports.fleet.robots[0].away
    with connect(console.address.replace("http", "ws") + "robot", proxy=None) as socket:
        socket.send(pack({"name": "arm"}))
        socket.send(pack({"action": np.zeros(5)}))
        with pytest.raises(ConnectionClosed, match="shape"):
            while True:
                unpack(socket.recv(timeout=20))
