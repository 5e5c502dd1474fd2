"""`robopolicy-client` as a robot has it: its wheel alone, in Python 3.8 and 3.10, runs the programs of the guide."""

import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import numpy as np
import pytest
from served_expert import run_expert
from served_policies import run_one

import robopolicy
from sims.registry import make_world

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # two environments, from the package index

ROOT = Path(__file__).parents[2]
DISTRIBUTION = ROOT / "robopolicy" / "plugins" / "robopolicy_client"
GUIDE = (ROOT / "docs" / "guides" / "client.md").read_text()
LOOP, _, NODE = re.findall(r"^```python\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE)
UV = shutil.which("uv") or shutil.which("uv", path=Path(sys.executable).parent)

ROBOT = """
import functools, json, sys
import numpy as np
import robopolicy_client

robopolicy_client.Driver = functools.partial(robopolicy_client.Driver, wait=True)  # the simulator waits, too
robopolicy_client.Clock = lambda rate: robopolicy_client.driver.Clock(0)

class Robot:
    def is_running(self):
        self.shown = json.loads(sys.stdin.readline())
        return bool(self.shown)

    def observe(self):
        return {key: np.array(values, np.float32) for key, values in self.shown.items()}

    def send(self, action):
        print(json.dumps(action.tolist()), flush=True)

robot, port = Robot(), int(sys.argv[1])
"""
"""A robot whose bus is a pipe."""

ROS = {
    "rclpy/__init__.py": """
        import json, sys

        def init(): ...
        def shutdown(): print(json.dumps("shut down"), flush=True)

        def spin(node):
            from sensor_msgs.msg import Image, JointState
            for line in sys.stdin:
                event, content = json.loads(line)
                if event == "joint_states":
                    node.topics[event](JointState(**content))
                elif event == "camera/image_raw":
                    node.topics[event](Image(**{**content, "data": bytes(content["data"])}))
                elif event == "start_episode":
                    response = node.services[event](None, type("Response", (), {"success": False})())
                    print(json.dumps(response.success), flush=True)
                else:
                    period, step = node.timers[0]
                    node.published = None
                    step()
                    print(json.dumps([node.published, period, node.warnings]), flush=True)
        """,
    "rclpy/node.py": """
        import sys

        class Node:
            def __init__(self, name):
                self.topics, self.services, self.timers, self.warnings = {}, {}, [], []

            def declare_parameter(self, name, default):
                value = sys.argv[1] if name == "address" else default
                assert type(value) is type(default)
                return type("Parameter", (), {"value": value})()

            def create_subscription(self, kind, topic, callback, depth):
                self.topics[topic] = callback

            def create_service(self, kind, name, callback):
                self.services[name] = callback

            def create_timer(self, period, callback):
                self.timers.append((period, callback))

            def create_publisher(self, kind, topic, depth):
                def publish(message):
                    assert isinstance(message, kind) and all(type(value) is float for value in message.data)
                    self.published = message.data
                return type("Publisher", (), {"publish": staticmethod(publish)})()

            def get_logger(self):
                return type("Logger", (), {"warning": staticmethod(self.warnings.append)})()

            def destroy_node(self): ...
        """,
    "sensor_msgs/msg.py": """
        from dataclasses import dataclass

        @dataclass
        class JointState:
            name: list
            position: list

        @dataclass
        class Image:
            height: int
            width: int
            step: int
            data: bytes
        """,
    "std_msgs/msg.py": """
        class Float64MultiArray:
            def __init__(self, *, data):
                self.data = data
        """,
    "std_srvs/srv.py": "class Trigger: ...",
}
"""What the node uses of ROS 2: messages and calls come from a pipe."""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """The wheel of this checkout, and one that was built from its sdist."""
    if UV is None:
        pytest.skip("uv builds the wheel")
    folder = tmp_path_factory.mktemp("dist")
    for source, kind, out in (
        (DISTRIBUTION, "--wheel", "direct"),
        (DISTRIBUTION, "--sdist", "."),
        (None, "--wheel", ""),
    ):
        source = source or next(folder.glob("*.tar.gz"))
        done = subprocess.run(
            [UV, "build", "-q", kind, source, "--out-dir", folder / out], capture_output=True, text=True
        )
        skip_without_index(done)
    return next((folder / "direct").glob("*.whl")), next(folder.glob("*.whl"))


def skip_without_index(done):
    if done.returncode and re.search(r"offline|dns|connect|network|Failed to fetch", done.stderr, re.IGNORECASE):
        pytest.skip("the package index cannot be reached")
    assert done.returncode == 0, done.stderr


def interpreter(version: str) -> str:
    """Return the path of a Python of this version; skips where there is none."""
    found = [shutil.which(f"python{version}"), *map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))]
    for path in filter(None, found):
        if subprocess.run([path, "-c", ""], capture_output=True).returncode == 0:
            return path
    pytest.skip(f"there is no Python {version}")


