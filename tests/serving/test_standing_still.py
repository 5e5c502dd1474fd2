"""A robot that is held or stopped stands still: positions stay where they are, velocities and forces go to zero."""

import multiprocessing
import os
import signal
from typing import Any, cast

import numpy as np
import pytest
import torch
from misbehaving import POLICY_FAULTS, Base, run_moody

from robopolicy.client.element_kinds import Kind, keeps_value, kind_of, unit_of
from robopolicy.client.element_mapping import ElementMapping, map_elements
from robopolicy.client.holding import holding
from robopolicy.client.lerobot_robot import AttachedLeRobot, drive_robot
from robopolicy.client.policy_client import PolicyClient
from robopolicy.configuration.sections.serve import DriveSection
from robopolicy.core.errors import ConfigError, NonFiniteError, RobopolicyError, ServingError
from robopolicy.core.spec import STATE
from robopolicy.core.structured import from_plain
from robopolicy.serving.configuration import AttachedRobot, RobotSettings

RATES = [
    "x.vel",
    "y.vel",
    "theta.vel",
    "mobile_base.vx",
    "mobile_base.vtheta",
    "left_joint_1.vel",
    "joint_1.torque",
    "arm.effort",
    "gripper.current",
    "linear_velocity",
    "angular_velocity",
    "wheel_rpm_0",
    "jointVelocity",
    "yaw_rate",
    "cmd_vel_x",
    "twist.linear.x",
    "angular.z",
    "remote.lx",
    "xvel",
    "q_dot",
    "dq_3",
    "delta_x",
    "dx",
    "base_speed",
    "leftWheelRPM",
    "throttle",
    "gripper_vel",
    "dpos_x",
    "Δx",
    "drot_z",
]
PLACES = [
    "shoulder_pan.pos",
    "left_gripper.pos",
    "right_elbow.pos",
    "kLeftHipPitch.q",
    "gripper",
    "left_gripper",
    "elbow_angle",
    "current_position",
    "wrist_twist.pos",
    "swivel.pos",
]


@pytest.mark.parametrize("name", RATES)
def test_what_moves_a_robot_stops_at_zero_by_its_name(name):
    assert kind_of(name) is Kind.RATE
    assert kind_of(name, shown=True) is Kind.RATE


@pytest.mark.parametrize("name", PLACES)
def test_positions_stay_at_their_place_by_their_name(name):
    assert kind_of(name) is Kind.POSITION


@pytest.mark.parametrize(
    "name", ["delta_pos_x", "relative_position", "d_pos_x", "deltaPosX", "velocity_q1", "torque_angle", "dq_pos"]
)
def test_a_place_after_a_rate_or_difference_is_asked_for(name):
    assert kind_of(name) is Kind.UNKNOWN and kind_of(name, "rad", shown=True) is Kind.UNKNOWN
    assert kind_of(name, "rad/s") is Kind.RATE


@pytest.mark.parametrize("name", ["swivel", "shovel", "lift_level", "finger_travel"])
def test_words_that_end_like_vel_are_no_velocity(name):
    assert kind_of(name) is Kind.UNKNOWN and kind_of(name, "rad", shown=True) is Kind.POSITION


@pytest.mark.parametrize(
    "unit",
    [
        "m/frame",
        "cm/tick",
        "deg per cycle",
        "rad_per_s",
        "mps",
        "km/h",
        "kph",
        "per mille of top speed",
        "m/s",
        "rad/s",
        "deg / s",
        "N",
        "Nm",
        "N m",
        "A",
        "mA",
        "share of 0.4 m/s",
        "rpm",
        "V",
    ],
)
def test_a_unit_says_it_where_the_name_does_not(unit):
    assert kind_of("motor_0", unit) is Kind.RATE
    assert kind_of("motor_0.pos", unit) is Kind.UNKNOWN  # the two disagree
    assert kind_of("motor_0", "rad", shown=True) is Kind.POSITION
    assert kind_of("motor_0", "rad") is Kind.UNKNOWN  # or a difference
    assert kind_of("motor_0") is Kind.UNKNOWN


