"""Policies and recordings know the world they come from: it is the default, and another one is compared by names."""

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from robopolicy.building.origins import with_origin
from robopolicy.cli import main
from robopolicy.client.policy_client import PolicyClient
from robopolicy.configuration import compose
from robopolicy.core.errors import CheckpointError, ConfigError, DataError, RobopolicyWarning, SpecError
from robopolicy.core.origin import WorldOrigin, origin_of
from robopolicy.core.spec import Field, PolicySpec, WorldSpec, require_fit
from robopolicy.data.lerobot_format import read_dataset, recorded_origin, write_dataset
from robopolicy.policies.loading import load_policy, saved_origin
from robopolicy.verbs.verb import declaration
from worldmodels.checkpoint import load_world_model, save_world_model

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("always::robopolicy.core.errors.RobopolicyWarning")]

SMALL = {
    "collect": ["collect.episodes=4"],
    "train": ["policy.width=16", "policy.depth=1", "policy.sampling_steps=2", "train.fit.steps=5"],
    "finetune": [
        "finetune.iterations=1",
        "finetune.num_envs=4",
        "finetune.rollout_length=2",
        "finetune.minibatch=8",
        "finetune.evaluate_episodes=4",
        "finetune.critic_width=8",
        "finetune.videos=0",
    ],
    "evaluate": ["evaluate.episodes=4", "evaluate.videos=0"],
    "rank": ["rank.episodes=4", "rank.noise=[none,random]"],
}


COUNTED = {"recover_folder": "folder", "read_text": "path", "_described_in": "path"}
"""Functions that read a checkpoint, and which of their arguments is its folder or config.json."""


def run(verb, *settings, home):
    return main([verb, *SMALL.get(verb, []), "world.batch_size=4", *settings, f"run.root={home}"])


def said(capsys):
    return " ".join(capsys.readouterr().err.split())


@pytest.fixture(scope="module")
def push_t(tmp_path_factory):
    """A folder of runs in push_t, with another horizon than the default's."""
    home = tmp_path_factory.mktemp("push_t")
    for verb in ("collect", "train"):
        judged = ["train.evaluate_episodes=4"] if verb == "train" else []
        assert run(verb, *judged, "world=push_t", "world.options.threads=1", home=home) == 0
    return home


def dataset(home):
    return home / "collect" / "push_t" / "0" / "dataset"


def checkpoint(home, verb="train"):
    return home / verb / "push_t" / "0" / "checkpoint"


ORIGIN = WorldOrigin("push_t", {"threads": 1})


def test_checkpoints_and_datasets_say_their_world_and_are_judged_in_it(push_t):
    assert recorded_origin(dataset(push_t)) == ORIGIN
    assert saved_origin(checkpoint(push_t)) == ORIGIN
    assert run("evaluate", str(checkpoint(push_t)), home=push_t) == 0
    result = json.loads((push_t / "evaluate" / "push_t" / "0" / "result.json").read_text())
    assert result["policy"]["deterministic"]["world"] == "push_t"
    assert "threads: 1" in (push_t / "evaluate" / "push_t" / "0" / "config.yaml").read_text()


def test_what_is_made_of_them_stays_in_their_world(push_t, tmp_path):
    made = checkpoint(push_t)
    assert run("finetune", str(made), home=tmp_path) == 0
    assert saved_origin(checkpoint(tmp_path, "finetune")) == ORIGIN
    assert run("collect", f"collect.policy={made}", home=tmp_path) == 0
    assert recorded_origin(dataset(tmp_path)) == ORIGIN
    assert run("train", f"train.data={dataset(push_t)}", "train.evaluate_episodes=4", home=tmp_path) == 0
    assert saved_origin(checkpoint(tmp_path)) == ORIGIN
    unjudged = [f"train.data={dataset(push_t)}", "train.evaluate_episodes=0", "run.name=unjudged"]
    assert run("train", *unjudged, home=tmp_path) == 0
    assert saved_origin(tmp_path / "train" / "unjudged" / "0" / "checkpoint") == ORIGIN


