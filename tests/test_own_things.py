"""What a user brings along is found by its dotted path, and a file never chooses what is imported."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from robopolicy.cli import main
from robopolicy.configuration import compose
from robopolicy.core import registry
from robopolicy.core.errors import CheckpointError, ConfigError
from robopolicy.core.origin import WorldOrigin
from robopolicy.core.registry import Registry, import_plugins, load_dotted
from robopolicy.core.spec import Field, WorldSpec
from robopolicy.policies import load_policy
from robopolicy.rl import registry as mechanisms_of_rl
from robopolicy.rl.algorithm import build_algorithm
from robopolicy.rl.configuration import AlgorithmConfig
from robopolicy.rl.registry import Slot, get_mechanism
from robopolicy.verbs.check import spec_lines
from sims.registry import load_task, make_saved_world, make_world
from worldmodels import load_world_model

pytestmark = pytest.mark.long

OUTSIDE = "outside_robotics"
pytest.importorskip(OUTSIDE, reason="install it with: pip install -e tests/outside")


@pytest.fixture
def nothing_named(monkeypatch):
    """As in a process in which the user has named nothing yet."""
    monkeypatch.setattr(registry, "_asked_for", set())


def test_a_world_a_task_and_an_environment_by_dotted_path(monkeypatch):
    line = make_world("own_things:Line", 3, seed=0, history=2)
    assert line.spec.name == "line" and line.reset(seeds=np.arange(3))["observation.state"].shape == (3, 2, 1)
    task = make_world(f"{OUTSIDE}.reacher:task", 2, history=1)
    assert task.spec.name == f"{OUTSIDE}.reacher:task" and task.spec.action.names == ("shoulder", "elbow")
    with pytest.raises(ConfigError, match="not a Task"):
        load_task("own_things:Line")
    ball = f"{OUTSIDE}.ball:BallEnvironment"
    monkeypatch.setattr(load_dotted(ball, "World"), "max_episode_steps", 5, raising=False)
    rolling = make_world(ball, 2, env_options={"hole": 9.0})
    assert (rolling.spec.horizon, rolling.spec.instructions) == (5, ("ball environment",))
    rolling.reset(seeds=np.arange(2))
    assert rolling.step(np.zeros((2, 1, 2))).success.all()
    rolling.close()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("own_things:Lime", r"Did you mean 'Line'"),
        ("own_thing:Line", "no module 'own_thing'"),
        ("own_things:ACTION", "must be a class"),
        ("own_things:Towards", "could not be created: TypeError"),
        ("push_cubes", r"Did you mean 'push_cube'.*metaworld/<task>-v3.*gymnasium:<id>"),
    ],
)
def test_what_is_no_world_is_named(name, text):
    with pytest.raises(ConfigError, match=text):
        make_world(name, 2, seed=0)


def test_a_mjcf_lies_anywhere_or_beside_the_module_of_its_task(tmp_path, monkeypatch):
    scene = Path("assets") / load_task("push_cube").model
    module = """
import dataclasses
from sims.registry import load_task
from sims.task import Start
def start(uniforms):
    return load_task("push_cube").start(uniforms)
def task():
    return dataclasses.replace(load_task("push_cube"), model={model!r}, start=start)
