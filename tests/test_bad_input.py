"""What a user can get wrong, through the command line: one sentence that names the thing and the way out, status 2."""

import errno
import json
import shutil
import socket
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_runs import TINY

from robopolicy.cli import main
from robopolicy.core import storage
from robopolicy.core.episodes import Episodes
from robopolicy.core.spec import Field
from robopolicy.core.world import Step
from robopolicy.data.lerobot_format import write_dataset
from robopolicy.data.lerobot_reading import read_dataset
from sims.engine import MujocoWorld
from sims.registry import make_world

SMALL = [*TINY, "evaluate.episodes=4", "evaluate.videos=0"]


@pytest.fixture
def checkpoint(root, tmp_path):
    copy = tmp_path / "checkpoint"
    shutil.copytree(root / "train" / "reach_planar" / "0" / "checkpoint", copy)
    return copy


def complaint(capsys, verb, *arguments) -> str:
    capsys.readouterr()
    assert main([verb, *SMALL, *map(str, arguments)]) == 2
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (["trian"], ["'trian' is not a verb", "'train'"]),
        (["train", "policy.widht=3"], ["policy.widht", "'policy.width'"]),
        (["train", "train.fit.batch_size=64"], ["train.fit.batch_size", "Did you mean 'train.batch_size'?"]),
        (["train", "train.learning_rate=64"], ["Did you mean 'train.fit.learning_rate'?"]),
        (["evaluate", "evaluate.batch_size=64"], ["Did you mean 'world.batch_size'?"]),
        (["train", "train.fit.setps=64"], ["Did you mean 'train.fit.steps'?"]),
        (["collect", "recipe=push_tea"], ["push_tea", "'push_t'"]),
        (["collect", "world.name=push_cubes", "run.name=a"], ["push_cubes", "'push_cube'"]),
        (["check", "push_cub"], ["'push_cub' is not a folder", "'push_cube'"]),
        (["check", "libero_spatial"], ["'libero_spatial' is not a folder", "libero/<suite>[:<task>]"]),
        (["collect", "world.cameras=[topp]", "run.name=b"], ["no camera 'topp'", "'top'"]),
        (["collect", "collect.noise=[loww]", "run.name=c"], ["loww", "'low'"]),
        (["collect", "collect.images=jpg", "run.name=d"], ["collect.images", "'png'"]),
        (["finetune", "finetune.algorithm=grop", "run.name=e"], ["grop", "'grpo'"]),
        (["finetune", "finetune.finetuned_steps=99", "run.name=f"], ["99", "chain of 2"]),
        (["serve", "serve.host=0.0.0.0"], ["0.0.0.0", "API key"]),
        (["serve", "serve.port=70000"], ["port=70000", "1 to 65535"]),
        (["serve", "serve.max_batch_size=0"], ["max_batch_size is 0"]),
        (["serve", "serve.hang_timeout=0"], ["hang_timeout is 0"]),
        (["optimize", "optimize.engines=[leen]"], ["no engine 'leen'", "'lean'"]),
        (["drive", "drive.port=70000"], ["port=70000", "1 to 65535"]),
        (["drive", "drive.seconds=3", "drive.task=push"], ["drive.task, drive.seconds", "drive.robot=TYPE"]),
        (["drive", "drive.episodes=0"], ["drive.episodes is 0"]),
        (["drive", "drive.robot=so101_follower", "drive.rate=-1"], ["drive.rate=-1 is only for simulated robots"]),
        (["drive", "drive.host=wss://127.0.0.1:1", "drive.port=2"], ["contains port 1, but drive.port=2"]),
        (["drive", "drive.certificate=/nowhere.pem"], ["/nowhere.pem cannot be read"]),
        (["evaluate", "evaluate.episodes=-1"], ["evaluate.episodes is -1"]),
        (["evaluate", "evaluate.videos=-1"], ["evaluate.videos is -1"]),
        (["finetune", "finetune.videos=-1"], ["finetune.videos is -1"]),
        (["finetune", "finetune.scored_steps=-1"], ["scored_steps is -1"]),
        (["finetune", "finetune.num_envs=0"], ["finetune.num_envs"]),
        (["bench", "simz"], ["simz", "'sims'"]),
        (["train", "train.data=[a"], ["train.data=[a cannot be parsed", "KEY='a=b'"]),
        (["evaluate", "evaluate.policy=a=b"], ["evaluate.policy=a=b cannot be parsed"]),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else None,
)
def test_a_wrong_word_is_named_with_the_nearest_right_one(root, capsys, arguments, texts):
    policy = root / "train" / "reach_planar" / "0" / "checkpoint"
    verb, *rest = arguments
    given = [f"{verb}.policy={policy}"] if verb in ("finetune", "serve", "optimize") else []
    message = complaint(capsys, verb, *rest, *given, f"run.root={root}")
    for text in texts:
        assert text in message