@pytest.mark.parametrize("verb", ["finetune", "evaluate", "train"])
def test_a_checkpoint_is_opened_once(push_t, tmp_path, verb):
    """Its world, its kind, its weights' hash, and policy and base in it: all of them ask what was read at first."""
    made = Path(shutil.copytree(checkpoint(push_t), tmp_path / "given"))  # which this process has not opened yet
    opened = Counter()

    def count(frame, event, _):
        if event == "call" and (argument := COUNTED.get(frame.f_code.co_name)) is not None:
            opened[frame.f_code.co_name] += Path(frame.f_locals.get(argument, "")) in (made, made / "config.json")

    begins = [f"train.data={dataset(push_t)}"] if verb == "train" else []
    sys.setprofile(count)
    try:
        assert run(verb, f"{verb}.policy={made}", *begins, home=tmp_path) == 0
    finally:
        sys.setprofile(None)
    assert opened == {"recover_folder": 1, "read_text": 1, "_described_in": 1}


def test_the_doctor_examines_data_in_their_own_world(push_t, capsys):
    assert run("doctor", str(dataset(push_t)), "run.name=examined", home=push_t) in (0, 1)
    assert "good replay" in " ".join(capsys.readouterr().out.split())


def test_a_run_is_found_by_its_name_alone(push_t, tmp_path):
    shutil.copytree(push_t / "train" / "push_t", tmp_path / "train" / "mine")
    assert run("finetune", "run.name=mine", home=tmp_path) == 0
    assert saved_origin(tmp_path / "finetune" / "mine" / "0" / "checkpoint") == ORIGIN


def test_another_world_of_the_same_shapes_is_refused_before_anything_starts(push_t, tmp_path, capsys):
    jobs = {
        "evaluate": [str(checkpoint(push_t))],
        "finetune": [str(checkpoint(push_t))],
        "collect": [f"collect.policy={checkpoint(push_t)}"],
        "train": [f"train.data={dataset(push_t)}", "train.evaluate_episodes=4"],
    }
    for verb, settings in jobs.items():
        capsys.readouterr()
        assert run(verb, *settings, "world=push_cube", home=tmp_path) == 2, verb
        error = said(capsys)
        assert "'block_x' for the policy, but 'cube_x' in the world 'push_cube'" in error, error
        assert "config.json" in error
        assert not list((tmp_path / verb).glob("**/checkpoint")), verb


def test_names_that_mean_the_same_are_made_the_same(push_t, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint(push_t), copy)
    other = load_policy(checkpoint(push_t)).spec
    file = copy / "config.json"
    description = json.loads(file.read_text())
    from sims.registry import make_world

    world = make_world("push_cube", 1)
    for key, field in world.spec.observation.items():
        if key in description["spec"]["observation"]:
            description["spec"]["observation"][key]["names"] = list(field.names)
    description["spec"]["action"]["names"] = list(world.spec.action.names)
    world.close()
    file.write_text(json.dumps(description))
    assert load_policy(copy).spec != other
    assert run("evaluate", str(copy), "world=push_cube", home=tmp_path) == 0


def test_policies_of_no_known_world_are_judged_as_before_and_it_is_said(push_t, tmp_path, capsys):
    old = tmp_path / "old"
    shutil.copytree(checkpoint(push_t), old)
    description = json.loads((old / "config.json").read_text())
    del description["world"]
    (old / "config.json").write_text(json.dumps(description))
    assert saved_origin(old) is None
    assert run("evaluate", str(old), "world=push_t", home=tmp_path) == 0
    assert "assumed" not in said(capsys)
    with pytest.warns(
        RobopolicyWarning,
        match=r"push_cube is assumed if a world is needed. .*world=demonstrations .*To choose another: world=NAME",
    ):
        config = compose([f"evaluate.policy={old}"], lambda config: with_origin(config, {"evaluate.policy": ""}))
    assert config.world.name == "push_cube"


