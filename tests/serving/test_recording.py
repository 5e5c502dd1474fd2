"""What robots do is recorded next to serving: complete episodes, whatever is killed, and never more than may be."""

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock

from robopolicy.client.protocol import pack
from robopolicy.core.errors import DataError
from robopolicy.core.spec import STATE, Field
from robopolicy.core.storage import read_json
from robopolicy.data.lerobot_format import RECORDING
from robopolicy.data.lerobot_reading import read_columns, read_dataset
from robopolicy.serving import recording_writer
from robopolicy.serving.recording import RecordedStep, RobotRecorder
from robopolicy.serving.recording_writer import Writer, messages

FRONT = "observation.images.front"


def description(image: bool = False, **more):
    fields = {STATE: Field((2,), names=("x", "y"), unit="m").to_json()}
    if image:
        fields[FRONT] = Field((8, 8, 3), "uint8", 0, 255).to_json()
    action = Field((1,), low=-1.0, high=1.0, names=("vx",)).to_json()
    return {"observation": fields, "action": action, "chunk": 2, "prediction": 4, "fps": 7.5, "world": None, **more}


def step(value: float, image: tuple[int, ...] | None = None, **more) -> RecordedStep:
    frames = {STATE: np.array([value, -value], np.float32)}
    if image is not None:
        frames[FRONT] = np.full(image, 40, np.uint8)
    return RecordedStep(frames, np.array([value / 100]), time=1000.0 + value, **more)


def take(writer: Writer, robot: str, values, first: int = 1, task: str = "", **more) -> None:
    for number, value in enumerate(values, first):
        writer.take({"robot": robot, "number": number, "task": task, "step": vars(step(value, **more))})


def end(writer: Writer, robot: str, final: float | None = None, terminated: bool = False) -> None:
    frames = {} if final is None else {STATE: np.array([final, -final], np.float32)}
    writer.take({"robot": robot, "end": {"final": frames, "terminated": terminated}})


def test_steps_of_several_robots_become_episodes(tmp_path):
    writer = Writer(tmp_path / "data", description(rewards=["push"], success=True), 1e9)
    for value in range(3):
        take(writer, "left", [value], value + 1, "go", rewards={"push": value}, success=value == 2, policy="p 1")
        take(writer, "right", [10 + value], value + 1, rewards={"push": 0.0}, operator="anna", actor=1, segment=2)
    end(writer, "left", 3.0, terminated=True)
    end(writer, "right")
    writer.write()
    episodes = read_dataset(tmp_path / "data")
    assert (episodes.lengths.tolist(), episodes.fps, episodes.tasks) == ([3, 3], 7.5, ("go", ""))
    assert episodes.observation[STATE][:, 0].tolist() == [0, 1, 2, 3, 10, 11, 12, 12]
    assert episodes.observation_fields[STATE].unit == "m" and episodes.action_field.names == ("vx",)
    assert episodes.final_known.tolist() == [True, False] and episodes.terminated.tolist() == [True, False]
    assert episodes.rewards["push"].tolist() == [0, 1, 2, 0, 0, 0]
    assert episodes.success.tolist() == [True, False]
    assert episodes.actor.tolist() == [0, 0, 0, 1, 1, 1] and episodes.segment.tolist() == [0, 0, 0, 2, 2, 2]
    columns = read_columns(tmp_path / "data", ["policy", "operator", "time"])
    names = read_json(tmp_path / "data" / RECORDING)
    assert [names["policies"][code] for code in columns["policy"].tolist()] == ["p 1"] * 3 + [""] * 3
    assert [names["operators"][code] for code in columns["operator"].tolist()] == [""] * 3 + ["anna"] * 3
    assert columns["time"][:3].tolist() == [1000.0, 1001.0, 1002.0]


def test_a_gap_ends_an_episode_and_a_plan_keeps_its_shape(tmp_path):
    writer = Writer(tmp_path / "data", description(), 1e9)
    plan = np.array([[0.5], [0.25]])
    take(writer, "robot", [0, 1], plan=plan, plan_step=1, latency=0.25, held=True, index=2.0, alarm=True)
    take(writer, "robot", [5], first=4)  # the third was dropped
    take(writer, "robot", [6], first=5, task="another")
    end(writer, "robot")
    writer.write()
    assert read_dataset(tmp_path / "data").lengths.tolist() == [2, 1, 1]
    names = ["plan", "plan.step", "latency_ms", "held", "failure.index", "failure.alarm"]
    first = {name: column[0].tolist() for name, column in read_columns(tmp_path / "data", names).items()}
    assert first == dict(zip(names, [[0.5, 0.25], 1, 250.0, True, 2.0, True], strict=True))
    writer = Writer(tmp_path / "rtc", description(chunking="rtc"), 1e9)
    take(writer, "robot", [0], plan=plan)
    end(writer, "robot")
    writer.write()
    assert read_columns(tmp_path / "rtc", ["plan"])["plan"].tolist() == [[0.5, 0.25, 0.25, 0.25]]


