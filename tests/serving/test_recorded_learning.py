"""What `drive` records is a LeRobotDataset like any other: train and offline read it as it is."""

import numpy as np
import pytest
from tiny_runs import TINY

from robopolicy.cli import main
from robopolicy.client.protocol import FAILURE, POLICY
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE
from robopolicy.core.storage import read_json
from robopolicy.data.lerobot_format import RECORDING, recorded_origin
from robopolicy.data.lerobot_reading import read_columns, read_dataset
from robopolicy.serving.drive import drive
from robopolicy.serving.recording_writer import Writer
from sims.registry import make_expert, make_world

pytestmark = pytest.mark.long


class Expert:
    """A server whose policy is the scripted expert, with a detector that alarms in every answer."""

    def __init__(self, world):
        self.expert = make_expert("reach_planar", world.spec)
        fields = {key: field.to_json() for key, field in world.spec.observation.items()}
        self.metadata = {
            "observation": fields,
            "action": world.spec.action.to_json(),
            "history": 1,
            "chunk": 1,
            "prediction": 1,
            "fps": world.spec.fps,
            "world": {"name": "reach_planar", "options": {}},
            "records": True,
        }
        self.reported = []

    def infer(self, message):
        self.reported.append(message["robopolicy.executed"])
        if STATE not in message:
            return {"robopolicy.executed": True}
        shown = {key: message[key][None] for key in (STATE, ENVIRONMENT_STATE) if key in message}
        return {
            "actions": self.expert.act(shown),
            POLICY: "expert 1",
            FAILURE: {"index": {"float": 0.5}, "alarms": ["float"]},
        }


class Direct:
    """A recorder without a process of its own."""

    def __init__(self, folder, description):
        self.writer, self.numbers = Writer(folder, description, 1e9), {}

    def step(self, robot, step, task=""):
        self.numbers[robot] = self.numbers.get(robot, 0) + 1
        self.writer.take({"robot": robot, "number": self.numbers[robot], "task": task, "step": vars(step)})

    def end(self, robot, final=None, *, terminated=False):
        self.writer.end(robot, final, terminated)


def test_train_and_offline_read_what_was_driven(tmp_path):
    world = make_world("reach_planar", 4)
    client = Expert(world)
    said = {"rewards": list(world.spec.rewards), "success": world.spec.reports_success}
    recorder = Direct(tmp_path / "data", {**client.metadata, **said})
    result = drive(world, client, np.arange(12), recorder=recorder)  # pyright: ignore[reportArgumentType]
    recorder.writer.write()
    world.close()
    episodes = read_dataset(tmp_path / "data")
    assert (len(episodes), episodes.step_count) == (12, result["steps"])
    assert int(episodes.success.sum()) == result["successes"] > 6
    assert episodes.final_known.all() and recorded_origin(tmp_path / "data").name == "reach_planar"
    columns = read_columns(tmp_path / "data", ["policy", "plan", "plan.step", "held", "failure.index", "failure.alarm"])
    assert read_json(tmp_path / "data" / RECORDING)["policies"][columns["policy"][0]] == "expert 1"
    assert columns["failure.alarm"].all() and (columns["failure.index"] == 0.5).all() and not columns["held"].any()
    np.testing.assert_allclose(columns["plan"], episodes.actions, atol=1e-6)  # chunks of one action
    reported = [report for report in client.reported if report]
    assert sum(len(report["action"]) for report in reported) >= result["steps"] - 12  # all but the last of an episode

    common = (*TINY, f"run.root={tmp_path / 'runs'}", "run.name=driven")
    assert main(["train", f"train.data={tmp_path / 'data'}", *common]) == 0
    offline = ("offline.rounds=1", "offline.gated=false", "offline.evaluate_episodes=0", "offline.critic.steps=10")
    assert main(["offline", str(tmp_path / "data"), *common, *offline, "offline.improve.steps=4"]) == 0