def test_what_is_named_outweighs_what_a_file_says(push_t):
    def chosen(*settings):
        given = [f"evaluate.policy={checkpoint(push_t)}", *settings]
        return compose(given, lambda config: with_origin(config, {"evaluate.policy": ""})).world

    assert chosen("world=push_cube").options == {}
    assert chosen("recipe=push_cube").name == "push_cube"
    assert (chosen().name, chosen().options) == ("push_t", {"threads": 1})
    assert chosen("world.options.threads=2").options == {"threads": 2}


def planted(push_t, folder, world):
    shutil.copytree(checkpoint(push_t), folder)
    description = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**description, "world": world}))
    return folder


@pytest.mark.parametrize(
    "world",
    [
        {"name": "planted_world:Task", "options": {}},
        {"name": "gymnasium:planted_world:Env-v0", "options": {}},
        {"name": "push_t", "options": {"success": "planted_world:success"}},
        {"name": "push_t", "options": {"deep": [{"inside": "planted_world:success"}]}},
    ],
)
def test_a_checkpoint_does_not_choose_what_is_imported(push_t, tmp_path, monkeypatch, capsys, world):
    home = tmp_path / "home"
    home.mkdir()
    (home / "planted_world.py").write_text("import pathlib\npathlib.Path('imported').touch()\n")
    monkeypatch.chdir(home)
    folder = planted(push_t, tmp_path / "planted", world)
    assert run("evaluate", str(folder), home=home) == 2
    assert "If you trust it, set it yourself: world." in said(capsys)
    assert not (home / "imported").exists()


@pytest.mark.parametrize("world", ["push_t", {"name": 3, "options": {}}, {"name": "push_t"}, []])
def test_a_damaged_world_is_an_error(push_t, tmp_path, world):
    folder = planted(push_t, tmp_path / "planted", world)
    for read in (saved_origin, load_policy):
        with pytest.raises(CheckpointError, match="describes its world as"):
            read(folder)


def test_episodes_of_several_worlds_have_none(push_t, tmp_path):
    episodes = read_dataset(dataset(push_t))
    write_dataset(episodes, tmp_path / "a", origin=ORIGIN)
    write_dataset(episodes, tmp_path / "a", origin=ORIGIN, existing="append")
    assert recorded_origin(tmp_path / "a") == ORIGIN
    with pytest.raises(DataError, match="was recorded in"):
        write_dataset(episodes, tmp_path / "a", origin=WorldOrigin("push_cube"), existing="append")
    write_dataset(episodes, tmp_path / "a", existing="append")
    assert recorded_origin(tmp_path / "a") is None
    assert len(read_dataset(tmp_path / "a")) == 3 * len(episodes)