def test_a_start_that_failed_does_not_stand_in_the_way(root, capsys):
    policy = root / "train" / "reach_planar" / "0" / "checkpoint"
    same = [f"run.root={root}", "run.name=again", f"finetune.policy={policy}"]
    assert "99" in complaint(capsys, "finetune", *same, "finetune.finetuned_steps=99")
    assert "98" in complaint(capsys, "finetune", *same, "finetune.finetuned_steps=98")


def test_a_policy_of_another_world(root, checkpoint, capsys):
    message = complaint(capsys, "evaluate", checkpoint, "world=push_cube", f"run.root={root}")
    assert "'observation.environment_state' as [6]" in message
    assert "'push_cube' outputs [13]" in message


def test_a_setting_that_a_verb_does_not_read_is_said(root, tmp_path, capsys):
    absent = tmp_path / "absent"
    message = complaint(capsys, "finetune", str(absent), "recipe=push_cube", "policy.width=33", f"run.root={root}")
    known = "evaluate.episodes, evaluate.videos, policy.width: it reads only run, world, workers, plan, finetune"
    assert "'finetune' does not read policy.width, policy.depth" in message and known in message
    message = complaint(capsys, "train", "world=push_t", "collect.quality=medium", f"run.root={root}")
    assert "quality" not in message and "push_t-medium" in message  # it says where the data lies


@pytest.mark.long
def test_a_path_of_any_characters_is_a_target(root, checkpoint, tmp_path):
    folder = tmp_path / "rate=3e-4, {it's} [run 1]" / "checkpoint"
    folder.parent.mkdir()
    shutil.copytree(checkpoint, folder)
    assert main(["evaluate", *SMALL, str(folder), f"run.root={tmp_path}", f"json={tmp_path / 'figures.json'}"]) == 0
    assert (tmp_path / "figures.json").exists()


@pytest.mark.long
def test_a_policy_that_does_not_fit_is_named_before_others_are_ranked(root, checkpoint, capsys, monkeypatch):
    spec = make_world("reach_planar", 1).spec
    other = root / "other"
    shutil.copytree(checkpoint, other, dirs_exist_ok=True)
    description = json.loads((other / "config.json").read_text())
    description["spec"]["action"]["names"] = ["left", *spec.action.names[1:]]
    (other / "config.json").write_text(json.dumps(description))
    played: list[object] = []
    monkeypatch.setattr("robopolicy.verbs.rank.score", lambda *given: played.append(given))
    message = complaint(
        capsys, "rank", f"rank.policies=[{checkpoint},{other}]", f"run.root={root}", "rank.noise=[none]"
    )
    assert "is 'left' for the policy" in message and not played


def test_code_in_the_place_of_a_checkpoint(root, capsys):
    message = complaint(capsys, "evaluate", "my_package.policies:Mine", f"run.root={root}")
    assert "policy.kind=my_package.policies:Mine" in message
    assert "collect.controller=my_package.policies:Mine" in message


def test_a_missing_camera(root, checkpoint, capsys):
    description = json.loads((checkpoint / "config.json").read_text())
    dataset = root / "collect" / "reach_planar" / "0" / "dataset"
    assert description["kind"] == "denoising_policy"
    message = complaint(
        capsys,
        "train",
        f"train.data={dataset}",
        "policy.observation_keys=[observation.images.top]",
        f"run.root={root}",
        "run.name=camera",
    )
    assert "observation.images.top" in message


def test_a_checkpoint_in_the_place_of_doctors_data(root, checkpoint, capsys):
    message = complaint(capsys, "doctor", checkpoint, f"run.root={root}")
    assert f"robopolicy doctor DATA doctor.policy={checkpoint}" in message


