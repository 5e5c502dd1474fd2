"""Verbs that build on each other: distilling, learning in imagination behind a gate, and pipelines of stages."""

import json
from pathlib import Path

import pytest
import torch
from tiny_runs import TINY

from robopolicy.benchmarks import rl100
from robopolicy.building.policies import load_policy as load_whole
from robopolicy.cli import main
from robopolicy.configuration import compose
from robopolicy.core.run import RunFolder
from robopolicy.policies import load_policy
from robopolicy.verbs import job
from robopolicy.verbs.pipeline import stages_of
from worldmodels.encoding import EncodedPolicy
from worldmodels.protocol import encoder_weights

pytestmark = pytest.mark.long

SMALL = [
    *TINY[1:],
    "finetune.num_envs=8",
    "finetune.rollout_length=4",
    "finetune.evaluate_episodes=8",
    "finetune.critic_width=16",
    "distill.fit.steps=20",
    "distill.episodes=8",
    "distill.evaluate_episodes=8",
]
WORLD = ["world=reach_planar", *SMALL]
QUOTED = ",".join(f"'{each}'" for each in SMALL)
STAGES = """
pipeline:
  recipe: reach_planar
  stages:
    demonstrations: [collect]
    imitation: [train, "train.data={demonstrations}/dataset"]
    one_step:
      - distill
      - distill.policy={imitation}/checkpoint
      - distill.data=[{demonstrations}/dataset]
"""


def test_a_policy_is_distilled_and_judged_beside_its_teacher(root: Path, capsys):
    teacher = root / "train" / "reach_planar" / "0" / "checkpoint"
    arguments = ["distill", str(teacher), *SMALL, f"run.root={root}"]
    assert main(arguments) == 0
    output = capsys.readouterr().out
    assert "x faster" in output and "student" in output and "reach_planar" in output
    folder = root / "distill" / "reach_planar" / "0"
    result = json.loads((folder / "result.json").read_text())
    assert load_policy(folder / "checkpoint").spec.scored_steps == 1
    assert result["env_steps"] == result["observations"] > 0
    assert result["seconds_teacher"] > 0 < result["seconds_student"]
    assert "student, deterministic" in (folder / "report.html").read_text()
    assert main(arguments) == 0
    assert "is done" in capsys.readouterr().out
    assert main(["evaluate", str(folder / "checkpoint"), "evaluate.episodes=4", f"run.root={root}"]) == 0
    assert "reach_planar" in capsys.readouterr().out  # the student knows its world
    assert main([*arguments, "distill.steps=3", "run.name=as_many"]) == 2
    assert "below the teacher's 2 denoising steps" in capsys.readouterr().err


def test_a_new_policy_takes_over_in_a_deployment(root: Path, capsys):
    checkpoint = root / "train" / "reach_planar" / "0" / "checkpoint"
    small = [
        "deploy.base_episodes=10",
        "deploy.episodes=30",
        "deploy.update_every=10",
        "run.threads=1",
        f"run.root={root}",
    ]
    assert main(["deploy", str(checkpoint), str(checkpoint), *small]) == 0
    assert "minimum success" in capsys.readouterr().out
    result = json.loads((root / "deploy" / "reach_planar" / "0" / "result.json").read_text())["deployed"]
    assert [len(result[name]["running"]) for name in ("mixed", "replaced")] == [30, 30]
    assert set(result["replaced"]["shares"]) == {1.0}
    assert "Running success" in (root / "deploy" / "reach_planar" / "0" / "report.html").read_text()
    assert main(["deploy", str(checkpoint), str(checkpoint), *small, "deploy.max_success_drop=2"]) == 2
    assert "deploy.max_success_drop is 2" in capsys.readouterr().err