def test_a_gymnasium_world_with_its_options_is_found_again(tmp_path):
    pytest.importorskip("gymnasium")
    world = ["world.name=gymnasium:Pendulum-v1", "world.options.reward=environment", "world.options.workers=0"]
    controller = "gym_controller:Still"
    (tmp_path / "gym_controller.py").write_text(
        "import numpy as np\n\n\nclass Still:\n    def reset(self, rows=None): ...\n\n"
        "    def act(self, observation):\n"
        "        return np.zeros((len(observation['observation.state']), 1))\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        assert run("collect", *world, f"collect.controller={controller}", home=tmp_path) == 0
    data = tmp_path / "collect" / "gymnasium-Pendulum-v1" / "0" / "dataset"
    origin = WorldOrigin("gymnasium:Pendulum-v1", {"reward": "environment", "workers": 0})
    assert recorded_origin(data) == origin
    assert run("train", f"train.data={data}", "train.evaluate_episodes=4", home=tmp_path) == 0
    made = tmp_path / "train" / "gymnasium-Pendulum-v1" / "0" / "checkpoint"
    assert saved_origin(made) == origin
    assert run("evaluate", str(made), home=tmp_path) == 0
    assert (tmp_path / "evaluate" / "gymnasium-Pendulum-v1" / "0" / "result.json").exists()


def test_a_robot_is_driven_in_the_world_of_the_served_policy(push_t, tmp_path, capsys):
    command = [sys.executable, "-m", "robopolicy.cli", "serve", str(checkpoint(push_t)), "serve.port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            port = re.search(r"ws://[^:]+:(\d+)", server.stdout.readline())[1]
            robot = [f"drive.port={port}", "drive.episodes=1", "drive.rate=-1"]
            with PolicyClient("127.0.0.1", int(port)) as client:
                assert client.metadata["world"] == ORIGIN.to_json()
            config = compose(robot, lambda config: with_origin(config, declaration("drive").world_from))
            assert (config.world.name, config.world.options) == (ORIGIN.name, ORIGIN.options)
            assert main(["drive", *robot, f"json={tmp_path / 'figures.json'}"]) == 0
            assert json.loads((tmp_path / "figures.json").read_text())["episodes"] == 1
            capsys.readouterr()
            assert main(["drive", *robot, "world=push_cube"]) == 2
            assert "'block_x' for the policy, but 'cube_x' in the world 'push_cube'" in said(capsys)
        finally:
            server.terminate()


def test_policies_of_different_worlds_are_ranked_in_none_of_them_unasked(push_t, tmp_path):
    def ranked(*folders):
        paths = ",".join(map(str, folders))
        return compose([f"rank.policies=[{paths}]"], lambda config: with_origin(config, {"rank.policies": ""})).world

    other = planted(push_t, tmp_path / "other", {"name": "push_cube", "options": {}})
    assert ranked(checkpoint(push_t), checkpoint(push_t)).name == "push_t"
    with pytest.raises(ConfigError, match=r"from 'push_t' with threads=1, .* from 'push_cube': choose one, world=NAME"):
        ranked(checkpoint(push_t), other)


def test_a_world_model_carries_the_world_that_it_imitates(push_t, tmp_path, capsys):
    small = ["worldmodel.transitions=40", "worldmodel.config.members=2", "worldmodel.config.width=8"]
    small += ["worldmodel.fit.steps=2", "worldmodel.include_base=false", "worldmodel.validation_steps=4"]
    assert run("worldmodel", *small, f"worldmodel.data=[{dataset(push_t)}]", home=tmp_path) == 0
    model = checkpoint(tmp_path, "worldmodel")
    assert saved_origin(model) == ORIGIN == origin_of(load_world_model(model))
    save_world_model(load_world_model(model), tmp_path / "again")
    assert saved_origin(tmp_path / "again") == ORIGIN

    config = compose([f"rank.models=[{model}]"], lambda config: with_origin(config, declaration("rank").world_from))
    assert (config.world.name, config.world.options) == (ORIGIN.name, ORIGIN.options)
    inside = ["world=worldmodel", f"world.model={model}", f"evaluate.policy={checkpoint(push_t)}"]
    assert run("evaluate", *inside, home=tmp_path) == 0

    other = planted(push_t, tmp_path / "other", {"name": "push_cube", "options": {}})
    unlike = [f"finetune.policy={other}", f"imagine.model={model}"]
    assert main(["imagine", *unlike, f"run.root={tmp_path}"]) == 2
    assert "'push_cube', " in said(capsys)

    description = json.loads((model / "config.json").read_text())
    description["world"] = {"name": "push_t", "options": {"success": "planted_world:success"}}
    (model / "config.json").write_text(json.dumps(description))
    assert run("evaluate", *inside, "run.overwrite=true", home=tmp_path) == 2
    assert "If you trust it, set it yourself: world.options.success=planted_world:success" in said(capsys)


def test_a_policy_of_lerobot_may_be_given_a_world(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"type": "act"}))
    (tmp_path / "robopolicy.json").write_text(json.dumps({"fps": 10, "world": ORIGIN.to_json()}))
    assert saved_origin(tmp_path) == ORIGIN
    (tmp_path / "robopolicy.json").write_text(json.dumps({"world": "push_t"}))
    with pytest.raises(CheckpointError, match=r"robopolicy\.json describes its world as"):
        saved_origin(tmp_path)