@pytest.fixture(scope="module", params=["3.8", "3.10"])
def python(request, wheels, tmp_path_factory):
    """Python of an environment that holds the wheel and its dependencies."""
    folder = tmp_path_factory.mktemp("robot")
    subprocess.run([UV, "venv", "-q", "--python", interpreter(request.param), folder], check=True)
    path = folder / "bin" / "python"
    done = subprocess.run([UV, "pip", "install", "-q", "--python", path, wheels[0]], capture_output=True, text=True)
    skip_without_index(done)
    return path


def served(target, *arguments):
    """Yield the port of a server in a process of its own."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=target, args=(there, *arguments), daemon=True)
    process.start()
    assert here.poll(300), "the server did not start"
    yield here.recv()
    process.terminate()
    process.join(20)


@pytest.fixture(scope="module")
def expert():
    yield from served(run_expert, ())


@pytest.fixture(scope="module")
def centring():
    yield from served(run_one, "centring", {})


class Program:
    """A program in the robot's Python; messages are lines of JSON."""

    def __init__(self, python: Path, folder: Path, text: str, *arguments: str):
        (folder / "program.py").write_text(text)
        clean = {"PATH": os.environ["PATH"], "PYTHONPATH": str(folder)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        command = [python, "-W", "error", "program.py", *arguments]
        self.process = subprocess.Popen(command, cwd=folder, env=clean, text=True, **pipes)

    def write(self, message: object) -> None:
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def read(self):
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        return json.loads(line)

    def end(self) -> None:
        _, errors = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, errors


def test_the_wheel_holds_the_same_files_however_it_is_built(wheels):
    direct, again = (zipfile.ZipFile(path) for path in wheels)
    assert direct.namelist() == again.namelist()
    sources = {path.name: path.read_bytes() for path in (ROOT / "robopolicy" / "client").glob("*.py")}
    for archive in (direct, again):
        packed = {name: archive.read(name) for name in archive.namelist() if name.endswith(".py")}
        assert packed == {f"robopolicy_client/{name}": text for name, text in sources.items()}
    (metadata,) = [direct.read(name).decode() for name in direct.namelist() if name.endswith("METADATA")]
    required = re.findall(r"^Requires-Dist: (\w+)(?!.*extra)", metadata, re.MULTILINE)
    assert sorted(required) == ["msgpack", "numpy", "websockets"]
    assert f"Version: {robopolicy.__version__}\n" in metadata and "Requires-Python: >=3.8\n" in metadata


def test_the_loop_of_the_guide_drives_the_simulated_arm_to_successes(python, expert, tmp_path):
    world = make_world("pick_place", 1)
    program = Program(python, tmp_path, f"{ROBOT}\nfor _ in range(3):\n{textwrap.indent(LOOP, '    ')}", str(expert))
    for seed in range(3):
        observation = world.reset(seeds=[seed])
        ended = False
        while not ended:
            program.write({key: value[0, -1].tolist() for key, value in observation.items() if key != "task"})
            step = world.step(np.array([[program.read()]]))
            observation, ended = step.observation, bool(step.ended[0])
        assert step.success[0], f"episode {seed}"
        program.write({})
    program.end()
    world.close()


def test_the_command_prints_what_the_server_says(python, expert, tmp_path):
    command = [python, "-W", "error", "-m", "robopolicy_client"]
    done = subprocess.run([*command, f"127.0.0.1:{expert}"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "30 control steps per second, chunks of 1, history of 1\nreads observation.state" in done.stdout
    assert re.search(r"^gives gripper: -1 to 1; when held still: keeps its value$", done.stdout, re.MULTILINE)
    done = subprocess.run([*command, "127.0.0.1:1"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("Error: No server listens at ws://127.0.0.1:1.")


def test_the_node_of_the_guide_runs_where_rclpy_is(python, centring, tmp_path):
    for name, text in ROS.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text))
    program = Program(python, tmp_path, NODE, f"ws://127.0.0.1:{centring}")
    place = {"pan": 0.3, "lift": -0.2}
    image = {"height": 4, "width": 6, "step": 20, "data": ([100] * 18 + [0] * 2) * 4}  # padded rows
    program.write(["camera/image_raw", image])
    program.write(["timer", None])
    assert program.read() == [None, 0.1, []], "no joints yet"
    for _ in range(300):  # twelve, unless this machine is busy and the robot holds still
        message = {"name": ["other", "lift", "pan"], "position": [9.0, place["lift"], place["pan"]]}
        program.write(["joint_states", message])
        program.write(["timer", None])
        command = program.read()[0]
        assert all(abs(new - old) <= 0.05 + 1e-6 for new, old in zip(command, place.values(), strict=True))
        place = dict(zip(place, command, strict=True))
        if np.allclose(command, [0.0, 100 / 255], atol=1e-6):
            break
    np.testing.assert_allclose(command, [0.0, 100 / 255], atol=1e-6)
    program.write(["timer", None])
    assert program.read()[0] is None, "each observation once"
    program.write(["start_episode", None])
    assert program.read() is True
    program.end()
