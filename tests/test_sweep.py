"""A sweep: which runs it makes, that each is the verb's own, what the tables say, failures, Ctrl-C, and resuming."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from robopolicy.configuration import compose
from robopolicy.core.errors import ConfigError
from robopolicy.evaluation.intervals import compare_paired, wilson
from robopolicy.evaluation.success import EvaluationResult
from robopolicy.evaluation.sweeps import FINISHED, SweptRun, metric_of, numbers_in, summaries, table
from robopolicy.runs import input_path, run_path
from robopolicy.verbs.sweep import planned
from robopolicy.verbs.verb import declaration, overrides


def test_every_combination_is_a_run_of_its_own():
    runs = planned(["finetune", "recipe=push_t", "run.seed=0,1,2", "finetune.clip=0.02,0.05"])
    assert [(each.config.finetune.clip, each.shown.seed) for each in runs] == [
        (clip, seed) for seed in (0, 1, 2) for clip in (0.02, 0.05)
    ]
    assert [str(each.shown.folder) for each in runs[:2]] == [
        "runs/finetune/push_t-clip-0.02/0",
        "runs/finetune/push_t-clip-0.05/0",
    ]
    assert str(input_path(runs[0].config, "train")) == "runs/train/push_t/0"
    for each in runs:  # what is typed is what was planned
        again = compose(each.settings)
        assert run_path(again, "finetune") == each.shown.folder and again.finetune == each.config.finetune


def test_seeds_alone_are_the_usual_runs():
    runs = planned(["train", "recipe=push_cube", "run.seed=range(3)"])
    assert [each.settings for each in runs] == [["recipe=push_cube", f"run.seed={seed}"] for seed in range(3)]
    assert [each.shown.setting for each in runs] == [""] * 3


@pytest.mark.parametrize(
    ("setting", "values"),
    [
        ("world.cameras=[top,front]", [("top", "front")]),
        ("world.cameras=[top],[top,front]", [("top",), ("top", "front")]),
        ("world.cameras=choice([top],[front])", [("top",), ("front",)]),
    ],
)
def test_values_in_brackets_are_one_value(setting, values):
    runs = planned(["train", "recipe=push_cube", setting])
    assert [each.config.world.cameras for each in runs] == values
    assert len({each.shown.folder for each in runs}) == len(values)


def test_settings_with_the_same_last_name_are_told_apart():
    runs = planned(["finetune", "recipe=push_cube", "finetune.discount=0.9,0.99", "plan.discount=0.9,0.97"])
    assert runs[1].shown.setting == "finetune.discount=0.9, plan.discount=0.97"


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ([], "No command given"),
        (["finetun"], "'finetun' is not a verb. Did you mean 'finetune'"),
        (["serve", "x"], "'serve' leaves no result"),
        (["train", "train.fit.steps=interval(1,5)"], "no list of values"),
        (["train", "run.name=a,b"], "run.name cannot be swept"),
        (["train", "run.seed=1,1"], "give each value once"),
        (["train", "train.fit.stepz=1,2"], "Unknown configuration key 'train.fit.stepz'"),
        (["train", "train.fit.steps=1,x"], "train.fit.steps"),
        (["train", "train.fit.steps=(1"], "cannot be read"),
    ],
)
def test_what_cannot_be_swept_is_refused_before_anything_runs(command, why):
    with pytest.raises(ConfigError) as error:
        planned(command)
    assert why in str(error.value)


def test_words_of_the_other_verb_pass_through_the_command_line():
    words = ["evaluate", "a b", "world.options.text='x, y'", "run.seed=0,1", "sweep.name=mine", "json=x.json"]
    config = compose(overrides("sweep", declaration("sweep"), words))
    assert config.sweep.command == tuple(words[:4]) and config.sweep.name == "mine" and str(config.json) == "x.json"


def evaluated(success, seed, world="push_t"):
    episodes = np.arange(len(success)) + 1000 * seed
    shared = {"returns": np.asarray(success, float), "lengths": np.ones(len(success), int)}
    evaluation = EvaluationResult(
        world=world,
        seeds=episodes,
        success=np.asarray(success, bool),
        cut=np.zeros(len(success), bool),
        deterministic=True,
        seconds=1.0,
        steps=len(success),
        **shared,
    )
    return {
        "tuned": {"deterministic": evaluation.to_json(), "stochastic": evaluation.to_json()},
        "seconds": 60.0 + seed,
    }


def run(setting, seed, success=None, **more):
    if success is None:
        return SweptRun(setting, seed, Path("x"), state="failed", reason="broke")
    return SweptRun(setting, seed, Path("x"), FINISHED, result=evaluated(success, seed, **more))


GENERATOR = np.random.default_rng(0)
OUTCOMES = {(s, seed): GENERATOR.random(50) < rate for s, rate in (("a", 0.5), ("b", 0.8)) for seed in (0, 1, 2)}


def test_means_ranges_and_paired_differences_are_those_of_the_episodes():
    runs = [run(setting, seed, success) for (setting, seed), success in OUTCOMES.items()]
    assert metric_of(runs) == "success"
    first, second = summaries(runs, "success")
    rates = [OUTCOMES["b", seed].mean() for seed in (0, 1, 2)]
    assert second.mean == pytest.approx(np.mean(rates)) and list(second.values.values()) == pytest.approx(rates)
    joined = {s: np.concatenate([OUTCOMES[s, seed] for seed in (0, 1, 2)]) for s in "ab"}
    assert second.difference == compare_paired(joined["a"], joined["b"]) and first.difference is None
    assert second.interval == wilson(int(joined["b"].sum()), 150) and second.seconds == 61.0
    header, rows = table([first, second], "success")
    assert header[:2] == ["setting", "success"] and rows[1][0] == "b" and "points" in rows[1][4]


def test_only_seeds_that_both_have_finished_are_compared():
    runs = [run("a", 0, OUTCOMES["a", 0]), run("a", 1), run("b", 0, OUTCOMES["b", 0]), run("b", 1, OUTCOMES["b", 1])]
    first, second = summaries(runs, metric_of(runs))
    assert second.difference == compare_paired(OUTCOMES["a", 0], OUTCOMES["b", 0])
    assert (len(first.values), first.planned) == (1, 2)
    other = [run("a", 0, OUTCOMES["a", 0]), run("b", 0, OUTCOMES["b", 0], world="pick_place")]
    assert summaries(other, "success")[1].difference is None, "other worlds do not pair"


def test_runs_without_success_are_compared_by_what_they_report():
    runs = [
        SweptRun(s, 0, Path("x"), FINISHED, result={"validation": {"reward_error": e}})
        for s, e in (("a", 0.2), ("b", 0.1))
    ]
    assert metric_of(runs) == "validation.reward_error"
    assert [each.mean for each in summaries(runs, "validation.reward_error")] == [0.2, 0.1]
    assert list(numbers_in({"a": {"b": 1, "c": "x"}, "d": True, "e": [1]})) == ["a.b"]
    assert metric_of([SweptRun("a", 0, Path("x"), FINISHED, result={"odd": 1})]) == ""
    assert table(summaries([run("a", 0)], ""), "")[1] == [["a", "-", "0 of 1"]]


TRAIN = (
    "train", "world=reach_planar", "run.threads=1", "policy.width=16", "policy.depth=1", "policy.sampling_steps=2",
    "train.fit.steps=6,12", "run.seed=0,1", "train.evaluate_episodes=8",
)  # fmt: skip


def robopolicy(*words, **options):
    return subprocess.run([sys.executable, "-m", "robopolicy", *words], capture_output=True, text=True, **options)


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A folder in which demonstrations exist for seed 0, not for 1, and training was swept over both."""
    folder = tmp_path_factory.mktemp("sweep")
    made = robopolicy("collect", "world=reach_planar", "run.threads=1", "collect.episodes=8", cwd=folder)
    assert made.returncode == 0, made.stderr
    return folder, robopolicy("sweep", *TRAIN, "json=table.json", cwd=folder)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_failed_run_is_listed_and_the_others_go_on(swept):
    folder, process = swept
    assert process.returncode == 1, process.stderr
    assert (
        process.stdout.count("Failed: ") == 2
        and "steps=6, seed 1: runs/collect/reach_planar/1/dataset" in process.stdout
    )
    told = json.loads((folder / "table.json").read_text())
    assert [each["state"] for each in told["runs"]] == ["finished", "failed", "finished", "failed"]
    place = folder / "runs/sweep/train-reach_planar"
    assert told == json.loads((place / "table.json").read_text())
    text = (place / "table.md").read_text()
    assert "| steps=6 |" in text and "| steps=12 |" in text and "1 of 2" in text and "points" in text
    page = (place / "report.html").read_text()
    assert page.count("<svg") == 1 and "Sweep of train" in page