def test_a_candidate_learns_in_one_model_and_another_one_judges(root: Path, capsys):
    model = root / "worldmodel" / "reach_planar" / "0" / "checkpoint"
    offline = [
        "offline",
        *WORLD,
        f"run.root={root}",
        "run.name=imagining",
        "offline.improve=imagined_ppo",
        "offline.improve.iterations=2",
        "offline.rounds=2",
        "offline.evaluate_episodes=8",
        "gate.num_states=8",
        f"gate.models=[{model}]",
    ]
    data = [f"offline.dataset={root}/collect/reach_planar/0/dataset"]
    data += [f"offline.policy={root}/train/reach_planar/0/checkpoint"]
    assert main([*offline, *data]) == 2
    assert "set offline.model" in " ".join(capsys.readouterr().err.split())
    assert main([*offline, *data, f"offline.model={model}", "run.overwrite=true"]) == 2
    assert "cannot be the only evaluator" in " ".join(capsys.readouterr().err.split())
    other = ["worldmodel", *WORLD, f"run.root={root}", "run.name=judge", "run.seed=5", "worldmodel.include_base=false"]
    assert main([*other, f"worldmodel.data=[{root}/collect/reach_planar/0/dataset]"]) == 0
    judge = f"gate.models=[{root}/worldmodel/judge/5/checkpoint]"
    assert main([*offline, *data, f"offline.model={model}", judge, "run.overwrite=true"]) == 0
    records = [each for each in RunFolder(root / "offline" / "imagining" / "0").metrics() if "round" in each]
    assert [each["imagined_steps"] > 0 for each in records] == [True, True]
    assert all("critic_step" not in each for each in RunFolder(root / "offline" / "imagining" / "0").metrics())
    result = json.loads((root / "offline" / "imagining" / "0" / "result.json").read_text())
    assert result["env_steps"] == 0
    trials = ["gate.evaluators=[world]", "offline.rounds=1", "run.name=trials"]
    assert main([*offline, *data, f"offline.model={model}", *trials]) == 0
    result = json.loads((root / "offline" / "trials" / "0" / "result.json").read_text())
    assert result["env_steps"] == result["rounds"][0]["verdict"]["env_steps"] > 0
    assert "success in trials of reach_planar" in result["rounds"][0]["gate"]


def test_a_pipeline_is_one_job_that_goes_on_where_it_was_interrupted(tmp_path: Path, capsys, monkeypatch):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("# @package _global_" + STAGES)
    asked = ["pipeline", f"recipe={recipe}", f"pipeline.overrides=[{QUOTED}]", f"run.root={tmp_path}", "run.threads=1"]
    asked += ["pipeline.changes.one_step=['distill.fit.steps=10']"]
    finished = job.finish

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "finish", killed)
    assert main(asked) == 130
    monkeypatch.setattr(job, "finish", finished)
    folder = tmp_path / "pipeline" / "reach_planar" / "0"
    first = (folder / "collect" / "demonstrations" / "0" / "result.json").stat().st_mtime_ns
    assert main(asked) == 0
    assert (folder / "collect" / "demonstrations" / "0" / "result.json").stat().st_mtime_ns == first
    output = capsys.readouterr().out
    assert "one_step: robopolicy distill" in output and "reach_planar, seed 0" in output
    result = json.loads((folder / "result.json").read_text())
    assert list(result["stages"]) == ["demonstrations", "imitation", "one_step"]
    assert result["stages"]["demonstrations"]["world_steps"] > 0
    assert result["stages"]["imitation"]["policy"]["deterministic"]["episodes"] == 8
    assert "outcomes" not in str(result["stages"])
    assert result["stages"]["one_step"]["world_steps"] == 0  # it was asked at what is recorded
    done = json.loads((folder / "distill" / "one_step" / "0" / "result.json").read_text())
    assert done["training_steps"] == 10
    assert done["teacher_checkpoint"] == str(folder / "train" / "imitation" / "0" / "checkpoint")
    page = (folder / "report.html").read_text()
    assert "Success by stage" in page and "one_step" in page
    assert main(asked) == 0
    assert "is done" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"stages": {}}, "recipe=rl100"),
        ({"stages": {"one": ["trian"]}}, "Did you mean 'train'"),
        ({"stages": {"one": ["bench"]}}, "'bench' is not a verb that can be a stage"),
        ({"stages": {"one": ["train", "train.data={two}/dataset"], "two": ["collect"]}}, "is not an earlier stage"),
        ({"stages": {"one": "train"}}, "must be a list"),
        ({"stages": {"one": []}}, "its verb, then its settings"),
        ({"stages": {"seed": ["train"]}}, "used as a folder name"),
        ({"stages": {"one": ["train"]}, "changes": {"oen": ["train.episodes=1"]}}, "Did you mean 'one'"),
        ({"stages": {"one": ["train", "train.epsiodes=1"]}}, "train.epsiodes"),
    ],
)
def test_wrong_pipelines_are_refused_before_anything_runs(tmp_path: Path, capsys, change, text):
    recipe = tmp_path / "wrong.yaml"
    recipe.write_text("# @package _global_\n" + json.dumps({"pipeline": change}))
    assert main(["pipeline", f"recipe={recipe}", f"run.root={tmp_path}"]) == 2
    assert text in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.glob("pipeline/*/*/*/*"))


