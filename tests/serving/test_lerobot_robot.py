"""A robot behind LeRobot's interface, driven through the real server: names, units, and stopped whatever happens."""

import json
import math
import multiprocessing
import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from served_expert import FRONT, SeeingExpert, run_expert

from robopolicy.cli import main
from robopolicy.client.element_mapping import map_elements
from robopolicy.client.lerobot_robot import ENDING_SIGNALS, AttachedLeRobot, drive_robot, make_lerobot_robot
from robopolicy.core.errors import ConfigError, NonFiniteError, RobopolicyWarning, ServingError, SpecError
from robopolicy.core.policy import to_tensors
from robopolicy.core.registry import load_dotted
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE
from robopolicy.serving.configuration import AttachedRobot, RobotSettings
from robopolicy.verbs.drive import _ended_by_signals

pytestmark = pytest.mark.long

JOINTS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
RENAME = {f"{joint}.pos": f"{joint}_position" for joint in JOINTS}
SCALE = dict.fromkeys(RENAME, math.pi / 180)


class Local:
    """The expert without a server; told to, it fails as one that is gone."""

    def __init__(self, cameras=("front",)):
        self.policy, self.gone = SeeingExpert(cameras, fps=200.0), False
        spec = self.policy.spec
        fields = {key: field.to_json() for key, field in spec.observation.items()}
        self.metadata = {
            "observation": fields,
            "action": spec.action.to_json(),
            "history": 1,
            "chunk": 1,
            "fps": spec.fps,
        }

    def infer(self, observation):
        if self.gone:
            raise ServingError("nobody listens")
        shown = {key: value[None] for key, value in observation.items() if key != "task"}
        return {"actions": self.policy.act(to_tensors(shown, "cpu"), None).actions[0].numpy()}


@pytest.fixture
def arm(tmp_path):
    """Makes the simulated arm of tests/outside, by its LeRobot type."""

    def made(**options):
        return make_lerobot_robot("simulated_arm", {"calibration_dir": str(tmp_path), **options})

    return made


def attached(robot, client, rename=None, scale=None, **settings) -> AttachedLeRobot:
    return AttachedLeRobot(
        robot, lambda shows, takes: map_elements(client.metadata, shows, takes, rename or {}, scale or {}), **settings
    )


def driven(robot, client, seconds=0.5, **settings):
    with robot:
        return drive_robot(
            robot,
            client,
            episodes=1,
            rate=0.0,
            attached=AttachedRobot(seconds=seconds),
            settings=RobotSettings(**settings),
        )


@pytest.fixture(scope="module")
def port():
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=run_expert, args=(there, ("front",)), daemon=True)
    process.start()
    assert here.poll(120), "the server did not start"
    yield here.recv()
    process.terminate()
    process.join(20)
    assert process.exitcode == 0


def test_the_verb_drives_a_robot_of_an_installed_package_at_30_hz(port, tmp_path, capsys):
    options = f"{{camera_names: [front], degrees: true, calibration_dir: {tmp_path}}}"
    renamed, scaled = (json.dumps(each).replace('"', "") for each in (RENAME, SCALE))
    arguments = ["drive", f"drive.port={port}", "drive.robot=simulated_arm", f"drive.robot_options={options}"]
    arguments += [f"drive.rename={renamed}", f"drive.scale={scaled}", "drive.episodes=1", "drive.seconds=3"]
    assert main([*arguments, f"json={tmp_path / 'result.json'}"]) == 0
    output = capsys.readouterr().out
    won, ended = map(int, output.split("simulated_arm: ")[1].split(" episodes")[0].split(" of "))
    assert won == ended >= 2, output
    assert "shoulder_pan.pos x 0.0174533" in output
    assert "[rad, rad/s, m, m, rad]" in output
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["steps"], result["rate"], result["robot"]) == (90, 30.0, "simulated_arm")
    assert 2.8 < result["wall_seconds"] < 6
    assert result["held"] + result["requests"] >= 90