def test_a_unit_speaks_of_every_element_or_of_those_that_it_names():
    assert unit_of("rad, m/s", ("pan", "x")) == {"pan": "rad", "x": "m/s"}
    assert unit_of("m", ("x", "y")) == {"x": "m", "y": "m"}
    assert unit_of("rad, rad/s", ("a", "b", "c")) == {}
    assert unit_of("x, y: moves by 0.02 m; gripper: -1 closed", ("y", "gripper")) == {
        "y": "moves by 0.02 m",
        "gripper": "-1 closed",
    }


def test_the_wiring_stops_a_velocity_that_is_shown():
    wiring = ElementMapping({}, {}, ("shoulder.pos", "x.vel"), {}, {"action": ""})
    shown = {"shoulder.pos": 10.0, "x.vel": 0.3}
    assert wiring.still(shown, np.zeros(2)).tolist() == [10.0, 0.0]
    assert wiring.still(shown, np.array([5.0, 0.4])).tolist() == [10.0, 0.0]
    assert wiring.still({**shown, "shoulder.pos": np.nan}, np.array([5.0, 0.4])).tolist() == [5.0, 0.0]


@pytest.mark.parametrize("kind", [float, np.float32, lambda value: np.array([value]), torch.tensor, str])
def test_the_wiring_holds_a_place_whatever_holds_its_number(kind):
    """Some robots show arrays or tensors of one number: where they are, and not where they were sent last."""
    wiring = ElementMapping({"s": ("a.pos",)}, {}, ("a.pos",), {}, {"action": "", "s": ""})
    shown = {"a.pos": kind(10.0)}
    assert wiring.frames(shown)["s"].tolist() == [10.0]
    assert wiring.placed(shown).all() and wiring.still(shown, np.array([3.0])).tolist() == [10.0]


@pytest.mark.parametrize("value", ["up", np.zeros(2), np.zeros(0), np.nan, 1e300, {}, [[]]])
def test_what_is_no_number_is_named(value):
    wiring = ElementMapping({"s": ("a.pos",)}, {}, ("a.pos",), {}, {"action": "", "s": ""})
    with pytest.raises(NonFiniteError, match=r"a non-number for a\.pos"):
        wiring.frames({"a.pos": value})
    assert wiring.still({"a.pos": value}, np.array([3.0])).tolist() in ([3.0], [1e300])


def metadata(names=("shoulder", "speed"), unit="deg, m/s"):
    field = {"shape": [len(names)], "names": list(names), "unit": unit}
    return {"observation": {STATE: field}, "action": field}


def wiring_of(names, unit="", rename=None, scale=None, **settings):
    features = dict.fromkeys(rename or names, float)
    made = map_elements(metadata(names, unit), features, features, rename or {}, scale or {})
    return ElementMapping(**{**vars(made), "settings": RobotSettings(**settings)})


def test_the_wiring_says_what_every_element_does_while_it_stands_still():
    text = wiring_of(("shoulder.pos", "x.vel"), "").text().splitlines()
    assert text[-2:] == ["shoulder.pos: holds its position", "x.vel: is set to 0"]
    # By the policy's name or unit where the robot's says nothing.
    renamed = {"motor_1": "shoulder_position", "motor_2": "speed"}
    assert wiring_of(tuple(renamed.values()), rename=renamed).standing.keeps == (True, False)
    assert wiring_of(("a", "b"), "rad, rad/s").standing.keeps == (True, False)


def test_what_neither_name_nor_unit_says_is_asked_once():
    names = ("motor_0", "motor_1")
    with pytest.raises(
        ConfigError,
        match=r"hold action of motor_0, motor_1 is undefined.*drive\.positions=\[motor_0\].*drive\.hold_values",
    ):
        wiring_of(names).standing
    shown = {"motor_0": 3.0, "motor_1": 0.5}
    settings = {"positions": ("motor_0",), "hold_values": {"motor_1": 0.0}}
    assert wiring_of(names, **settings).still(shown, np.zeros(2)).tolist() == [3.0, 0.0]
    assert wiring_of(names, hold="last").still(shown, np.zeros(2)).tolist() == [3.0, 0.5]
    assert wiring_of(names, hold="zero").still(shown, np.zeros(2)).tolist() == [0.0, 0.0]
    # A setting comes before names, for elements that are shown too.
    wiring = wiring_of(("a.pos", "b.vel"), positions=("b.vel",), hold_values={"a.pos": 7.0})
    assert wiring.still({"a.pos": 3.0, "b.vel": 0.5}, np.zeros(2)).tolist() == [7.0, 0.5]
    with pytest.raises(ConfigError, match="hold_values contains 'motor_2'"):
        wiring_of(names, hold_values={"motor_2": 0.0}).standing
    with pytest.raises(ConfigError, match=r"'motor_0' is in both positions \(keeps its value\) and hold_values"):
        wiring_of(names, positions=("motor_0",), hold_values={"motor_0": 0.0}).standing