@pytest.mark.parametrize("task", ["push_cube", "push_t", "pick_place", "reach_planar", "tidy"])
def test_sight_composes_and_its_student_sees_what_its_teacher_does_not(task: str, tmp_path: Path):
    stages = stages_of(compose(["recipe=sight", f"pipeline.recipe={task}"]), tmp_path)
    assert [verb for verb, _ in stages.values()] == ["collect", "train", "finetune", "teach"]
    _, student = stages["student"]
    assert student.world.name == task and student.world.cameras == ("top",)
    assert student.teach.teacher == str(tmp_path / "finetune/tuned/0/checkpoint")
    assert "observation.environment_state" not in student.policy.config.observation_keys
    assert stages["tuned"][1].policy.config.observation_keys == ()
    assert stages["tuned"][1].finetune.expert_datasets == (tmp_path / "collect/demonstrations/0/dataset",)


def test_libero_composes_and_its_table_compares_what_it_trained(tmp_path: Path):
    stages = stages_of(compose(["recipe=libero", "run.seed=3"]), tmp_path)
    assert [verb for verb, _ in stages.values()] == ["collect", "train", "online", "evaluate"]
    imitation, tuned = (tmp_path / verb / "3" / "checkpoint" for verb in ("train/imitation", "online/tuned"))
    online, table = stages["tuned"][1], stages["table"][1]
    assert online.online.policy == table.evaluate.base == imitation and table.evaluate.policy == tuned
    assert online.online.method.kind == "dsrl" and online.world.options["reward"] == "progress"
    # exact physics and LIBERO's time limit, except while it learns
    assert [name for name, (_, each) in stages.items() if each.world.options] == ["tuned"]
    assert table.evaluate.episodes == 500 and {each.world.name for _, each in stages.values()} == {
        "libero/libero_object"
    }


def test_armada_calls_one_operator_to_the_policy_of_each_round_by_a_detector_of_its_own(tmp_path: Path):
    stages = stages_of(compose(["recipe=armada", "run.seed=3"]), tmp_path)
    assert [verb for verb, _ in stages.values()] == ["collect", "train", *["detect", "collect", "train", "gate"] * 3]
    seeds, data, acting = set(), [], tmp_path / "train/base/3"
    for number in (1, 2, 3):
        watch, helped = stages[f"watch_{number}"][1], stages[f"help_{number}"][1]
        learned, gate = stages[f"round_{number}"][1], stages[f"gate_{number}"][1]
        policies = watch.detect.policy, helped.collect.policy, learned.train.policy, gate.gate.incumbent
        assert set(policies) == {acting / "checkpoint"}
        assert helped.collect.correct.detector == watch.detect.output / "float" == acting / "detectors/float"
        assert helped.collect.correct.operators == 1 and helped.world.batch_size == 8
        assert gate.gate.candidate == tmp_path / f"train/round_{number}/3/checkpoint"
        seeds.add(helped.run.seed)
        data.append(tmp_path / "collect" / f"help_{number}" / str(helped.run.seed) / "dataset")
        assert learned.train.extra_datasets == tuple(data)
        acting = tmp_path / f"gate/gate_{number}/3"
    assert len(seeds) == 3


ROUNDS = [*TINY[1:], "train.fit.steps=100"]
SMALLER = {
    "watch": "detect.episodes=24",
    "help": "collect.episodes=8",
    "round": "train.fit.steps=4",
    "gate": "gate.num_states=8",
}


def test_armada_goes_three_rounds_and_leaves_a_link_to_the_policy_that_acts(tmp_path: Path):
    changes = [
        f"pipeline.changes.{stage}_{number}=['{setting}']" for number in (1, 2, 3) for stage, setting in SMALLER.items()
    ]
    overrides = ",".join(repr(each) for each in ROUNDS)
    asked = ["pipeline", "recipe=armada", "pipeline.recipe=reach_planar", f"pipeline.overrides=[{overrides}]", *changes]
    asked += [f"run.root={tmp_path}", "run.threads=1"]
    assert main(asked) == 0
    folder = tmp_path / "pipeline/reach_planar/0"
    verdicts, acting = [], folder / "train/base/0/checkpoint"
    for number in (1, 2, 3):
        gate = folder / f"gate/gate_{number}/0"
        verdicts.append(json.loads((gate / "result.json").read_text())["gate"]["accepted"])
        acting = folder / f"train/round_{number}/0/checkpoint" if verdicts[-1] else acting
        assert (gate / "checkpoint").is_symlink() and (gate / "checkpoint").resolve() == acting.resolve()
        counts = json.loads((folder / f"collect/help_{number}/100{number}0/result.json").read_text())["interventions"]
        assert counts["takeovers"] >= counts["episodes"] >= 0
    watched = (folder / "detect/watch_1/0/result.json").stat().st_mtime_ns
    (folder / "result.json").unlink()
    assert main(asked) == 0  # nothing is done twice, not even what always starts over by itself
    assert (folder / "detect/watch_1/0/result.json").stat().st_mtime_ns == watched