def test_elements_are_found_by_name_and_turned_into_the_policys_units(arm):
    client, robot = Local(), arm(camera_names=["front"], degrees=True)
    device = attached(robot, client, RENAME, SCALE)
    with device:
        frames = device.observe()
        shown = robot._shown
        for key in (STATE, ENVIRONMENT_STATE):
            np.testing.assert_allclose(frames[key], shown[key][0, -1], rtol=1e-6, atol=1e-7)
        assert frames[FRONT].dtype == np.uint8
        device.send(np.array([0.1, 0.2, 0.3, -1.0]))
    assert robot.commands[0] == {"x": 0.1, "y": 0.2, "z": 0.3, "gripper": -1.0}
    # The stop: no more motion, and what it grips is not let go.
    assert robot.commands[1:] == [{"x": 0.0, "y": 0.0, "z": 0.0, "gripper": -1.0}]
    assert not robot.is_connected


def test_a_robot_of_positions_stays_by_being_told_where_it_is():
    field = {"shape": [2], "names": ["pan", "speed"], "unit": "rad, m/s"}
    metadata = {"observation": {STATE: {"shape": [1], "names": ["pan"], "unit": "rad"}}, "action": field}
    wiring = map_elements(
        metadata, {"pan.pos": float}, {"pan.pos": float, "speed": float}, {"pan.pos": "pan"}, {"pan.pos": 0.5}
    )
    assert wiring.frames({"pan.pos": 4.0})[STATE].tolist() == [2.0]
    assert wiring.still({"pan.pos": 4.0}, np.zeros(2)).tolist() == [2.0, 0.0]
    assert wiring.command(np.array([2.0, 3.0])) == {"pan.pos": 4.0, "speed": 3.0}
    with pytest.raises(NonFiniteError, match=r"pan\.pos"):
        wiring.command(np.array([np.nan, 0.0]))
    with pytest.raises(SpecError, match=r"no longer provides pan\.pos"):
        wiring.frames({"other": 1.0})


def test_what_does_not_fit_is_refused_before_the_robot_is_touched(arm):
    client = Local()
    with pytest.raises(SpecError, match="camera 'front', which the robot does not have; it has top"):
        attached(arm(camera_names=["top"]), client)
    with pytest.raises(SpecError, match=r"has no 'shoulder_pan_position'.*shoulder_pan\.pos.*rename=\{ROBOT'S NAME"):
        attached(arm(camera_names=["front"], degrees=True), client)
    with pytest.raises(
        SpecError, match=r"has no 'shoulder_pan.position' to rename.*Did you mean 'shoulder_pan_position'"
    ):
        attached(arm(camera_names=["front"]), client, {"shoulder_pan.position": "a"})
    nameless = Local(())
    nameless.metadata["action"] = {"shape": [4], "names": []}
    with pytest.raises(SpecError, match="has no names for the 4 elements that it gives"):
        attached(arm(), nameless)
    fewer = Local(())
    fewer.metadata["action"] = {"shape": [3], "names": ["x", "y", "z"]}
    with pytest.raises(SpecError, match="The robot needs gripper, which the policy does not output"):
        attached(arm(), fewer)
    twice = Local(())
    twice.metadata["action"] = {"shape": [4], "names": ["x", "x", "z", "gripper"]}
    with pytest.raises(SpecError, match="have the same name on the robot"):
        attached(arm(), twice)


def test_an_uncalibrated_robot_is_let_go(arm):
    robot = arm(calibrated=False)
    with pytest.raises(ConfigError, match=r"lerobot-calibrate --robot\.type=simulated_arm"):
        driven(attached(robot, Local(())), Local(()))
    assert not robot.is_connected
    assert not robot.commands