def test_simulated_robots_stand_still_by_the_same_rule():
    names = ("shoulder.pos", "x.vel", "motor")
    for hold, kept in (("zero", False), ("last", True)):
        assert keeps_value(hold, ("gripper",), names, 3) == [True, False, kept]
    assert keeps_value("last", ("gripper",), ("shoulder", "elbow"), 2, "share of 2.5 rad/s") == [False, False]
    still = holding(RobotSettings(), names, 3, "", {STATE: ("x.vel", "shoulder.pos")})
    assert still({STATE: np.array([0.3, 10.0])}, None).tolist() == [10.0, 0.0, 0.0]
    assert still({STATE: np.array([0.3, 10.0])}, np.array([11.0, 0.3, 1.0])).tolist() == [11.0, 0.0, 0.0]


def test_a_position_that_was_neither_shown_nor_sent_is_not_commanded():
    """Its place is not known: a stop, or waiting for the first answer, must not send it to zero."""
    rover = Rover()
    rover.observation_features = {"x.vel": float}  # pyright: ignore[reportAttributeAccessIssue]
    rover.get_observation = lambda: {"x.vel": rover.speed}
    server = Silent(("x.vel",), Base.NAMES)
    wire = lambda shows, takes: map_elements(server.metadata, shows, takes, {}, {})  # noqa: E731
    with pytest.raises(RobopolicyError), AttachedLeRobot(cast(Any, rover), wire) as robot:
        drive_robot(robot, server, episodes=1, rate=0, attached=STEPS, settings=RobotSettings(server_timeout=0.05))
    assert rover.commands == []


def test_a_robot_without_limits_is_not_driven():
    server, rover = Silent(Base.NAMES, Base.NAMES, low=-np.inf), Rover()
    wire = lambda shows, takes: map_elements(server.metadata, shows, takes, {}, {})  # noqa: E731
    with (
        pytest.raises(ConfigError, match=r"No limit applies to shoulder\.pos, x\.vel.*drive\.unbounded=true"),
        AttachedLeRobot(cast(Any, rover), wire) as robot,
    ):
        drive_robot(robot, server, episodes=1, rate=0, attached=STEPS, settings=RobotSettings())
    assert rover.commands == []
    bounds = from_plain(DriveSection, {"robot": "rover", "bounds": {"x.vel": [-0.2, 0.2]}}).bounds
    assert bounds == {"x.vel": (-0.2, 0.2)}
    for wrong in ([0.2, -0.2], [0.0, float("nan")], [float("-inf"), 0.0]):
        with pytest.raises(ConfigError, match=r"bounds has x\.vel"):
            RobotSettings(bounds={"x.vel": (wrong[0], wrong[1])})


def test_a_server_that_asks_for_too_much_moves_a_robot_within_its_bounds_and_ctrl_c_stops_it():
    server, rover = Silent(Base.NAMES, Base.NAMES, low=None, high=None), Rover()
    server.infer = lambda observation: {"actions": np.array([[1e30, -1e30]] * 2)}

    def interrupted():
        if rover.looked == 4:
            raise KeyboardInterrupt

    rover.looks = interrupted
    bounds = {"shoulder.pos": (-90.0, 90.0), "x.vel": (-0.2, 0.2)}
    wire = lambda shows, takes: map_elements(server.metadata, shows, takes, {}, {})  # noqa: E731
    with pytest.raises(KeyboardInterrupt), AttachedLeRobot(cast(Any, rover), wire) as robot:
        drive_robot(
            robot,
            server,
            episodes=1,
            rate=0,
            attached=STEPS,
            settings=RobotSettings(bounds=bounds, max_observation_age=9.0),
        )
    assert [command for _, command in rover.commands[:3]] == [{"shoulder.pos": 90.0, "x.vel": -0.2}] * 3
    assert [command for _, command in rover.commands[3:]] == [{"shoulder.pos": 90.0, "x.vel": 0.0}]