@pytest.mark.parametrize("task", ["push_t", "pick_place"])
def test_rl100_composes_for_every_task(task: str, tmp_path: Path):
    config = compose(["recipe=rl100", f"pipeline.recipe={task}", "run.seed=3"])
    stages = stages_of(config, tmp_path)
    assert list(stages)[:3] == ["demonstrations", "imitation", "log"] and list(stages)[-1] == "one_step"
    offline = stages["offline"][1]
    assert offline.offline.model is not None
    assert offline.gate.models != (offline.offline.model,)  # who taught a policy does not judge it
    assert offline.offline.policy == tmp_path / "train" / "imitation" / "3" / "checkpoint"
    assert {each.world.name for _, each in stages.values()} == {task}


def test_rl100_from_images_knows_no_state_and_keeps_one_encoder(tmp_path: Path):
    config = compose(["recipe=rl100_pixels", "run.seed=3"])
    stages = stages_of(config, tmp_path)
    model = tmp_path / "worldmodel" / "model" / "3" / "checkpoint"
    assert stages["model"][1].worldmodel.config.encoder is None
    assert all(stages[name][1].worldmodel.config.encoder == model for name in ("judge", "online_model"))
    for name in ("recorder", "imitation"):
        assert "observation.environment_state" not in stages[name][1].policy.config.observation_keys
    assert stages["imitation"][1].train.encoder == model
    assert stages["offline"][1].gate.models == (tmp_path / "worldmodel" / "judge" / "10003" / "checkpoint",)
    assert {each.world.cameras for _, each in stages.values()} == {("top",)}


SEEING = [
    *(each for each in SMALL if not each.startswith("worldmodel.config")),
    "world.image_size=16",
    "world.batch_size=8",
    "policy.image.channels=[8,8,8]",
    "collect.episodes=12",
    "offline.evaluate_episodes=8",
    "offline.rounds=1",
    "gate.num_states=8",
]
TINY = ["features=4", "channels=[8,8,8]", "ensemble.members=2", "ensemble.width=16", "ensemble.head_width=16"]


def test_from_images_to_one_step_behind_one_encoder(tmp_path: Path):
    """Every verb of rl100_pixels takes what the one before it left, and what comes out sees and acts."""
    asked = ["pipeline", "recipe=rl100_pixels", f"run.root={tmp_path}", "run.threads=1"]
    asked.append(f"pipeline.overrides=[{','.join(repr(each) for each in SEEING)}]")
    sized = [*(f"worldmodel.config.{each}" for each in TINY), "worldmodel.fit.steps=20"]
    for stage in ("model", "judge", "online_model"):
        asked.append(f"pipeline.changes.{stage}=[{','.join(repr(each) for each in sized)}]")
    asked.append("pipeline.changes.demonstrations=['collect.episodes=12']")
    for stage in ("recorder", "imitation"):
        asked.append(f"pipeline.changes.{stage}=['train.fit.steps=10']")
    for stage in ("log", "online_log"):
        asked.append(f"pipeline.changes.{stage}=['collect.episodes=16']")
    for stage in ("offline", "online"):
        asked.append(
            f"pipeline.changes.{stage}=['offline.improve.iterations=1','gate.num_states=8','offline.gated=false']"
        )
    asked.append("pipeline.changes.one_step=['distill.fit.steps=10']")
    assert main(asked) == 0
    folder = tmp_path / "pipeline" / "push_cube_pixels" / "0"
    result = json.loads((folder / "result.json").read_text())
    assert result["stages"]["offline"]["world_steps"] == 0 and result["stages"]["offline"]["accepted"] == 1
    student = load_whole(folder / "distill" / "one_step" / "0" / "checkpoint")
    assert isinstance(student, EncodedPolicy) and student.spec.scored_steps == 1
    assert set(student.spec.observation) == {"observation.state", "observation.images.top"}
    first = load_whole(folder / "train" / "imitation" / "0" / "checkpoint")
    assert isinstance(first, EncodedPolicy)
    own, later = (encoder_weights(each.model) for each in (first, student))
    assert all(torch.equal(own[name], later[name]) for name in own)