@pytest.mark.long
@pytest.mark.timeout(900)
def test_each_run_is_the_verbs_own_and_finished_ones_are_not_run_again(swept):
    folder, _ = swept
    alone = [word.replace("=6,12", "=12").replace("=0,1", "=0") for word in TRAIN]
    assert (
        robopolicy(*alone, "run.root=alone", "train.data=runs/collect/reach_planar/0/dataset", cwd=folder).returncode
        == 0
    )
    first, second = (
        (folder / path / "checkpoint/model.safetensors").read_bytes()
        for path in ("alone/train/reach_planar/0", "runs/train/reach_planar-steps-12/0")
    )
    assert first == second
    result = folder / "runs/train/reach_planar-steps-6/0/result.json"
    before = result.stat().st_mtime_ns
    again = robopolicy("sweep", *(word.replace("=0,1", "=0") for word in TRAIN), cwd=folder)
    assert again.returncode == 0 and again.stdout.count("is finished already") == 2, again.stdout
    assert result.stat().st_mtime_ns == before


@pytest.mark.long
@pytest.mark.timeout(900)
def test_ctrl_c_stops_the_run_and_says_how_to_go_on(swept):
    folder, _ = swept
    words = [word.replace("=6,12", "=100000,7") for word in TRAIN]
    command = [sys.executable, "-m", "robopolicy", "sweep", *words, "sweep.name=stopped"]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = folder / "runs/train/reach_planar-steps-100000/0/metrics.jsonl"
    deadline = time.time() + 240
    while not metrics.exists() and time.time() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)  # to the sweep alone: it passes it on
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "The table so far: runs/sweep/stopped/table.md" in out and "run the same command again" in err
    assert not (folder / "runs/train/reach_planar-steps-7").exists(), "no further run began"
    state = json.loads((folder / "runs/train/reach_planar-steps-100000/.0.status.json").read_text())["state"]
    assert state == "interrupted"
