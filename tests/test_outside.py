"""What strangers bring works in every verb, by dotted path and by entry point, without a line of ours changed."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from torch import nn

from robopolicy.cli import main
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE
from robopolicy.data.lerobot_format import read_dataset
from robopolicy.testing.controller import check_controller
from robopolicy.testing.world import check_world
from sims.registry import make_world
from worldmodels import load_world_model

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "outside_robotics"
pytest.importorskip(PACKAGE, reason="install it with: pip install -e tests/outside")

TASK, BALL = f"{PACKAGE}.reacher:task", f"{PACKAGE}.ball:BallEnvironment"
QUICK = [
    "world.batch_size=16",
    "train.fit.steps=30",
    "train.evaluate_episodes=0",
    "finetune.iterations=1",
    "finetune.num_envs=8",
    "finetune.rollout_length=6",
    "finetune.minibatch=32",
    "finetune.evaluate_every=1",
    "finetune.evaluate_episodes=4",
    "finetune.critic_width=16",
    "finetune.videos=0",
    "evaluate.episodes=4",
    "evaluate.videos=0",
]
SMALL_MODEL = ["worldmodel.transitions=400", "worldmodel.validation_episodes=4", "worldmodel.validation_steps=50"]
SMALL_DIFFUSION = ["policy.width=16", "policy.depth=1", "policy.sampling_steps=2"]


def robopolicy(verb: str, *settings: str, root: Path, quick: bool = True) -> int:
    known = [each for each in QUICK if each.split(".")[0] in ("world", verb) or verb == "imagine"] if quick else []
    known = known if verb not in ("algorithms", "check", "bench") else []
    return main([verb, *settings[:1], *known, *settings[1:], f"run.root={root}"])


def result(root: Path, verb: str, name: str) -> dict:
    return json.loads((root / verb / name / "0" / "result.json").read_text())


def named(path: str) -> str:
    """Return the run's name that a dotted path gives."""
    return path.replace(":", "-").replace("/", "-")


@pytest.mark.parametrize("world", [TASK])
def test_a_task_on_somebody_elses_scene(tmp_path, world):
    assert robopolicy("collect", f"world.name={world}", "collect.episodes=8", root=tmp_path) == 0
    assert result(tmp_path, "collect", named(world))["success_rate"] >= 0.75
    assert robopolicy("train", f"world.name={world}", *SMALL_DIFFUSION, root=tmp_path) == 0
    assert robopolicy("finetune", f"world.name={world}", root=tmp_path) == 0
    judged = result(tmp_path, "finetune", named(world))["tuned"]["deterministic"]
    assert judged["episodes"] == 4


@pytest.mark.parametrize("world", [BALL, "ball"])
def test_a_gymnasium_environment_that_nobody_registered(tmp_path, world):
    settings = [f"world.name={world}", "world.options.horizon=30", f"collect.controller={PACKAGE}.controller:Straight"]
    assert robopolicy("collect", *settings, "collect.episodes=6", root=tmp_path) == 0
    assert result(tmp_path, "collect", named(world))["success_rate"] == 1.0


def test_a_controller_is_checked_where_it_acts(tmp_path, capsys):
    target = f"{PACKAGE}.controller:Straight"
    assert robopolicy("check", target, f"world.name={BALL}", "world.options.horizon=30", root=tmp_path) == 0
    assert f"collect.controller={target}): 12 of 12 succeeded." in " ".join(capsys.readouterr().out.split())
    assert robopolicy("check", target, "world=push_cube", root=tmp_path) == 1
    assert "contract check failed" in (shown := " ".join(capsys.readouterr().out.split()))
    assert "act raised ValueError" in shown and "It was given observation.state [12, 1, 6]" in shown