def test_a_recording_is_continued_with_images_of_the_first_size(tmp_path):
    for size in (8, 16):
        writer = Writer(tmp_path / "data", description(image=True), 1e9)
        take(writer, "robot", [0, 1], image=(size, size, 3))
        take(writer, "other", [0], image=(12, 12, 3))
        for robot in ("robot", "other"):
            end(writer, robot)
        writer.write()
    episodes = read_dataset(tmp_path / "data")
    assert episodes.lengths.tolist() == [2, 1, 2, 1]
    assert episodes.observation[FRONT].shape == (10, 8, 8, 3)
    assert (episodes.observation[FRONT].float() - 40).abs().max() <= 3


def test_nothing_is_written_beyond_the_limit_nor_into_other_folders(tmp_path):
    writer = Writer(tmp_path / "data", description(), 1.0)
    for _ in range(2):
        take(writer, "robot", [0, 1])
        end(writer, "robot")
        writer.write()
    assert writer.counts["full"] and read_dataset(tmp_path / "data").lengths.tolist() == [2]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("mine")
    with pytest.raises(DataError, match="neither empty nor a LeRobotDataset"):
        Writer(tmp_path / "other", description(), 1e9)


def test_two_processes_do_not_record_to_one_folder(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(recording_writer, "ENDS_WITHIN", 0.0)
    monkeypatch.setattr(os, "nice", lambda by: 0)
    first = pack({"description": description(), "limit": 1e9})
    with FileLock(tmp_path / ".data.robopolicy-lock"):
        assert recording_writer.main(tmp_path / "data", io.BytesIO(len(first).to_bytes(4, "big") + first)) == 1
    assert "Another process records" in capfd.readouterr().out
    assert recording_writer.main(tmp_path / "data", io.BytesIO(len(first).to_bytes(4, "big") + first)) == 0


def test_a_half_message_ends_the_stream():
    whole = pack({"robot": "a"})
    stream = len(whole).to_bytes(4, "big") + whole + len(whole).to_bytes(4, "big") + whole[:3]
    assert list(messages(io.BytesIO(stream))) == [{"robot": "a"}]


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from test_recording import description, step
from robopolicy.serving.recording import RobotRecorder
recorder = RobotRecorder(Path(sys.argv[1]), description())
recorder.require_ready()
for episode in range(3):
    for value in range(5):
        recorder.step("robot", step(value))
    if episode < 2:
        recorder.end("robot")
while recorder._messages or recorder._bytes:
    os.sched_yield()
print(recorder._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.long
def test_a_killed_process_loses_no_step_that_left_it(tmp_path):
    folder = tmp_path / "data"
    process = subprocess.run(
        [sys.executable, "-c", KILLED, folder, Path(__file__).parent], capture_output=True, text=True
    )
    assert process.returncode == -signal.SIGKILL, process.stderr
    writer = int(process.stdout)
    while alive(writer):
        os.sched_yield()
    assert read_dataset(folder).lengths.tolist() == [5, 5, 5]


def alive(process: int) -> bool:
    status = Path(f"/proc/{process}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.long
def test_what_cannot_be_taken_is_counted_and_errors_are_said(tmp_path):
    with RobotRecorder(tmp_path / "data", description(), waiting=1500) as recorder:
        recorder.require_ready()
        os.kill(recorder._process.pid, signal.SIGSTOP)
        for value in range(1000):
            recorder.step("robot", step(value))
        assert 900 < recorder.dropped < 1000
        os.kill(recorder._process.pid, signal.SIGCONT)
        recorder.close(250.0)
    assert recorder.state["steps"] == 1000 - recorder.dropped and not recorder.error
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("mine")
    with RobotRecorder(tmp_path / "other", description()) as recorder:
        with pytest.raises(Exception, match="neither empty"):
            recorder.require_ready()
        recorder.step("robot", step(1))
        assert recorder.dropped == 1
