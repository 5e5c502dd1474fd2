"""The hub, both ways, with huggingface_hub's own client against a server on loopback, each in a process of its own."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from base64 import b64encode
from pathlib import Path

import pytest
import torch
from lerobot_models import tiny_act

from robopolicy.core.episodes import Episodes
from robopolicy.core.origin import WorldOrigin, remember_origin
from robopolicy.core.storage import write_json
from robopolicy.data.lerobot_format import write_dataset
from robopolicy.data.record import record
from robopolicy.policies.configuration import DenoisingPolicyConfig
from robopolicy.policies.denoising import DenoisingPolicy
from sims.registry import load_task, make_world

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

HERE = Path(__file__).parent
CLIENT = """
import contextlib, io, json, os, sys, traceback
from robopolicy.cli import main

for line in sys.stdin:
    asked = json.loads(line)
    os.environ.update(asked["environment"])
    out, err, status = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            import robopolicy.runs, robopolicy.core.progress
            robopolicy.runs.output.file = out
            if "code" in asked:
                exec(asked["code"], {})
            else:
                status = main(asked["words"])
        except BaseException:
            traceback.print_exc()
            status = 99
    print(json.dumps({"status": status, "out": out.getvalue(), "err": err.getvalue()}), flush=True)
"""
"""Runs commands of robopolicy, or code, one after another in a process that knows only this hub."""


ONE = "evaluate.episodes=1", "evaluate.videos=0", "run.threads=1", "world.batch_size=1"


class Hub:
    """The server and what it is told."""

    def __init__(self, port):
        self.url = f"http://127.0.0.1:{port}"

    def ask(self, path, value=None):
        data = None if value is None else json.dumps(value).encode()
        with urllib.request.urlopen(urllib.request.Request(self.url + path, data)) as answer:
            return json.loads(answer.read())

    def put(self, name, files, **more):
        encoded = {path: b64encode(data).decode() for path, data in files.items()}
        self.ask("/_put", {"name": name, "files": encoded, **more})

    def downloads(self):
        return [line for line in self.ask("/_log") if line.startswith("GET") and "/resolve/" in line]


class Client:
    """A process with robopolicy in it, in `folder`, as the user of a token."""

    def __init__(self, hub, folder, **environment):
        folder.mkdir(exist_ok=True)
        known = {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "hf"), "HF_HUB_DISABLE_XET": "1"}
        quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "0"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", CLIENT],
            cwd=folder,
            env={**os.environ, **known, **quiet, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, asked, token):
        self.process.stdin.write(json.dumps({**asked, "environment": {"HF_TOKEN": token}}) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def run(self, *words, token="hf_alice"):
        return self.ask({"words": list(map(str, words))}, token)

    def code(self, code, token="hf_alice"):
        reply = self.ask({"code": code}, token)
        assert reply["status"] == 0, reply["err"]
        return reply["out"].strip()

    def end(self):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture(scope="module")
def hub():
    process = subprocess.Popen([sys.executable, str(HERE / "hub_server.py")], stdout=subprocess.PIPE, text=True)
    yield Hub(int(process.stdout.readline()))
    process.send_signal(signal.SIGTERM)
    process.wait()
    process.stdout.close()


@pytest.fixture
def fresh(hub):
    """The server as at first: nothing of what a test made it do remains."""
    hub.ask("/_control", {"clear": True, "down": False, "stop": 10**6})
    return hub


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def client(hub, work):
    made = Client(hub, work)
    yield made
    made.end()


def episodes() -> Episodes:
    world = make_world("reach_planar", 4)
    recorded_episodes = record(world, load_task("reach_planar").expert(), range(4))
    world.close()
    return recorded_episodes


@pytest.fixture(scope="module")
def policy_run(work):
    """A run folder like that of finetune: a checkpoint, a result, versions, a film, and a file that is a pickle."""
    torch.manual_seed(0)
    spec = make_world("reach_planar", 1).spec
    made = DenoisingPolicy(
        DenoisingPolicyConfig(width=16, depth=1, sampling_steps=2), spec.observation, spec.action, fps=spec.fps
    )
    run = work / "runs" / "finetune" / "reach_planar" / "0"
    remember_origin(made, WorldOrigin("reach_planar"))
    made.save(run / "checkpoint")
    torch.save({"x": 1}, run / "checkpoint" / "optimizer.pt")
    rate = {"world": "reach_planar", "episodes": 200, "reports_success": True}
    modes = [{**rate, "success_rate": s, "low": s - 0.05, "high": s + 0.04} for s in (0.5, 0.9)]
    result = {
        name: {"deterministic": each, "stochastic": each} for name, each in zip(("base", "tuned"), modes, strict=True)
    }
    result["difference"] = {"difference": 0.4, "low": 0.31, "high": 0.48}
    result |= {"base_checkpoint": "runs/train/reach_planar/0/checkpoint", "env_steps": 12345, "seconds": 60.0}
    write_json(run / "result.json", result)
    command = [str(work / "bin" / "robopolicy"), "finetune", "world=reach_planar", f"finetune.policy={Path.home()}/x"]
    write_json(run / "versions.json", {"seed": 7, "command": command, "packages": {"torch": "2"}, "commit": "abc"})
    (run / "config.yaml").write_text("run:\n  seed: 7\n")
    (run / "base_and_tuned.mp4").write_bytes(b"film")
    return run


def test_a_policy_that_was_pushed_acts_as_before(client, fresh, policy_run, work):
    reply = client.run("push", policy_run, "alice/reach", "json=pushed.json")
    assert reply["status"] == 0, reply
    assert (
        "private: visible to you" in reply["out"]
        and "Left out (neither safetensors nor JSON): optimizer.pt" in reply["out"]
    )
    files = set(json.loads((work / "pushed.json").read_text())["files"])
    assert files == {"config.json", "model.safetensors", "base_and_tuned.mp4"}
    settings = "evaluate.episodes=6", "evaluate.videos=0", "run.threads=1", "world.batch_size=6"
    for name, policy in (
        ("local", policy_run / "checkpoint"),
        ("hub", "alice/reach"),
        ("named", "hf://alice/reach@main"),
    ):
        reply = client.run("evaluate", policy, f"run.name={name}", *settings)
        assert reply["status"] == 0, reply
    results = [
        json.loads((work / f"runs/evaluate/{name}/0/result.json").read_text()) for name in ("local", "hub", "named")
    ]
    for mode in ("deterministic", "stochastic"):
        assert len({json.dumps(each["policy"][mode]["per_episode"]) for each in results}) == 1
    assert len([line for line in fresh.downloads() if line.endswith("model.safetensors")]) == 1, "the cache is used"
    assert not [line for line in fresh.downloads() if "mp4" in line], "the film is not needed"


def test_the_card_says_what_was_measured_and_what_was_not(client, fresh, policy_run):
    card = client.code("""