STEPS = AttachedRobot(seconds=0.1)


class Silent:
    """A server that fails every time."""

    def __init__(self, reads, gives, **bounds):
        field = {"shape": [len(gives)], "names": list(gives), "low": -50.0, "high": 50.0, **bounds}
        self.metadata = {
            "observation": {STATE: {"shape": [len(reads)], "names": list(reads)}},
            "action": field,
            "history": 1,
            "chunk": 2,
            "fps": 50.0,
        }

    def infer(self, observation):
        raise ServingError("nobody listens")


class Rover:
    """An arm on a base behind LeRobot's interface; it shows how fast it drives, as LeKiwi does."""

    name, id, is_calibrated = "rover", "mine", True
    observation_features = action_features = dict.fromkeys(Base.NAMES, float)

    def __init__(self):
        self.place, self.speed, self.looked = 10.0, 0.0, 0
        self.commands: list[tuple[float, dict[str, float]]] = []
        self.looks = lambda: None

    def connect(self, calibrate):
        pass

    def disconnect(self):
        pass

    def get_observation(self):
        self.looked += 1
        self.looks()
        return {"shoulder.pos": self.place, "x.vel": self.speed}

    def send_action(self, command):
        self.commands.append((self.place, command))
        self.place, self.speed = command["shoulder.pos"], command["x.vel"]


@pytest.fixture(scope="module")
def server():
    """A server that drives a base: its process, the mood of its policy, its port."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    mood = context.Value("i", 0)
    process = context.Process(target=run_moody, args=(there, mood, 0, Base), daemon=True)
    process.start()
    assert here.poll(120), "the server did not start"
    yield process, mood, here.recv()
    process.kill()
    process.join(20)


@pytest.mark.parametrize("fault", ["nan", "shape", "slow", "stopped", "killed"])
def test_a_base_does_not_drive_on_while_its_server_fails(server, fault):
    process, mood, port = server
    rover = Rover()

    def fails():
        if rover.looked == 6:
            if fault in POLICY_FAULTS:
                mood.value = POLICY_FAULTS.index(fault)
            else:
                os.kill(process.pid, signal.SIGSTOP if fault == "stopped" else signal.SIGKILL)

    rover.looks = fails
    with PolicyClient(port=port) as client:
        wire = lambda shows, takes: map_elements(client.metadata, shows, takes, {}, {})  # noqa: E731
        robot = AttachedLeRobot(cast(Any, rover), wire, settings=RobotSettings())
        try:
            with robot:
                drive_robot(
                    robot,
                    client,
                    episodes=1,
                    rate=0.0,
                    attached=AttachedRobot(seconds=0.8),
                    settings=RobotSettings(server_timeout=2.0 if fault == "slow" else 0.3),
                )
        except RobopolicyError as error:
            assert fault != "slow"
            # Killed between two requests, or within one: what the connection said, not that the server might hang.
            messages = f"No server listens at ws://127.0.0.1:{port}", f"ws://127.0.0.1:{port} closed the connection"
            assert fault != "killed" or any(each in str(error) for each in messages), error
        finally:
            mood.value = 0
            if fault == "stopped":
                os.kill(process.pid, signal.SIGCONT)
    driven = [command for _, command in rover.commands if command["x.vel"] != 0]
    held = [(place, command) for place, command in rover.commands if command["x.vel"] == 0]
    assert len(driven) >= 4 and all(
        command == {"shoulder.pos": 20.0, "x.vel": pytest.approx(0.3)} for command in driven
    )
    assert len(held) >= 2 and rover.commands[-1] in held
    assert all(command == {"shoulder.pos": place, "x.vel": 0.0} for place, command in held)