def test_robots_that_do_not_exist_or_cannot_be_made(arm):
    with pytest.raises(ConfigError, match=r"no robot 'so101_folower'\. Did you mean 'so101_follower'"):
        make_lerobot_robot("so101_folower", {})
    with pytest.raises(ConfigError, match=r"simulated_arm.*cannot be created.*tsk"):
        arm(tsk="pick_place")
    with pytest.raises(ConfigError, match="not a LeRobot RobotConfig"):
        make_lerobot_robot(load_dotted("lerobot_robot_simulated_arm:SimulatedArm", "Robot"), {})
    config = load_dotted("lerobot_robot_simulated_arm:SimulatedArmConfig", "Robot")
    assert arm().name == make_lerobot_robot(config, {}).name


def failing(robot, after: int, how):
    """Let the robot's observations fail by `how` after some that were good."""
    good, calls = robot.get_observation, []

    def get_observation():
        calls.append(1)
        return good() if len(calls) <= after else how(good)

    robot.get_observation = get_observation
    return robot


def test_a_robot_that_stops_answering_is_disconnected(arm):
    forever, client = threading.Event(), Local(())
    robot = failing(arm(), 5, lambda good: forever.wait(30))
    with pytest.raises(ServingError, match=r"did not return an observation: no answer within 0\.2 s. It was stopped"):
        driven(attached(robot, client, robot_timeout=0.2), client)
    # What hangs may be a camera: a base is not left driving, what it grips is not let go.
    assert robot.commands[5:] == [{"x": 0.0, "y": 0.0, "z": 0.0, "gripper": robot.commands[4]["gripper"]}]
    assert not robot.is_connected
    forever.set()


def test_a_robot_that_is_unplugged_while_it_is_driven(arm):
    client = Local(())

    def unplugged(good):
        robot._connected = False
        return good()

    robot = failing(arm(), 5, unplugged)
    with (
        pytest.warns(
            RobopolicyWarning, match=r"set to its hold action \(DeviceNotConn.*nor disconnected .* Switch off its power"
        ),
        pytest.raises(ServingError, match="did not return an observation: DeviceNotConnectedError"),
    ):
        driven(attached(robot, client), client)


def test_a_motor_that_shows_nan_stops_the_robot(arm):
    client = Local(())
    robot = failing(arm(), 3, lambda good: {**good(), "wrist_roll_velocity": math.nan})
    with pytest.raises(NonFiniteError, match="a non-number for wrist_roll_velocity"):
        driven(attached(robot, client), client)
    assert robot.commands[-1] == {"x": 0.0, "y": 0.0, "z": 0.0, "gripper": robot.commands[-2]["gripper"]}
    assert not robot.is_connected


@pytest.mark.parametrize("mode", ["bgr", "rgb", None])
def test_a_camera_that_shows_blue_first_is_turned_to_rgb(arm, mode):
    """By LeRobot's own configuration of the camera, which OpenCV's may be given as color_mode: bgr."""
    from lerobot.cameras import ColorMode
    from lerobot.cameras.opencv import OpenCVCameraConfig

    client, robot = Local(), arm(camera_names=["front"])
    if mode is not None:
        config = OpenCVCameraConfig(0, fps=30, width=64, height=64, color_mode=ColorMode(mode))
        robot.cameras = {"front": SimpleNamespace(config=config)}
    observations = []
    good = robot.get_observation
    robot.get_observation = lambda: observations.append(good()) or observations[-1]
    with attached(robot, client) as shown:
        image = shown.observe()["observation.images.front"]
    own = observations[0]["front"]
    assert (own[..., 0] != own[..., 2]).any()
    assert (image == (own[..., ::-1] if mode == "bgr" else own)).all()


def test_a_frozen_camera_stops_the_robot_once_it_moves(arm):
    client, robot = Local(), arm(camera_names=["front"])
    picture = []

    def frozen(good):
        shown = good()
        picture.append(shown["front"])
        return {**shown, "front": picture[0]}

    with pytest.raises(
        ServingError, match=r"Camera 'front' has returned the same image for 0\.\d s while the robot moved"
    ):
        driven(attached(failing(robot, 2, frozen), client, frozen_camera_timeout=0.1), client, seconds=3.0)
    assert len(robot.commands) > 5
    now = [0.0]
    still = attached(failing(arm(camera_names=["front"]), 0, frozen), client, clock=lambda: now[0])
    with still:
        for now[0] in range(5):
            still.observe()  # a robot that rests may see the same for long