from huggingface_hub import ModelCard, hf_hub_download
card = ModelCard.load("alice/reach")
(result,) = card.data.eval_results
assert card.data.library_name == "robopolicy" and card.data.pipeline_tag == "robotics"
assert {"robotics", "robopolicy", "diffusion", "finetune", "reach_planar"} <= set(card.data.tags)
assert (result.dataset_name, result.metric_type, result.metric_value) == ("reach_planar", "success_rate", 0.9)
print(card.content)
""")
    assert "| base | reach_planar | 50.0% [45.0%, 54.0%] | 50.0% [45.0%, 54.0%] | 200 |" in card
    assert "Paired difference to the base, without exploration noise: **+40.0 points [+31.0, +48.0]**" in card
    assert "robopolicy finetune world=reach_planar finetune.policy='~/x'" in card or "finetune.policy=~/x" in card
    assert str(Path.home()) not in card and "Training seed: 7" in card and "Commit of robopolicy: abc" in card
    unmeasured = card[card.index("## What was not measured") :]
    assert "A real robot." in unmeasured and "training seeds" in unmeasured
    assert not re.search(r"\n\n\n", card)


def test_a_dry_run_writes_the_card_which_is_then_used_as_it_is(client, fresh, policy_run):
    reply = client.run("push", policy_run / "checkpoint", "alice/dry", "push.dry_run=true", "push.private=false")
    card = policy_run / "checkpoint" / "README.md"
    assert reply["status"] == 0 and "Nothing was uploaded" in reply["out"] and not fresh.ask("/_log")
    card.write_text(card.read_text() + "\nMy own sentence.\n")
    reply = client.run("push", policy_run / "checkpoint", "alice/dry", "push.private=false")
    assert "public: visible to everyone" in reply["out"] and "README.md: as it is in" in reply["out"]
    readme = client.code(
        'from huggingface_hub import ModelCard; print(ModelCard.load("alice/dry").content)', token="hf_bob"
    )
    assert readme.endswith("My own sentence.")
    card.unlink()


def test_a_dataset_comes_back_as_it_was_and_lerobot_reads_it(client, fresh, work):
    recorded = episodes()
    write_dataset(recorded, work / "recorded")
    reply = client.run("push", "recorded", "alice/data")
    assert reply["status"] == 0, reply
    answer = client.code("""