@pytest.mark.parametrize("task", ["push_cube", "push_t", "pick_place", "reach_planar"])
def test_imagine_pixels_composes_and_learns_without_a_step_in_the_world(task: str, tmp_path: Path):
    stages = stages_of(compose(["recipe=imagine_pixels", f"pipeline.recipe={task}", "run.seed=3"]), tmp_path)
    assert [verb for verb, _ in stages.values()] == ["collect", "worldmodel", "train", "imagine", "gate"]
    model = tmp_path / "worldmodel/model/3/checkpoint"
    imagined, gate = stages["imagined"][1], stages["gate"][1].gate
    assert stages["imitation"][1].train.encoder == imagined.imagine.model == model
    assert imagined.finetune.policy == gate.incumbent == tmp_path / "train/imitation/3/checkpoint"
    assert gate.candidate == tmp_path / "imagine/imagined/3/checkpoint" and gate.evaluators == ("world",)
    assert imagined.imagine.refresh_every == 0
    assert {(each.world.name, each.world.cameras) for _, each in stages.values()} == {(task, ("top",))}


def test_from_pictures_a_policy_improves_in_imagination_is_refreshed_and_tried(tmp_path: Path):
    """Every verb of imagine_pixels takes what the one before it left; a refresh records through the camera."""
    asked = ["pipeline", "recipe=imagine_pixels", f"run.root={tmp_path}", "run.threads=1"]
    small = [each for each in SEEING if not each.startswith(("policy.image", "offline"))]
    asked.append(f"pipeline.overrides=[{','.join(repr(each) for each in (*small, 'collect.episodes=12'))}]")
    sized = [*(f"worldmodel.config.{each}" for each in TINY), "worldmodel.fit.steps=20", "worldmodel.transitions=900"]
    asked.append(f"pipeline.changes.model=[{','.join(repr(each) for each in sized)}]")
    asked.append("pipeline.changes.imitation=['train.fit.steps=10']")
    learning = ["finetune.iterations=2", "finetune.checkpoint_every=1", "imagine.refresh_every=1"]
    learning += ["imagine.refresh_episodes=8", "imagine.refresh_steps=4", "imagine.real_eval_episodes=8"]
    asked.append(f"pipeline.changes.imagined=[{','.join(repr(each) for each in learning)}]")
    asked.append("pipeline.changes.gate=['gate.num_states=8']")
    assert main(asked) == 0
    folder = tmp_path / "pipeline/push_cube/0"
    result = json.loads((folder / "imagine/imagined/0/result.json").read_text())
    assert result["env_steps"] > 0 < result["imagined_steps"] and set(result["imagined"]) >= {"base, imagined"}
    assert json.loads((folder / "imagine/imagined/0/refreshes.json").read_text())["iterations"] == [1]
    policies = [
        load_whole(folder / each / "0/checkpoint") for each in ("train/imitation", "imagine/imagined", "gate/gate")
    ]
    weights = []
    for policy in policies:
        assert isinstance(policy, EncodedPolicy)
        assert set(policy.spec.observation) == {"observation.state", "observation.images.top"}
        weights.append(encoder_weights(policy.model))
    assert all(torch.equal(weights[0][name], each[name]) for each in weights for name in each)


def told(rate: float, **more) -> dict:
    """A stage's summary, with a verdict of 200 episodes."""
    figures = {"success_rate": rate, "low": rate - 0.05, "high": rate + 0.05, "episodes": 200}
    return {
        "verb": "v",
        "seconds": 60.0,
        "world_steps": None,
        "policy": dict.fromkeys(("deterministic", "stochastic"), figures),
        **more,
    }


def test_the_benchmark_tells_stages_over_seeds_and_every_policy_by_itself():
    stages = ("imitation", "offline", "online", *rl100.ALONE)
    figures = {
        str(seed): {
            "log": {"verb": "collect", "seconds": 30.0, "world_steps": 1000 * seed},
            **{name: told(rate, accepted=seed) for name, rate in zip(stages, (0.4, 0.9, 0.98, 0.6, 0.7), strict=True)},
            "one_step": told(0.97, times_faster=2.0),
        }
        for seed in (1, 3)
    }
    spread, each = rl100.tables({"tasks": {"push_t": figures}})
    lines = {line[0]: line[1:] for line in spread.lines}
    assert lines["log"] == ["", "", "2,000", "0.5", ""]
    assert lines["offline"] == ["90.0 % (90.0 to 90.0)"] * 2 + ["", "1.0", "1 / 3 of 3 accepted"]
    assert lines["one_step"][-1] == "2.0 times as fast, 2.0 times as fast"
    assert each.header[1:] == list(rl100.JUDGED)
    assert [line[0] for line in each.lines] == ["`push_t`, seed 1", "`push_t`, seed 3"]
    assert each.lines[0][1:4] == ["40.0 % [35.0, 45.0]", "60.0 % [55.0, 65.0]", "70.0 % [65.0, 75.0]"]