@pytest.mark.parametrize(
    ("act", "promise"),
    [
        (lambda rows: np.zeros((rows, 1, 2)), r"act returned \[12, 1, 2\] for 12 rows"),
        (lambda rows: np.zeros((rows, 3)), r"one control step per row, \[12, 2\]"),
        (lambda rows: np.full((rows, 2), np.nan), "act returned NaN or infinity in rows 0, 1, 2, 3"),
        (lambda rows: np.full((rows, 2), "up"), "instead of numbers"),
    ],
)
def test_a_controller_that_breaks_a_promise_is_told_which(act, promise):
    class Broken:
        def reset(self, rows=None):
            pass

        def act(self, observation):
            return act(len(observation["observation.state"]))

    world = make_world("reach_planar", 12)
    with pytest.raises(AssertionError, match=promise):
        check_controller(Broken, world)


@pytest.mark.parametrize("kind", [f"{PACKAGE}.policy:GaussianPolicy", "gaussian_mlp"])
def test_a_policy_is_trained_tuned_judged_and_named_by_its_checkpoint(tmp_path, kind):
    settings = ["world=reach_planar", f"policy.kind={kind}", "policy.width=32"]
    assert robopolicy("collect", "world=reach_planar", "collect.episodes=6", root=tmp_path) == 0
    assert robopolicy("train", *settings, root=tmp_path) == 0
    checkpoint = tmp_path / "train" / "reach_planar" / "0" / "checkpoint"
    assert json.loads((checkpoint / "config.json").read_text())["kind"] == "gaussian_mlp"
    assert robopolicy("evaluate", str(checkpoint), "world=reach_planar", root=tmp_path) == 0
    assert robopolicy("finetune", "world=reach_planar", "finetune.algorithm=ppo", root=tmp_path) == 0
    assert robopolicy("check", str(checkpoint), root=tmp_path) == 0


@pytest.fixture
def another_librarys(tmp_path):
    """Return a checkpoint of somebody else's library, as that saves it, meant for one of our worlds."""
    world = make_world("reach_planar", 1)
    sizes = {key: field.size for key, field in world.spec.observation.items() if field.dtype == "float32"}
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"library": "linear-control", "reads": sizes, "rate": world.spec.fps})
    )
    gains = np.random.default_rng(0).normal(size=(world.spec.action.size, sum(sizes.values())))
    np.savez(folder / "gains.npz", gains=gains)
    (folder / "robopolicy.json").write_text(json.dumps({"world": {"name": "reach_planar", "options": {}}}))
    return folder


def test_a_checkpoint_of_another_library_is_opened_by_every_verb(another_librarys, tmp_path):
    """Its format is one class under an entry point: the world that it is meant for is read beside it."""
    assert robopolicy("evaluate", str(another_librarys), root=tmp_path) == 0
    assert result(tmp_path, "evaluate", "reach_planar")["policy"]["deterministic"]["episodes"] == 4
    assert robopolicy("check", str(another_librarys), root=tmp_path) == 0
    assert robopolicy("collect", f"collect.policy={another_librarys}", "collect.episodes=4", root=tmp_path) == 0


def test_a_checkpoint_of_another_library_that_cannot_learn_says_so(another_librarys, tmp_path, capsys):
    assert robopolicy("finetune", str(another_librarys), root=tmp_path) == 2
    assert "LinearPolicy can act but cannot be trained" in " ".join(capsys.readouterr().err.split())
    assert robopolicy("collect", "world=reach_planar", "collect.episodes=4", root=tmp_path) == 0
    assert robopolicy("train", "world=reach_planar", f"train.policy={another_librarys}", root=tmp_path) == 2
    assert "is linear-control's: fine-tune it instead" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("kind", [f"{PACKAGE}.model:LatentModel", "latent_mlp"])
def test_a_world_model_without_a_decoder(tmp_path, kind):
    assert robopolicy("collect", "world=reach_planar", "collect.episodes=8", root=tmp_path) == 0
    settings = ["world=reach_planar", f"worldmodel.kind={kind}", "worldmodel.config.width=16"]
    assert robopolicy("worldmodel", *settings, *SMALL_MODEL, "worldmodel.fit.steps=20", root=tmp_path) == 0
    model = tmp_path / "worldmodel" / "reach_planar" / "0" / "checkpoint"
    assert robopolicy("check", str(model), root=tmp_path) == 0