def test_a_policy_of_lerobot_knows_no_world(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"type": "act"}))
    assert saved_origin(tmp_path) is None
    with pytest.warns(RobopolicyWarning, match="push_cube is assumed"):
        config = compose([f"evaluate.policy={tmp_path}"], lambda config: with_origin(config, {"evaluate.policy": ""}))
    assert config.world.name == "push_cube"


@pytest.mark.parametrize("kind", ["flow", "token", "joint", "memory"])
def test_every_kind_of_policy_carries_its_world(push_t, tmp_path, kind):
    small = {
        "flow": ["policy.width=16", "policy.depth=1"],
        "token": ["policy.token.width=16", "policy.token.depth=1"],
        "joint": ["policy.width=16", "policy.candidates=2", "policy.edm.steps=2"],
        "memory": ["policy.width=16", "policy.depth=1"],
    }
    settings = [f"policy.kind={kind}", *small[kind], "train.fit.steps=2", "train.evaluate_episodes=0"]
    assert main(["train", *settings, f"train.data={dataset(push_t)}", f"run.root={tmp_path}"]) == 0
    made = checkpoint(tmp_path)
    assert saved_origin(made) == ORIGIN
    load_policy(made).save(tmp_path / "again")
    assert saved_origin(tmp_path / "again") == ORIGIN


def test_fields_without_names_are_compared_by_shape_alone():
    named, nameless = Field((2,), names=("x", "y")), Field((2,))
    world = WorldSpec("w", {"observation.state": named}, named, 10.0, 5)
    policy = PolicySpec({"observation.state": nameless}, nameless, 1, 1, 1, 0, 10.0)
    require_fit(policy, world)
    require_fit(replace(policy, observation={"observation.state": named}, action=named), world)
    with pytest.raises(SpecError, match=r"Element 1 of 'observation.state' is 'z' for the policy, but 'y'"):
        require_fit(replace(policy, observation={"observation.state": replace(named, names=("x", "z"))}), world)
    with pytest.raises(SpecError, match="Element 0 of the action is 'y' for the policy, but 'x'"):
        require_fit(replace(policy, action=replace(named, names=("y", "x"))), world)


def test_a_dataset_of_no_known_world_is_its_own_world(push_t, tmp_path, capsys):
    foreign = tmp_path / "foreign"
    episodes = read_dataset(dataset(push_t))
    write_dataset(replace(episodes, action_field=replace(episodes.action_field, names=("left", "right"))), foreign)
    assert recorded_origin(foreign) is None
    assert run("train", "train.evaluate_episodes=4", f"train.data={foreign}", home=tmp_path) == 0
    assert "its own recorded episodes are used as the world if one is needed (world=demonstrations)" in said(capsys)
    judged = json.loads((tmp_path / "train" / "demonstrations" / "0" / "result.json").read_text())
    assert judged["policy"]["deterministic"]["world"] == "demonstrations"

    small = ["worldmodel.fit.steps=5", "worldmodel.validation_episodes=2", "worldmodel.validation_steps=10"]
    assert run("worldmodel", f"worldmodel.data=[{foreign}]", *small, home=tmp_path) == 0
    learned = tmp_path / "worldmodel" / "demonstrations" / "0" / "dataset"
    assert read_dataset(learned).step_count == episodes.step_count  # nothing was played besides

    capsys.readouterr()
    assert main(["doctor", str(foreign), f"run.root={tmp_path / 'doctor'}"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "unknown world not given" in text
    assert "replayed" not in text
    assert main(["doctor", str(foreign), "world=push_cube", f"run.root={tmp_path / 'doctor'}"]) == 1
