"""The verb `detect`: calibrates, scores with and without faults, stores what a server loads, refuses what changed."""

import asyncio
import json

import numpy as np
import pytest
import torch

from robopolicy.building.policies import load_acting, load_policy
from robopolicy.cli import main
from robopolicy.client.protocol import Limits
from robopolicy.configuration import compose
from robopolicy.core.errors import CheckpointError
from robopolicy.core.policy import to_tensors
from robopolicy.failures import DETECTORS
from robopolicy.failures.watcher import load_watcher
from robopolicy.serving.sessions import RobotSession
from robopolicy.serving.telemetry import Log, Metrics
from robopolicy.serving.versions import LoadedPolicy, PolicyVersions, ServerSettings
from robopolicy.serving.warmup import blank_observation
from robopolicy.verbs.serve import detectors
from sims.registry import make_world

pytestmark = pytest.mark.long
OUTSIDE = "outside_robotics"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Return the root of a run with demonstrations and a policy trained for a moment."""
    root = tmp_path_factory.mktemp("runs")
    settings = ["world=reach_planar", f"run.root={root}", "run.threads=1", "world.batch_size=20"]
    small = ["policy.width=32", "policy.depth=1", "policy.sampling_steps=2", "train.fit.steps=1200"]
    assert main(["collect", *settings, "collect.episodes=60"]) == 0
    assert main(["train", *settings, *small, "train.evaluate_episodes=0"]) == 0
    return root


def detect(root, *settings):
    checkpoint = root / "train" / "reach_planar" / "0" / "checkpoint"
    quick = ["run.threads=1", "world.batch_size=20", "detect.episodes=80", "detect.samples=2"]
    return checkpoint, main(["detect", str(checkpoint), f"run.root={root}", *quick, *settings])


def test_detectors_are_scored_stored_and_loaded(root, capsys):
    faults = "detect.faults=[latency,moved_goal]", "detect.fault_episodes=12"
    checkpoint, code = detect(root, *faults, "run.overwrite=true")
    assert code == 0
    folder = root / "detect" / "reach_planar" / "0"
    result = json.loads((folder / "result.json").read_text())
    assert {"float", "nearest", "clock"} <= set(result["detectors"]) <= set(DETECTORS.ours)
    assert set(result["faults"]) == {"latency", "moved_goal"}
    clock = result["detectors"]["clock"]["auroc"]["50%"]
    assert clock["auroc"] == 0.5 or clock["auroc"] is None  # equal times: a clock knows nothing
    page = (folder / "report.html").read_text()
    assert all(text in page for text in ("Failure detectors", "Planted faults", "nearest_max"))
    stored = checkpoint.parent / "detectors"
    fitted_for = json.loads((stored / "clock" / "detector.json").read_text())["fitted_for"]
    policy = load_policy(checkpoint)
    watcher = load_watcher(stored, policy, policy, fitted_for)
    assert set(watcher.detectors) == set(result["detectors"])
    world = make_world("reach_planar", 3)
    observation, rows = to_tensors(world.reset(seeds=np.arange(3))), np.arange(3)
    watcher.start(3)
    seen = watcher.watch(observation, rows, torch.Generator().manual_seed(0))
    assert all(index.shape == (3,) and alarm.shape == (3,) for index, alarm in seen.values())
    with pytest.raises(CheckpointError, match="calibrated for another engine"):
        load_watcher(stored, policy, policy, {**fitted_for, "engine": {"engine": "lean"}})
    with pytest.raises(CheckpointError, match="contains no failure detectors"):
        load_watcher(folder, policy, policy, fitted_for)


def test_a_server_watches_with_the_stored_detectors(root):
    checkpoint = root / "train" / "reach_planar" / "0" / "checkpoint"
    folder = checkpoint.parent / "detectors"
    config = compose([f"serve.policy={checkpoint}", f"serve.detect={folder}"])
    policy = load_acting(config.inference, checkpoint)
    loaded = LoadedPolicy(policy, "1", detectors(config, checkpoint, policy, True, torch.device("cpu")))
    robot = RobotSession("robot", "", policy.spec, {}, Limits.of(policy.spec))

    async def indices():
        versions = PolicyVersions("", loaded, ServerSettings(port=0), Metrics(), Log())
        versions.current.queue.start()
        answers = [await versions.infer(robot, blank_observation(policy), None, ("", 0)) for _ in range(3)]
        await versions.stop(5.0)
        return [answer.failure.index for answer, _ in answers]

    found = asyncio.run(indices())
    assert [list(index) for index in found] == [["float"]] * 3
    assert 0 <= found[0]["float"] <= found[1]["float"] <= found[2]["float"]
    with pytest.raises(CheckpointError, match="no detector 'own'"):
        load_watcher(folder, policy, policy, {}, ["own"])


def test_another_engine_and_a_fault_that_is_impossible(root, capsys):
    given = "detect.detectors=[clock,nearest]", "run.name=lean", f"detect.output={root / 'lean'}"
    demonstrations = f"detect.demonstrations={root / 'collect/reach_planar/0/dataset'}"
    assert detect(root, *given, demonstrations, "detect.faults=[blackoutt]")[1] == 2
    assert "no fault 'blackoutt'" in capsys.readouterr().err
    assert detect(root, *given, demonstrations, "inference.engine=lean", "detect.faults=[slip]")[1] == 0
    assert "'reach_planar' cannot have the fault slip" in capsys.readouterr().out
    assert (root / "lean" / "nearest" / "detector.safetensors").is_file()


@pytest.mark.parametrize("name", ["far", f"{OUTSIDE}.detector:FarDetector"])
def test_a_detector_of_another_package(root, name):
    pytest.importorskip(OUTSIDE, reason="install it with: pip install -e tests/outside")
    demonstrations = f"detect.demonstrations={root / 'collect/reach_planar/0/dataset'}"
    run = f"run.name={name.replace(':', '-')}", f"detect.output={root / name.replace(':', '-')}"
    checkpoint, code = detect(root, f"detect.detectors=[{name},clock]", demonstrations, *run)
    assert code == 0
    policy = load_policy(checkpoint)
    place = root / name.replace(":", "-")
    about = json.loads((place / "clock" / "detector.json").read_text())["fitted_for"]
    assert name in load_watcher(place, policy, policy, about).detectors