def test_actions_of_another_shape(root, tmp_path, capsys):
    episodes = read_dataset(root / "collect" / "reach_planar" / "0" / "dataset")
    wider = torch.cat([episodes.actions, episodes.actions[:, :1]], 1)
    changed: Episodes = replace(episodes, actions=wider, action_field=Field((3,)))
    write_dataset(changed, tmp_path / "wide")
    unjudged = "train.evaluate_episodes=0", f"train.data={tmp_path / 'wide'}", f"run.root={tmp_path}"
    assert main(["train", *SMALL, *unjudged]) == 0
    message = complaint(capsys, "evaluate", tmp_path / "train/reach_planar/0/checkpoint", f"run.root={tmp_path}")
    assert "actions are [3]" in message
    assert "'reach_planar' are [2]" in message


def test_corrupt_checkpoints(root, checkpoint, capsys):
    weights = checkpoint / "model.safetensors"
    whole = weights.read_bytes()
    for data in (whole[:2000], b"not a tensor file", whole[:-1]):
        weights.write_bytes(data)
        message = complaint(capsys, "evaluate", checkpoint, f"run.root={root}")
        assert "model.safetensors is not the file that was saved with config.json" in message
    weights.write_bytes(whole)
    (checkpoint / "config.json").write_text('{"kind": ')
    assert "config.json is corrupt" in complaint(capsys, "evaluate", checkpoint, f"run.root={root}")
    (checkpoint / "config.json").write_text('{"kind": "toaster"}')
    assert "'toaster', not a policy" in complaint(capsys, "evaluate", checkpoint, f"run.root={root}")


def test_pickles_are_never_read(root, tmp_path, capsys):
    torch.save({"weights": torch.zeros(2)}, tmp_path / "policy.pt")
    message = complaint(capsys, "evaluate", tmp_path / "policy.pt", f"run.root={root}")
    assert "never read" in message


def test_a_non_finite_observation(root, checkpoint, capsys, monkeypatch):
    step = MujocoWorld.step

    def broken(self, actions) -> Step:
        result = step(self, actions)
        result.observation["observation.state"][1] = np.nan
        return result

    monkeypatch.setattr(MujocoWorld, "step", broken)
    message = complaint(capsys, "evaluate", checkpoint, f"run.root={root}")
    assert "'observation.state' is not finite in row(s) [1]" in message


def test_an_occupied_port(checkpoint, capsys):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        message = complaint(capsys, "serve", checkpoint, f"serve.port={port}")
    assert f"127.0.0.1:{port}" in message
    assert "another port" in message


def test_a_full_output_folder_loses_nothing(root, tmp_path, capsys, monkeypatch):
    real = storage.os.replace
    dataset = root / "collect" / "reach_planar" / "0" / "dataset"
    arguments = [f"train.data={dataset}", f"run.root={tmp_path}", "train.fit.checkpoint_every=5"]

    def full(source, target):
        raise OSError(errno.ENOSPC, "No space left on device", str(target))

    monkeypatch.setattr(storage.os, "replace", full)
    assert "No space left" in complaint(capsys, "train", *arguments)
    monkeypatch.setattr(storage.os, "replace", real)
    assert main(["train", *SMALL, *arguments]) == 0


def test_a_folder_that_cannot_be_written(root, tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    message = complaint(capsys, "collect", f"run.root={tmp_path / 'file'}")
    assert "file" in message


def test_a_setting_longer_than_any_path_is_a_setting(capsys):
    """Whether a word with "=" in it is a path is asked of the system, which refuses names of more than 255 bytes."""
    assert main(["bench", "sims", f"bench.typo=[{','.join(['reach_planar'] * 400)}]"]) == 2
    assert "bench.typo" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("verb", "text"), [("evaluate", "Nothing is lost"), ("rank", "starts again from the beginning")]
)
def test_an_interrupted_verb_says_whether_it_goes_on(verb, text, capsys, monkeypatch, tmp_path):
    def interrupted(config):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"robopolicy.verbs.{verb}.run", interrupted)
    assert main([verb, "recipe=reach_planar", f"run.root={tmp_path}"]) == 130
    assert text in capsys.readouterr().err


def test_a_rank_below_none_is_no_rank(capsys):
    message = complaint(capsys, "finetune", "recipe=push_t", "finetune.lora_rank=-1")
    assert "finetune.lora_rank is -1: it must be at least 0" in message


def test_choices_of_lerobots_policies_are_not_for_ours(capsys, checkpoint):
    for settings in ([], ["finetune.dry_run=true"]):
        message = complaint(capsys, "finetune", checkpoint, "lerobot.eta=0.5", *settings)
        assert "lerobot" in message and "DenoisingPolicy" in message