@pytest.mark.parametrize(
    ("kind", "head", "settings"),
    [
        ("ensemble", f"{PACKAGE}.success:FocalHead", ["width=32", "head_width=32"]),
        pytest.param("rssm", "focal", ["size=tiny", "length=5", "batch_size=8"], marks=pytest.mark.slow),
    ],
)
def test_a_success_head(tmp_path, kind, head, settings):
    assert robopolicy("collect", "world=reach_planar", "collect.episodes=8", root=tmp_path) == 0
    chosen = [f"worldmodel.kind={kind}", *(f"worldmodel.config.{each}" for each in [*settings, f"success_head={head}"])]
    small = [*SMALL_MODEL, "worldmodel.fit.steps=30"]
    assert robopolicy("worldmodel", "world=reach_planar", *chosen, *small, root=tmp_path) == 0
    checkpoint = tmp_path / "worldmodel" / "reach_planar" / "0" / "checkpoint"
    assert json.loads((checkpoint / "config.json").read_text())["model"]["config"]["success_head"] == head
    model = load_world_model(checkpoint)
    assert any(type(part).__name__ == "FocalHead" for part in cast(nn.Module, model).modules())
    assert robopolicy("check", str(checkpoint), root=tmp_path) == 0
    program = f"from worldmodels import load_world_model; load_world_model({str(checkpoint)!r})"
    stranger = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    if ":" not in head:
        assert stranger.returncode == 0, stranger.stderr
        return
    assert stranger.returncode == 1
    assert f"CheckpointError: {checkpoint}: its world model needs the success head '{head}'" in stranger.stderr
    assert f"run.plugins=[{PACKAGE}.success]" in stranger.stderr
    asking = f"from robopolicy.core.registry import import_plugins; import_plugins(['{PACKAGE}.success']); {program}"
    assert subprocess.run([sys.executable, "-c", asking], capture_output=True).returncode == 0