"""
    root = Path(__file__).resolve().parents[1]
    for name in {path.name for path in (root / scene).parent.iterdir()}:
        (tmp_path / name).write_bytes(((root / scene).parent / name).read_bytes())
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "beside_task.py").write_text(module.format(model=scene.name))
    (tmp_path / "absolute_task.py").write_text(module.format(model=str(tmp_path / scene.name)))
    (tmp_path / "missing_task.py").write_text(module.format(model="nowhere.xml"))
    for name in ("beside_task", "absolute_task"):
        make_world(f"{name}:task", 1).reset(seeds=np.arange(1))
    with pytest.raises(ConfigError, match=r"nowhere\.xml, which does not exist"):
        make_world("missing_task:task", 1)


def test_a_file_does_not_choose_what_is_imported(tmp_path, monkeypatch, nothing_named):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "planted_module.py").write_text("raise SystemExit('imported')\n")
    for name in ("gymnasium:planted_module:Any-v0", "planted_module:World"):
        with pytest.raises(CheckpointError, match=r"world\.simulator="):
            make_saved_world(WorldOrigin(name), tmp_path, 2)
    (tmp_path / "checkpoint").mkdir()
    needs = {load_policy: "planted_module:Policy", load_world_model: "world_model/planted_module:Model"}
    for load, kind in needs.items():
        (tmp_path / "checkpoint" / "config.json").write_text(json.dumps({"kind": kind, "format": 2}))
        with pytest.raises(CheckpointError, match=r"run\.plugins=\[planted_module\]"):
            load(tmp_path / "checkpoint")
    assert "planted_module" not in sys.modules


def test_a_saved_world_that_the_user_has_named_is_made(nothing_named):
    with pytest.raises(CheckpointError):
        make_saved_world(WorldOrigin("own_things:Line"), Path("checkpoint"), 2)
    make_world("own_things:Line", 2)
    assert make_saved_world(WorldOrigin("own_things:Line"), Path("checkpoint"), 2).batch_size == 2


def test_own_policy_from_training_to_judgement_and_its_checkpoint(tmp_path, capsys, nothing_named):
    here = ["world=own_things:Line", "run.name=line", f"run.root={tmp_path}"]
    recorded = ["collect.controller=own_things:Towards", "collect.noise=[none]", "collect.episodes=6"]
    assert main(["collect", *here, *recorded]) == 0
    own = ["policy.kind=own_things:Linear", "policy.gain=0.1", "train.fit.steps=200", "train.evaluate_episodes=8"]
    assert main(["train", *here, *own, "train.fit.learning_rate=0.05"]) == 0
    folder = tmp_path / "train" / "line" / "0"
    assert json.loads((folder / "checkpoint" / "config.json").read_text())["kind"] == "own_things:Linear"
    assert json.loads((folder / "result.json").read_text())["policy"]["deterministic"]["success_rate"] == 1.0

    registry._asked_for.clear()
    bare = ["evaluate", str(folder / "checkpoint"), "run.name=line", f"run.root={tmp_path}"]
    capsys.readouterr()
    assert main(bare) == 2
    assert "world.name=own_things:Line run.plugins=[own_things]" in " ".join(capsys.readouterr().err.split())
    registry._asked_for.clear()
    judged = ["evaluate", str(folder / "checkpoint"), *here, "evaluate.episodes=4", "evaluate.videos=0"]
    world = [argument for argument in judged if not argument.startswith("world=")]
    capsys.readouterr()
    assert main([*world, "world=push_cube"]) == 2
    assert "run.plugins=[own_things]" in " ".join(capsys.readouterr().err.split())
    assert main([*judged, "run.plugins=[own_things]"]) == 0
    assert load_policy(folder / "checkpoint").spec.chunk == 2


MODEL = ["config.members=2", "config.width=8", "fit.steps=3", "validation_episodes=2", "validation_steps=4"]
TAUGHT = ["rounds=1", "episodes=4", "last_round_steps=5", "evaluate_episodes=4", "videos=0"]


def test_in_a_world_without_an_expert_ones_own_controller_plays_or_nobody(tmp_path, capsys):
    """For world models (where steps are missing in the data, and only then), in teaching and in ranking."""
    here = ["world=own_things:Line", "run.name=line", "world.batch_size=4", f"run.root={tmp_path}"]
    own = "collect.controller=own_things:Towards"
    assert main(["collect", *here, own, "collect.episodes=8"]) == 0
    count = json.loads((tmp_path / "collect" / "line" / "0" / "result.json").read_text())["steps"]
    model = ["worldmodel", *here, *(f"worldmodel.{each}" for each in MODEL)]
    data = f"worldmodel.data=[{tmp_path / 'collect' / 'line' / '0' / 'dataset'}]"
    assert main([*model, "worldmodel.transitions=1"]) == 0
    more = [data, f"worldmodel.transitions={count + 40}"]
    assert main([*model, *more, own, "run.name=own"]) == 0
    fresh = json.loads((tmp_path / "worldmodel" / "own" / "0" / "result.json").read_text())
    assert fresh["episodes"] > 8
    assert main([*model, *more, "worldmodel.noise=[]", "run.name=nobody"]) == 0
    capsys.readouterr()
    assert main([*model, *more, "run.name=circle"]) == 2
    output = " ".join(capsys.readouterr().err.split())
    assert "collect.controller=package.module:name" in output and "worldmodel.noise=[]" in output
    student = ["policy.width=16", "policy.depth=1", "policy.sampling_steps=2"]
    taught = [*(f"teach.{each}" for each in TAUGHT), "teach.teacher=expert"]
    assert main(["teach", *here, own, *student, *taught]) == 0
    models = f"rank.models=[{tmp_path / 'worldmodel' / 'line' / '0' / 'checkpoint'}]"
    assert main(["rank", *here, own, models, "rank.episodes=4", "rank.noise=[none,low,high]"]) == 0
    ranked = json.loads((tmp_path / "rank" / "line" / "0" / "result.json").read_text())["models"]["ensemble"]
    assert {"expert, noise none": 1.0}.items() <= {each["name"]: each["real"] for each in ranked["policies"]}.items()


def test_settings_of_an_own_policy_are_checked():
    with pytest.raises(ConfigError, match=r"policy\.kind=own_things:Linear has no 'gian'.*'policy\.gain'"):
        compose(["policy.kind=own_things:Linear", "policy.gian=1"])
    with pytest.raises(ConfigError, match="has no configuration"):
        compose(["policy.kind=own_things:LinearConfig"])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("own_things:Towards", "is a controller"),
        ("sims.tasks.push_cube:PushCubeExpert", "is a controller"),
        ("own_things:make_towards", r"is a function.*a controller\?"),
    ],
)
def test_a_controller_in_the_place_of_a_policy_is_told_where_it_belongs(name, said):
    with pytest.raises(ConfigError, match=rf"'{name}' {said}.*robopolicy collect.*controller={name}"):
        compose([f"policy.kind={name}"])


def test_own_advantage_decorated_and_plain():
    ranks = f"{OUTSIDE}.mechanisms:ranks"
    config = AlgorithmConfig(algorithm="grpo", advantage=ranks, options={"outside_ranks": {"scale": 2.0}})
    assert build_algorithm(config).advantage.keywords == {"scale": 2.0}
    decorated = get_mechanism(Slot.ADVANTAGE, ranks)
    assert (decorated.name, decorated.source) == ("outside_ranks", "an outside package")
    plain = get_mechanism(Slot.ADVANTAGE, "own_things:plain")
    assert (plain.name, plain.options, plain.needs) == ("plain", {"scale": 1.0}, frozenset())
    with pytest.raises(ConfigError, match="is a mechanism for the slot advantage"):
        get_mechanism(Slot.CREDIT, ranks)
    with pytest.raises(ConfigError, match="Did you mean 'plain'"):
        get_mechanism(Slot.ADVANTAGE, "own_things:plane")


MECHANISMS = '''
from robopolicy.rl.registry import Need, Slot, mechanism
@mechanism(Slot.CREDIT, "surely", source="nobody", needs=(Need.ENTROPY,))
def surely(rollouts, advantage, context, *, damping: float = 1.0):
    """Trusts all steps alike."""
    return advantage
@mechanism(Slot.ADVANTAGE, "surely_not")
def surely_not(rollouts):
    """Is called wrongly."""
    return rollouts
def plain(rollouts, context):
    return rollouts
'''


def test_an_own_mechanism_is_checked_explained_and_shown_its_slot(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(mechanisms_of_rl, "_registered", dict(mechanisms_of_rl._registered))
    (tmp_path / "mine_surely.py").write_text(MECHANISMS)
    monkeypatch.syspath_prepend(tmp_path)

    def said(*arguments: str, status: int) -> str:
        assert main(list(arguments)) == status
        shown = capsys.readouterr()
        return " ".join((shown.out + shown.err).split())

    checked = said("check", "mine_surely:surely", status=0)
    assert "(a mechanism): contract check passed" in checked and "finetune.credit=[mine_surely:surely]" in checked
    assert "finetune.options.surely.damping=1.0" in checked and "It needs: the entropy of every step" in checked
    assert "calls 'surely_not' with (rollouts, context)" in said("check", "mine_surely:surely_not", status=1)
    explained = said("algorithms", "mine_surely:surely", status=0)
    assert "Trusts all steps alike." in explained and "finetune.credit=[mine_surely:surely]" in explained
    assert "is not decorated" in said("algorithms", "mine_surely:plain", status=2)
    assert len(said("algorithms", "mine_surely", status=2)) < 200
    for name, written in {
        "mine_surely:surely": "credit=[mine_surely:surely]",
        "mine_surely:plain": "such as advantage=mine_surely:plain",
        "grop": "Did you mean 'grpo'?",
        "rec": "coefficient=rec",
    }.items():
        with pytest.raises(ConfigError) as refused:
            build_algorithm(AlgorithmConfig(algorithm=name))
        assert written in str(refused.value) and "There are" not in str(refused.value)


def test_ask_for_says_what_is_missing():
    with pytest.raises(ConfigError, match="no module 'not_there'"):
        import_plugins(["not_there"])


def test_installed_kinds_are_found_by_name_and_never_replace_ours(tmp_path):
    package = tmp_path / "somebody-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: somebody\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(
        "[robopolicy.worlds]\nline = own_things:Line\npush_cube = own_things:Line\n"
    )
    code = (
        "from sims.names import WORLDS; from sims.registry import make_world;"
        "assert make_world('line', 2).spec.name == 'line';"
        "assert WORLDS.path('push_cube') == 'sims.tasks.push_cube:task'"
    )
    paths = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(Path(__file__).parent)!r}];"
    subprocess.run([sys.executable, "-c", paths + code], check=True)


def test_a_registry_names_the_nearest(nothing_named):
    fruit = Registry("fruit", "", {"apple": "own_things:Line"})
    with pytest.raises(ConfigError, match=r"no fruit 'appel'. Did you mean 'apple'"):
        fruit.load("appel")
    with pytest.raises(CheckpointError, match="needs the fruit 'own_things:Towards'"):
        fruit.load_saved("own_things:Towards", "here")
    assert fruit.name_of(type(make_world("own_things:Line", 1))) == "apple"


@pytest.mark.parametrize(
    ("target", "status", "texts"),
    [
        (
            "own_things:Linear",
            0,
            [
                "(a policy): contract check passed",
                "acts: yes",
                "scores: no, it lacks log_prob",
                "in own_things:Line; to test in another world: world=NAME",
            ],
        ),
        (
            "reach_planar",
            0,
            [
                "(a world): contract check passed",
                "Observation observation.environment_state [6] (tip_x, tip_y",
                "Action [2]",
                "Success:",
                "Snapshots: yes",
            ],
        ),
        (
            "gymnasium:Reacher-v5",
            0,
            [
                "state [10] (observation[0] to [9])",
                "(not clipped: executed as given, also outside the bounds); 50 control steps per second, 50 per",
                "not reported",
            ],
        ),
    ],
)
def test_check_says_what_a_target_allows(target, status, texts, capsys):
    assert main(["check", target, "world=own_things:Line"]) == status
    output = " ".join(capsys.readouterr().out.split())
    for text in texts:
        assert text in output


def test_check_names_elements_limits_and_who_judges():
    spec = WorldSpec(
        "arm",
        {"observation.state": Field((5,), names=("grip", "pose[0]", "pose[1]", "pose[2]", "speed"), unit="m")},
        Field((2,), low=(-1.0, 0.0), high=(1.0, 512.0)),
        fps=25,
        horizon=50,
        success="The door is open.",
    )
    assert spec_lines(spec) == [
        "Observation observation.state [5] (grip, pose[0] to [2], speed), m",
        "Action [2]; -1 to 1, 0 to 512; 25 control steps per second, 50 per episode",
        "Success: The door is open.",
    ]


def test_check_names_a_broken_promise(capsys, monkeypatch):
    import own_things

    monkeypatch.setattr(own_things.Line, "reset", lambda self, rows=None, seeds=None, options=None: {})
    assert main(["check", "own_things:Line"]) == 1
    assert "(a world): contract check failed" in capsys.readouterr().out