def test_a_server_that_goes_away_leaves_the_robot_where_it_is(arm):
    client, robot = Local(()), arm()

    def gone(good):
        client.gone = True
        return good()

    with pytest.raises(ServingError, match="nobody listens"):
        driven(attached(failing(robot, 10, gone), client), client, seconds=5.0, server_timeout=0.3)
    resting = {"x": 0.0, "y": 0.0, "z": 0.0, "gripper": robot.commands[9]["gripper"]}  # what it grips is not let go
    assert abs(resting["gripper"]) > 0.5
    assert robot.commands[10:].count(resting) == len(robot.commands) - 10 > 5  # told to stop included
    assert not robot.is_connected


def test_a_server_that_hangs_stops_the_robot_within_patience(arm):
    client, robot, silent = Local(()), arm(), threading.Event()
    answer = client.infer
    client.infer = lambda message: silent.wait(20) if len(robot.commands) > 10 else answer(message)
    with pytest.raises(ServingError, match=r"not answered for more than 0\.5 s \(drive\.server_timeout\)"):
        driven(attached(robot, client), client, seconds=5.0, server_timeout=0.5)
    assert not robot.is_connected
    silent.set()


def test_the_first_step_is_no_jump(arm):
    """Where actions are positions, the change that is allowed counts from where the robot stands."""
    client = Local(())
    client.metadata["action"] = {"shape": [4], "names": ["tip_x", "y", "z", "gripper"]}
    client.infer = lambda observation: {"actions": np.full((4, 4), 5.0)}
    robot = arm()
    robot.send_action = robot.commands.append
    device = AttachedLeRobot(
        robot,
        lambda shows, takes: map_elements(
            client.metadata, shows, {"tip_x": float, "y": float, "z": float, "gripper": float}, {}, {}
        ),
        settings=RobotSettings(hold="last"),
    )
    with device:
        start = robot.get_observation()["tip_x"]
        drive_robot(
            device,
            client,
            episodes=1,
            rate=0,
            attached=AttachedRobot(seconds=1.0),
            settings=RobotSettings(max_action_change=0.01, max_observation_age=10.0),
        )
    steps = [command["tip_x"] for command in robot.commands[:2]]
    assert steps == pytest.approx([start + 0.01, start + 0.02], abs=1e-6)


@pytest.mark.parametrize(("seconds", "rate"), [(0.0, 0.0), (1.0, -1.0)])
def test_no_time_is_no_episode(arm, seconds, rate):
    client = Local(())
    with attached(arm(), client) as robot, pytest.raises(ConfigError, match="make no episode"):
        drive_robot(
            robot, client, episodes=1, rate=rate, attached=AttachedRobot(seconds=seconds), settings=RobotSettings()
        )


@pytest.mark.parametrize("number", ENDING_SIGNALS)
def test_being_told_to_terminate_is_an_interrupt(number):
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), _ended_by_signals():
        os.kill(os.getpid(), number)
        Path().resolve()  # a signal arrives between two instructions
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("second", ENDING_SIGNALS)
def test_a_second_signal_does_not_keep_a_robot_from_being_stopped(arm, second):
    client = Local(())
    robot = arm()
    ends = robot.disconnect

    def impatient():
        os.kill(os.getpid(), second)
        Path().resolve()
        ends()

    robot.disconnect = impatient
    with pytest.raises(KeyboardInterrupt), _ended_by_signals(), attached(robot, client):
        os.kill(os.getpid(), signal.SIGINT)
        Path().resolve()
    assert not robot.is_connected