def test_a_policy_that_learns_on_the_latent_of_a_model_acts_for_real(tmp_path, capsys):
    """collect, worldmodel, train on its latent, imagine, and then all that is done with any other policy."""
    world, kind = "world=reach_planar", f"worldmodel.kind={PACKAGE}.model:LatentModel"
    assert robopolicy("collect", world, "collect.episodes=8", root=tmp_path) == 0
    assert robopolicy("worldmodel", world, kind, *SMALL_MODEL, "worldmodel.fit.steps=20", root=tmp_path) == 0
    model = tmp_path / "worldmodel" / "reach_planar" / "0" / "checkpoint"
    learn = [world, *SMALL_DIFFUSION, f"train.encoder={model}"]
    data = f"train.data={tmp_path / 'collect' / 'reach_planar' / '0' / 'dataset'}"
    assert robopolicy("train", *learn, "train.evaluate_episodes=4", root=tmp_path) == 0
    assert robopolicy("train", *learn, data, "run.seed=1", root=tmp_path) == 0
    assert robopolicy("imagine", world, "imagine.real_eval_episodes=4", root=tmp_path) == 0
    base, other = (tmp_path / "train" / "reach_planar" / seed / "checkpoint" for seed in "01")
    tuned = tmp_path / "imagine" / "reach_planar" / "0" / "checkpoint"
    assert (tuned / "encoder" / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()

    judged = result(tmp_path, "imagine", "reach_planar")
    assert robopolicy("evaluate", str(tuned), world, root=tmp_path) == 0
    for mode in ("deterministic", "stochastic"):  # the checkpoint decides what the policy decided when it was tuned
        episodes_of = result(tmp_path, "evaluate", "reach_planar")["policy"][mode]["per_episode"]
        assert episodes_of == judged["tuned"][mode]["per_episode"]
    inside = ["world.name=worldmodel", f"world.model={model}", "run.name=inside"]
    assert robopolicy("evaluate", str(tuned), *inside, root=tmp_path) == 0
    episodes_of = result(tmp_path, "evaluate", "inside")["policy"]["deterministic"]["per_episode"]
    assert episodes_of == judged["imagined"]["tuned, imagined"]["deterministic"]["per_episode"]

    further = ["finetune.iterations=2", "finetune.checkpoint_every=1", "imagine.refresh_every=1"]
    further += [
        "imagine.refresh_episodes=4",
        "imagine.refresh_steps=5",
        "imagine.real_eval_episodes=0",
        "run.name=refreshed",
    ]
    paths = [f"finetune.policy={base}", f"imagine.model={model}"]
    assert robopolicy("imagine", world, *further, *paths, root=tmp_path) == 0
    refreshed = tmp_path / "imagine" / "refreshed" / "0"
    latest = (refreshed / "model" / "model.safetensors").read_bytes()
    assert (refreshed / "checkpoint" / "encoder" / "model.safetensors").read_bytes() == latest
    assert latest != (model / "model.safetensors").read_bytes()
    assert robopolicy("evaluate", str(refreshed / "checkpoint"), world, "run.name=refreshed", root=tmp_path) == 0
    episodes_of = result(tmp_path, "evaluate", "refreshed")["policy"]["deterministic"]["per_episode"]
    assert episodes_of == result(tmp_path, "imagine", "refreshed")["tuned"]["deterministic"]["per_episode"]

    chosen = [f"rank.policies=[{base},{other},{tuned}]", "rank.episodes=4"]
    assert robopolicy("rank", world, *chosen, root=tmp_path) == 2
    assert "rank.noise=[]" in capsys.readouterr().err
    assert robopolicy("rank", world, *chosen, "rank.noise=[]", root=tmp_path) == 0
    assert len(result(tmp_path, "rank", "reach_planar")["models"]["latent_mlp"]["policies"]) == 3
    assert robopolicy("check", str(tuned), root=tmp_path) == 0
    record = ["collect.episodes=2", f"collect.policy={tuned}", "run.name=played"]
    assert robopolicy("collect", world, *record, root=tmp_path) == 0
    assert set(read_dataset(tmp_path / "collect" / "played" / "0" / "dataset").observation) == {
        STATE,
        ENVIRONMENT_STATE,
    }


def test_an_encoder_that_is_missing_or_another_is_said(tmp_path, capsys):
    world, kind = "world=reach_planar", "worldmodel.kind=latent_mlp"
    assert robopolicy("collect", world, "collect.episodes=8", root=tmp_path) == 0
    for name in ("reach_planar", "other"):
        small = [*SMALL_MODEL, f"worldmodel.fit.steps={len(name)}", f"run.name={name}"]
        data = f"worldmodel.data=[{tmp_path / 'collect' / 'reach_planar' / '0' / 'dataset'}]"
        assert robopolicy("worldmodel", world, kind, *small, data, root=tmp_path) == 0
    model, another = (tmp_path / "worldmodel" / name / "0" / "checkpoint" for name in ("reach_planar", "other"))
    learn = ["train", world, *SMALL_DIFFUSION]
    assert robopolicy(*learn, "train.encoder=nowhere", root=tmp_path) == 2
    assert "nowhere does not exist: check train.encoder" in capsys.readouterr().err
    assert robopolicy(*learn, f"train.encoder={model}", root=tmp_path) == 0
    policy = tmp_path / "train" / "reach_planar" / "0" / "checkpoint"
    assert robopolicy("imagine", world, f"imagine.model={another}", root=tmp_path) == 2
    assert "latent of another model" in capsys.readouterr().err
    assert robopolicy("finetune", world, root=tmp_path) == 2
    assert f"robopolicy imagine {policy}" in capsys.readouterr().err
    shutil.rmtree(policy / "encoder")
    assert robopolicy("evaluate", str(policy), world, root=tmp_path) == 2
    assert f"{policy / 'encoder'} does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("advantage", ["outside_ranks", f"{PACKAGE}.mechanisms:ranks"])
def test_a_mechanism(tmp_path, advantage):
    assert robopolicy("collect", "world=reach_planar", "collect.episodes=6", root=tmp_path) == 0
    assert robopolicy("train", "world=reach_planar", *SMALL_DIFFUSION, root=tmp_path) == 0
    groups = [
        "finetune.algorithm=grpo",
        "finetune.groups=2",
        "finetune.group_size=2",
        f"finetune.advantage={advantage}",
    ]
    assert robopolicy("finetune", "world=reach_planar", *groups, f"finetune.advantage={advantage}", root=tmp_path) == 0


@pytest.mark.parametrize(
    ("agent", "improver"),
    [("outcomes", "nearer"), (f"{PACKAGE}.offline:OutcomesConfig", f"{PACKAGE}.offline:NearerConfig")],
)
def test_an_agent_and_an_improver_of_recorded_data(tmp_path, agent, improver):
    begin = ["world=reach_planar", *SMALL_DIFFUSION]
    robopolicy("collect", *begin, "collect.episodes=12", root=tmp_path)
    robopolicy("train", *begin, root=tmp_path)
    settings = [f"offline.agent={agent}", "offline.agent.width=16", "offline.agent.members=3"]
    settings += [f"offline.improve={improver}", "offline.improve.steps=4", "offline.critic.steps=10"]
    settings += [
        "offline.rounds=1",
        "offline.evaluate_episodes=4",
        "gate.evaluators=[fqe]",
        "gate.steps=10",
        "gate.num_states=4",
    ]
    assert robopolicy("offline", *begin, *settings, root=tmp_path) == 0
    result_json = result(tmp_path, "offline", "reach_planar")
    assert len(result_json["rounds"]) == 1 and "loss" in result_json["rounds"][0]


@pytest.mark.parametrize("method", [f"{PACKAGE}.online:ResidualConfig", "residual"])
def test_an_online_method(tmp_path, method):
    begin = ["world=reach_planar", *SMALL_DIFFUSION]
    robopolicy("collect", *begin, "collect.episodes=6", root=tmp_path)
    robopolicy("train", *begin, root=tmp_path)
    settings = [f"online.method={method}", "online.method.size=0.2", "online.agent.width=8", "online.num_envs=4"]
    settings += ["online.steps=200", "online.warmup=50", "online.batch_size=8", "online.evaluate_episodes=4"]
    assert robopolicy("online", *begin, *settings, root=tmp_path) == 0
    result_json = result(tmp_path, "online", "reach_planar")
    assert result_json["method"] == method and result_json["updates"] > 10


def test_what_is_installed_is_listed(capfd):
    assert main(["algorithms"]) == 0
    assert "outside_ranks" in capfd.readouterr().out
    for verb, *names in (("train", "gaussian_mlp"), ("worldmodel", "latent_mlp", "focal"), ("evaluate", "reacher")):
        assert main([verb, "--help"]) == 0
        shown = capfd.readouterr().out
        assert all(name in shown for name in names), (verb, names)


def test_a_checkpoint_says_what_it_needs_and_imports_nothing(tmp_path):
    """Somebody without the package opens a checkpoint that names a class by dotted path."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')\n")
    (folder / "config.json").write_text(json.dumps({"kind": "evil:Policy", "format": 2}))
    program = "from robopolicy.policies import load_policy; load_policy('checkpoint')"
    process = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert process.returncode == 1
    assert "evil:Policy" in process.stderr
    assert "CheckpointError" in process.stderr


@pytest.mark.parametrize("target", [TASK, "ball", f"{PACKAGE}.policy:GaussianPolicy", f"{PACKAGE}.model:LatentModel"])
def test_check_says_what_each_is_good_for(tmp_path, target):
    limit = ["world.options.horizon=30"] if target == "ball" else []
    assert main(["check", target, *limit, f"run.root={tmp_path}"]) == 0


def test_nothing_of_ours_knows_the_package():
    ours = [path for top in ("robopolicy", "sims", "worldmodels", "configs") for path in (ROOT / top).rglob("*.*")]
    naming = [str(path) for path in ours if path.suffix in (".py", ".yaml") and PACKAGE in path.read_text()]
    assert not naming


@pytest.mark.parametrize("prefix", ["", f"{PACKAGE}.inference:"])
def test_ways_of_deciding(tmp_path, prefix):
    """An engine and a chunking act in evaluate, a sampler and a cache's schedule among the ways that optimize tries."""
    small = [*SMALL_DIFFUSION, "policy.denoiser=transformer", "policy.heads=2", "policy.sampling_steps=6"]
    assert robopolicy("collect", "world=reach_planar", "collect.episodes=4", root=tmp_path) == 0
    assert robopolicy("train", "world=reach_planar", *small, root=tmp_path) == 0
    checkpoint = tmp_path / "train" / "reach_planar" / "0" / "checkpoint"
    ways = [f"inference.engine={prefix}halving", f"evaluate.chunking={prefix}timid", "evaluate.latency_steps=3"]
    assert robopolicy("evaluate", str(checkpoint), *ways, root=tmp_path) == 0
    assert (
        robopolicy(
            "evaluate", str(checkpoint), "inference.engine=lean", f"inference.sampler={prefix}late", root=tmp_path
        )
        == 0
    )
    tried = f"optimize.schedulers=[{prefix}alternating]"
    few = [
        "optimize.engines=[lean]",
        "optimize.max_action_error=1e9",
        "optimize.episodes=2",
        "optimize.rounds=1",
        "optimize.steps=[1]",
    ]
    assert robopolicy("optimize", str(checkpoint), tried, "optimize.budgets=[3]", *few, root=tmp_path) == 0
    assert f"{prefix}alternating cache 3" in result(tmp_path, "optimize", "reach_planar")["ways"]


@pytest.mark.parametrize("prefix", ["", f"{PACKAGE}.planner:"])
def test_a_planner(tmp_path, prefix):
    """A planner acts in a world model, alone and with a policy that proposes."""
    tiny = ["worldmodel.fit.steps=20", "worldmodel.transitions=200", "worldmodel.include_base=false"]
    assert robopolicy("collect", "world=reach_planar", "collect.episodes=4", root=tmp_path) == 0
    assert robopolicy("worldmodel", "world=reach_planar", *tiny, root=tmp_path) == 0
    model = tmp_path / "worldmodel" / "reach_planar" / "0" / "checkpoint"
    kind = f"{prefix}shooting" if not prefix else f"{prefix}RandomShooting"
    plan = [f"plan.model={model}", f"plan.kind={kind}", "plan.options.samples=8", "plan.horizon=4"]
    few = ["evaluate.episodes=4", "evaluate.videos=0"]
    assert robopolicy("evaluate", "world=reach_planar", *plan, *few, root=tmp_path) == 0
    assert result(tmp_path, "evaluate", "reach_planar")["policy"]["checkpoint"] == str(model)


def test_a_tracker(tmp_path):
    settings = ["world=reach_planar", f"run.root={tmp_path}", "run.threads=1", "run.tracker=lines"]
    assert main(["collect", *settings, "collect.episodes=8"]) == 0
    small = "policy.width=16", "policy.depth=1", "train.fit.steps=100", "train.evaluate_episodes=0"
    assert main(["train", *settings, *small]) == 0
    lines = (tmp_path / "train" / "reach_planar" / "0" / "lines.txt").read_text().splitlines()
    assert lines[0] == "train-reach_planar-0" and lines[1].startswith("100 ") and lines[-1] == "finished"


@pytest.mark.parametrize("physics", ["stepped", f"{PACKAGE}.physics:Stepped"])
def test_a_physics_engine(tmp_path, physics):
    check_world(lambda rows: make_world("push_cube", rows, physics=physics), renders=False)
    worlds = make_world("pick_place", 4), make_world("pick_place", 4, physics=physics, physics_options={"slower": 2})
    actions = np.random.default_rng(0).uniform(-1, 1, (4, 10, 4))
    for world in worlds:
        world.reset(seeds=np.arange(4))
        world.step(actions)
    states = [world.snapshot().arrays["state"] for world in worlds]
    assert np.array_equal(*states)
    settings = ["world=reach_planar", f"world.options.physics={physics}", "collect.episodes=4"]
    assert robopolicy("collect", *settings, root=tmp_path) == 0
    assert result(tmp_path, "collect", "reach_planar")["success_rate"] == 1.0