import torch
from pathlib import Path
from huggingface_hub import DatasetCard
from robopolicy.core.hub import local_folder
from robopolicy.data.lerobot_format import read_dataset
folder = local_folder("hf://datasets/alice/data@v3.0", "model")
before, after = read_dataset(Path("recorded")), read_dataset(folder)
assert torch.equal(before.actions, after.actions) and set(before.observation) == set(after.observation)
assert all(torch.equal(before.observation[key], after.observation[key]) for key in before.observation)
card = DatasetCard.load("alice/data")
assert "LeRobot" in card.data.tags and card.data.task_categories == ["robotics"]
assert "4 episodes" in card.content and "`observation.state`" in card.content
from lerobot.datasets.lerobot_dataset import LeRobotDataset
read = LeRobotDataset("alice/data")
assert read.num_episodes == 4 and torch.allclose(read[0]["action"], before.actions[0].float())
print("same")
""")
    assert answer.endswith("same")
    small = "train.fit.steps=2", "train.evaluate_episodes=0", "policy.width=16", "policy.depth=1", "run.threads=1"
    reply = client.run("train", "train.data=alice/data", "run.name=from_hub", *small)
    assert reply["status"] == 0, reply
    reply = client.run("push", "runs/train/from_hub/0", "alice/trained", "push.dry_run=true")
    card = (work / "runs/train/from_hub/0/checkpoint/README.md").read_text()
    assert "datasets:\n- alice/data" in card and "Success: this checkpoint was not evaluated" in card


def test_lerobot_loads_what_was_pushed_of_its_own(client, fresh, work):
    from lerobot.configs import FeatureType, PolicyFeature
    from lerobot.policies.act.modeling_act import ACTPolicy

    inputs = {"observation.state": PolicyFeature(FeatureType.STATE, (6,)),
              "observation.environment_state": PolicyFeature(FeatureType.ENV, (6,))}  # fmt: skip
    policy = ACTPolicy(tiny_act(inputs, {"action": PolicyFeature(FeatureType.ACTION, (2,))}))
    policy.save_pretrained(work / "act")
    (work / "act" / "README.md").unlink(missing_ok=True)
    reply = client.run("push", "act", "alice/act", "push.private=false")
    assert reply["status"] == 0, reply
    answer = client.code("""
