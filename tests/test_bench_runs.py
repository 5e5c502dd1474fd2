"""Benchmarks made of runs, smaller than they are meant to be; how checkpoints are told apart."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from robopolicy.benchmarks import (
    collection,
    imagination,
    language,
    ranking,
    sight,
    test_time_planning,
)
from robopolicy.benchmarks.runs import BASES, Changes, Variant, run_variant, settings_of
from robopolicy.configuration import compose
from robopolicy.core.errors import ConfigError
from robopolicy.runs import runs_of
from robopolicy.verbs import bench, collect, imagine, train, worldmodel

pytestmark = pytest.mark.long

TINY = [
    "policy.width=16",
    "policy.depth=1",
    "policy.sampling_steps=2",
    "collect.episodes=8",
    "train.fit.steps=20",
    "train.evaluate_episodes=8",
    "finetune.finetuned_steps=2",
    "finetune.iterations=1",
    "finetune.num_envs=8",
    "finetune.rollout_length=4",
    "finetune.evaluate_episodes=8",
    "worldmodel.transitions=300",
    "worldmodel.config.members=2",
    "worldmodel.fit.steps=10",
    "world.batch_size=8",
    "worldmodel.validation_episodes=16",
    "worldmodel.validation_steps=100",
    "rank.episodes=8",
    "evaluate.episodes=8",
    "imagine.real_eval_episodes=8",
]


def test_what_a_benchmark_runs_has_its_threads_unless_overridden(tmp_path):
    chosen = compose(["run.threads=1"])
    assert compose(settings_of(chosen, tmp_path, "push_cube", 3)).run.threads == 1
    other = compose(["run.threads=1", "bench.overrides=['run.threads=4']"])
    assert compose(settings_of(other, tmp_path, "push_cube", 3)).run.threads == 4


def benchmark(root, *chosen, tiny=TINY):
    overrides = ",".join(f"'{setting}'" for setting in tiny)
    return bench.run(compose([*chosen, "bench.seeds=[0]", f"run.root={root}", f"bench.overrides=[{overrides}]"]))


@pytest.mark.parametrize("base", ["diffusion", "few"])
def test_what_imitates_on_the_side_does_so_from_what_its_base_learned_from(tmp_path, monkeypatch, base):
    monkeypatch.setitem(BASES, "few", Changes((), {"reach_planar": ("collect.episodes=5",)}))
    variant = Variant(base, ("finetune.auxiliaries=[experts]", "finetune.videos=0", "finetune.critic_warmup=0"))
    outcome = run_variant(compose([f"bench.overrides={json.dumps(TINY)}"]), tmp_path, "reach_planar", "on", variant, 0)
    assert outcome.records[-1]["experts"] > 0
    chosen = (tmp_path / "reach_planar/finetune/on/0/config.yaml").read_text()
    assert f"collect/{'data' if base == 'diffusion' else 'data_few'}/0/dataset" in chosen


def test_checkpoints_are_named_by_what_differs():
    runs = Path("runs")
    base, tuned = runs / "train/push_cube/0/checkpoint", runs / "finetune/push_cube/0/checkpoint"
    assert runs_of([base, tuned]) == ["base", "tuned"]
    assert runs_of([base, runs / "train/push_cube/1/checkpoint"]) == ["0", "1"]
    assert runs_of([base, runs / "finetune/other/1/checkpoint"]) == ["base push_cube 0", "tuned other 1"]
    assert runs_of([base]) == ["push_cube"]
    assert runs_of([]) == []
    with pytest.raises(ConfigError, match="have the same verb, name and seed"):
        runs_of([base, base])


def test_folders_of_others_are_named_by_the_end_of_their_path():
    base, outputs = Path("runs/train/push_cube/0/checkpoint"), Path("outputs")
    push, pull = (outputs / name / "checkpoints/last/pretrained_model" for name in ("push", "pull"))
    assert runs_of([push, pull, base, outputs / "act"]) == ["push", "pull", "push_cube", "act"]
    steps = [outputs / "push/checkpoints" / step / "pretrained_model" for step in ("010000", "020000")]
    assert runs_of(steps) == ["push/010000", "push/020000"]
    assert runs_of([Path("a/act"), Path("b/act"), Path("/act")]) == ["a/act", "b/act", "act"]
    assert runs_of([outputs / "push_cube", base]) == ["outputs/push_cube", "push_cube"]
    with pytest.raises(ConfigError, match="have the same verb, name and seed"):
        runs_of([push, base, push])


@pytest.mark.slow
def test_models_of_several_kinds_rank_the_same_policies(tmp_path, monkeypatch, capsys):
    few = {"novice": ("novice", None), "base": ("diffusion", None), "tuned": ("diffusion", 0.9)}
    monkeypatch.setattr(ranking, "POLICIES", few)
    monkeypatch.setattr(ranking, "CLONES", ("novice", "base"))
    monkeypatch.setattr(ranking, "FAULTS", {"push_cube": ("aim=0.04", "speed=0.3")})
    arms = 'ensemble,rssm,"ensemble, faults","ensemble, other scenes"'
    chosen = "bench.name=ranking", "bench.tasks=[push_cube]", f"bench.only=[{arms}]"
    assert benchmark(tmp_path, *chosen) == 0
    shown = capsys.readouterr().out
    assert "ensemble" in shown and "rssm" in shown and "MMRV" in shown
    figures = json.loads((tmp_path / "bench/ranking/benchmark.json").read_text())["tasks"]["push_cube"]
    names = [{row["name"] for row in figures[model]["0"]["policies"]} for model in ("ensemble", "rssm")]
    assert names[0] == names[1] and len(names[0]) == 3
    real = [{row["name"]: row["real"] for row in figures[model]["0"]["policies"]} for model in ("ensemble", "rssm")]
    assert real[0] == real[1]
    faulty = {row["name"] for row in figures["ensemble, faults"]["0"]["policies"]}
    assert {"expert, noise none", "expert, aim=0.04", "expert, speed=0.3"} < faulty and len(faulty) == 5
    assert "ensemble, other scenes, " in shown and figures["ensemble, other scenes"]["0"]["variations"]
    assert benchmark(tmp_path, *chosen) == 0, "nothing is done twice"


def test_a_policy_stands_beside_itself_looking_ahead(tmp_path, monkeypatch, capsys):
    small = ("features=4", "channels=[8,8,8]", "ensemble.members=2", "ensemble.width=16", "ensemble.head_width=16")
    sizes = *(f"worldmodel.config.{each}" for each in small), "worldmodel.transitions=600"
    seeing = "worldmodel.kind=latent_ensemble", "world.cameras=[top]", "world.image_size=16", *sizes
    models = {"ensemble": Changes(("worldmodel.kind=ensemble",)), "latent_ensemble": Changes(seeing)}
    monkeypatch.setattr(test_time_planning, "MODELS", models)
    plans = {"2 candidates": ("plan.candidates=2", "plan.horizon=2")}
    plans["CEM from pictures"] = ("plan.kind=cem", "plan.horizon=4", "plan.options={samples: 8, elites: 2, rounds: 1}")
    monkeypatch.setattr(test_time_planning, "PLANS", plans)
    chosen = "bench.name=test_time_planning", "bench.tasks=[reach_planar]"
    tiny = [setting for setting in TINY if not setting.startswith("worldmodel.config.")]  # of both kinds
    assert benchmark(tmp_path, *chosen, tiny=tiny) == 0
    assert "reach_planar, 2 candidates" in capsys.readouterr().out
    folder = tmp_path / "bench" / "test_time_planning"
    rows = json.loads((folder / "benchmark.json").read_text())["tasks"]["reach_planar"]
    for plan, kind in (("2 candidates", "ensemble"), ("CEM from pictures", "latent_ensemble")):
        row = rows[plan]["0"]
        assert {row[who][mode]["episodes"] for who in row for mode in row[who]} == {8}
        assert (folder / "reach_planar/worldmodel" / kind / "0/checkpoint").is_dir()
    policies = {path.name for path in (folder / "reach_planar" / "train" / "diffusion").iterdir() if path.is_dir()}
    assert policies == {"0", "100"}, "the policy that is judged and the one that the model saw share no seed"
    assert benchmark(tmp_path, *chosen, tiny=tiny) == 0
    assert "seed 100" not in capsys.readouterr().out, "nothing is done twice"


@pytest.mark.slow
def test_ways_of_collecting_stand_beside_one_another(tmp_path, monkeypatch, capsys):
    brief = (*collection.LEARNING, "finetune.groups=4", "finetune.group_size=2", "finetune.iterations=1")
    monkeypatch.setattr(collection, "LEARNING", brief)
    monkeypatch.setattr(collection, "POLICIES", {"diffusion": Variant("diffusion", brief)})
    chosen = "bench.name=collection", "bench.tasks=[reach_planar]", "bench.rounds=4"
    assert benchmark(tmp_path, *chosen) == 0
    assert "reach_planar: learning from them" in capsys.readouterr().out
    figures = json.loads((tmp_path / "bench/collection/benchmark.json").read_text())
    ways = figures["speed"]["reach_planar"]["diffusion"]
    assert list(ways) == list(collection.SHARES)
    assert [row["held"] for row in ways.values()] == [0, 16, 32, 64], "as many groups as were over-provisioned"
    assert ways["waits for all"]["staleness"] == 0 < ways["twice as many more"]["staleness"]
    runs = figures["learning"]["reach_planar"]
    assert [row[0]["collected"] for row in runs.values()] == [8, 8]


@pytest.mark.slow
def test_imagined_and_real_success_stand_beside_each_other(tmp_path, monkeypatch, capsys):
    narrow = imagination.ARMS["narrow, experts beside"]
    brief = replace(narrow, described=(), settings=(*narrow.settings, "finetune.iterations=1"))
    monkeypatch.setitem(imagination.ARMS, "narrow, experts beside", brief)
    arms = "bench.only=[ensemble,'narrow, experts beside']"
    assert benchmark(tmp_path, "bench.name=imagination", "bench.tasks=[push_cube]", arms) == 0
    assert "imagined - real" in capsys.readouterr().out
    figures = json.loads((tmp_path / "bench/imagination/benchmark.json").read_text())["tasks"]["push_cube"]
    for row in figures.values():
        assert row["env_steps"] == [0]
        assert row["base"]["episodes"] == row["tuned"]["episodes"] == row["imagined"]["episodes"] == 8
        assert [record["iteration"] for record in row["records"][0]] == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("task", ["push_cube", "pick_place"])
def test_the_first_arm_of_imagination_is_what_a_recipes_own_verbs_do(tmp_path, task):
    assert benchmark(tmp_path, "bench.name=imagination", f"bench.tasks=[{task}]", "bench.only=[ensemble]") == 0
    config = compose([f"recipe={task}", f"run.root={tmp_path / 'own'}", *TINY])
    assert config.worldmodel.include_base
    for verb in (collect, train, worldmodel, imagine):
        assert verb.run(config) == 0
    arm = tmp_path / "bench" / "imagination" / task / "imagine" / "ensemble" / "0"
    own = tmp_path / "own" / "imagine" / task / "0"
    for file in ("checkpoint/model.safetensors", "last/model.safetensors"):
        assert (arm / file).read_bytes() == (own / file).read_bytes(), file
    results = [json.loads((folder / "result.json").read_text()) for folder in (arm, own)]
    assert results[0]["tuned"]["deterministic"]["per_episode"] == results[1]["tuned"]["deterministic"]["per_episode"]
    assert results[0]["ended"] == results[1]["ended"] and results[0]["watched_steps"] > 0


def test_recipes_whose_model_knows_the_base_say_so_where_there_is_none(tmp_path):
    config = compose(["recipe=pick_place", f"run.root={tmp_path}", *TINY])
    assert collect.run(config) == 0
    with pytest.raises(ConfigError, match=r"create it with 'robopolicy train', or set worldmodel\.include_base=false"):
        worldmodel.run(config)
    assert config.imagine.bc_weight == 0.05
    images = [
        compose([f"recipe={name}"]).worldmodel for name in ("push_cube_pixels", "push_t_pixels", "push_cube_video")
    ]
    assert not any(section.include_base for section in images), "a base of states sees no images, nor the other way"


@pytest.mark.parametrize("arms", [("hidden words", "distillation"), pytest.param((), marks=pytest.mark.slow)])
def test_policies_that_are_told_are_judged_under_controls_and_on_what_was_held_out(arms, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(language, "GROUPS", 16)
    monkeypatch.setattr(language, "ROUNDS", 2)
    few = [
        "collect.episodes=32",
        "collect.label_steps=2",
        "policy.chunk=2",
        "policy.prediction_steps=2",
        "teach.episodes=9",
        "teach.rounds=2",
        "teach.last_round_steps=2",
        "teach.fit.steps=2",
        "finetune.group_size=4",
        "policy.text_features=8",
        "world.image_size=16",
        "policy.image.channels=[8,8,8]",
    ]
    overrides = ",".join(f"'{setting}'" for setting in (*TINY, *few))
    given = ["bench.name=language", "bench.seeds=[0]", f"run.root={tmp_path}", f"bench.overrides=[{overrides}]"]
    given.append(f"bench.only=[{','.join(repr(arm) for arm in arms)}]")
    assert bench.run(compose([*given, "run.threads=1"])) == 0
    rows = json.loads((tmp_path / "bench" / "language" / "benchmark.json").read_text())["arms"]
    rows = {arm: seeds["0"] for arm, seeds in rows.items()}
    asked = arms or tuple(language.ARMS)
    assert set(rows) == set(asked)
    assert {arm for arm, row in rows.items() if not row["env_steps"]} == set(asked) & set(language.IMITATED)
    assert {arm for arm, row in rows.items() if "refused" not in row["controls"]["paraphrase"]} == {"hidden words"}
    students = tmp_path / "bench" / "language" / "tidy" / "teach"
    for arm in set(asked) & set(language.TAUGHT):
        read = (students / arm / "0" / "checkpoint" / "config.json").read_text()
        assert ("images.wrist" in read) == (arm == "cameras")
    for row in rows.values():
        assert set(row["controls"]) == {"wrong_instruction", "paraphrase"}
        assert row["asked"]["episodes"] == row["held_out"]["episodes"] == 8
        held = [text for text in row["instructions"] if text.endswith("(held out)")]
        assert held and len(held) <= 3
    output = " ".join(capsys.readouterr().out.split())
    assert ("GRAPE" in output) == ("GRAPE" in asked) and "By instruction, over all seeds" in output


def test_students_that_see_are_beside_imitation_and_ppo_on_the_images(tmp_path, capsys):
    few = ["world.image_size=16", "policy.image.channels=[8,8,8]", "teach.episodes=4", "teach.rounds=2"]
    few += ["teach.last_round_steps=2", "teach.fit.steps=2", "teach.evaluate_episodes=8"]
    overrides = ",".join(f"'{setting}'" for setting in (*TINY, *few))
    given = ["bench.name=sight", "bench.tasks=[push_cube]", "bench.seeds=[0]", f"run.root={tmp_path}"]
    assert bench.run(compose([*given, f"bench.overrides=[{overrides}]", "run.threads=1"])) == 0
    root = tmp_path / "bench" / "sight"
    arms = json.loads((root / "benchmark.json").read_text())["tasks"]["push_cube"]
    rows = {arm: seeds["0"] for arm, seeds in arms.items()}
    assert set(rows) == set(sight.ARMS) and set(sight.LEARN) == set(sight.ARMS)
    for before, after in (("imitation", "ppo"), ("telling", "telling_ppo")):
        assert rows[after]["minutes"] > rows[before]["minutes"] > 0
    metrics = {name: (root / f"push_cube/train/{name}/0/metrics.jsonl").read_text() for name in ("seen", "telling")}
    assert "auxiliary" in metrics["telling"] and "auxiliary" not in metrics["seen"]
    tuned = json.loads((root / "push_cube/finetune/telling/0/checkpoint/config.json").read_text())
    assert '"layer_norm": true' in json.dumps(tuned)
    assert rows["tuned"]["env_steps"] > rows["expert"]["env_steps"] and rows["tuned"]["teacher"]["episodes"] == 8
    student = json.loads((root / "push_cube/teach/expert/0/checkpoint/config.json").read_text())
    assert "observation.images.top" in json.dumps(student) and "environment_state" not in json.dumps(student["spec"])
    assert "seen at 64 px by top" in " ".join(capsys.readouterr().out.split())