import torch
from huggingface_hub import ModelCard
from lerobot.policies.act.modeling_act import ACTPolicy
here, there = (ACTPolicy.from_pretrained(name).state_dict() for name in ("act", "alice/act"))
assert here.keys() == there.keys() and all(torch.equal(here[key], there[key]) for key in here)
card = ModelCard.load("alice/act")
assert card.data.library_name == "lerobot" and "act" in card.data.tags and card.data.eval_results is None
assert "A robot policy (act)" in card.content
print("same")
""", token="hf_bob")  # fmt: skip
    assert answer.endswith("same")


def test_pickles_are_refused_and_never_downloaded(client, fresh):
    fresh.put("eve/pickled", {"config.json": b"{}", "pytorch_model.bin": b"evil", "README.md": b""})
    reply = client.run("evaluate", "eve/pickled")
    assert reply["status"] == 2
    assert re.search(
        r"Error: hf://eve/pickled contains only pickled weights \(pytorch_model\.bin\).*never downloaded", reply["err"]
    )
    fresh.put(
        "eve/mixed", {"config.json": b"{}", "model.safetensors": b"x", "pytorch_model.bin": b"evil", "run.py": b"evil"}
    )
    client.run("evaluate", "eve/mixed")
    assert {line.rpartition("/")[2] for line in fresh.downloads()} == {"config.json", "model.safetensors"}
    fresh.put("eve/empty", {"README.md": b""})
    assert "contains no weights as safetensors" in client.run("serve", "eve/empty")["err"]


def test_who_may_not_read_or_write_hears_why(client, fresh, policy_run):
    def error(*words, token="hf_alice"):
        reply = client.run(*words, token=token)
        assert reply["status"] == 2 and reply["err"].count("Error:") == 1, reply
        return reply["err"]

    assert "does not exist on the hub, or your token may not read it" in error("evaluate", "alice/nothing")
    assert "does not exist on the hub, or is private: if it is yours, log in with 'hf auth login'" in error(
        "evaluate", "alice/reach", token=""
    )
    assert "may not read it" in error("evaluate", "alice/reach", token="hf_bob")
    assert "refuses your token, which is invalid" in error("evaluate", "alice/reach", token="hf_wrong")
    assert "alice/data is a dataset on the hub (hf://datasets/alice/data), where a model is needed" in error(
        "evaluate", "alice/data"
    )
    assert "alice/reach exists on the hub, but has no branch, tag or commit 'v9'" in error("evaluate", "alice/reach@v9")
    fresh.put("eve/gated", {"model.safetensors": b"x"})
    fresh.ask("/_control", {"gate": "eve/gated"})
    assert "hf://eve/gated is gated: accept its conditions on http" in error("evaluate", "eve/gated")
    assert "not allowed" in error("push", policy_run, "alice/reach", token="hf_bob")
    assert "log in with 'hf auth login'" in error("push", policy_run, "alice/reach", token="")
    assert "is not a repository name: write USER/NAME" in error("push", policy_run, "reach")
    assert "is not a folder" in error("push", "nowhere", "alice/reach")


def test_an_interrupted_download_continues(client, fresh, work):
    shutil.rmtree(work / "hf", ignore_errors=True)
    fresh.ask("/_control", {"stop": 1})
    reply = client.run("evaluate", "alice/reach", *ONE)
    assert reply["status"] == 2 and "Error:" in reply["err"] and "Traceback" not in reply["err"], reply
    fresh.ask("/_control", {"stop": 10**6, "clear": True})
    assert client.run("evaluate", "alice/reach", *ONE, "run.name=again")["status"] == 0
    assert len(fresh.downloads()) == 2, "one of the three files had come through"


def test_a_connection_that_drops_is_tried_again(client, fresh, work):
    shutil.rmtree(work / "hf", ignore_errors=True)
    fresh.ask("/_control", {"break": 1000})
    assert client.run("evaluate", "alice/reach", *ONE, "run.name=dropped")["status"] == 0
    assert len([line for line in fresh.downloads() if "model.safetensors" in line]) == 2


def test_without_the_hub_the_cache_is_used_and_what_is_not_there_is_said_at_once(client, fresh, work):
    fresh.ask("/_control", {"down": True})
    reply = client.run("evaluate", "alice/reach", *ONE, "run.name=down")
    assert (
        reply["status"] == 0 and "cannot be reached: the copy of hf://alice/reach in the cache is used" in reply["err"]
    )
    reply = client.run("evaluate", "alice/other")
    assert (
        reply["status"] == 2
        and "alice/other is not a local folder" in reply["err"]
        and "hf download alice/other" in reply["err"]
    )
    fresh.ask("/_control", {"clear": True})
    offline = Client(fresh, work, HF_HUB_OFFLINE="1")
    reply = offline.run("evaluate", "alice/reach", *ONE, "run.name=offline")
    assert reply["status"] == 0, reply
    reply = offline.run("train", "train.data=hf://datasets/alice/nothing")
    assert reply["status"] == 2 and "HF_HUB_OFFLINE is set" in reply["err"] and "--repo-type dataset" in reply["err"]
    reply = offline.run("push", "recorded", "alice/data")
    assert reply["status"] == 2 and "HF_HUB_OFFLINE is set" in reply["err"]
    offline.end()
    assert not fresh.ask("/_log")
