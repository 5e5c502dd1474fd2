"""collect.quality on the command line: success as asked for, what is stored, runs that go on, errors."""

import hashlib
import json

import numpy as np
import pytest
import torch
from own_things import ACTION, FIELDS, Linear, LinearConfig

from robopolicy.building.worlds import build_noisy_expert, build_world
from robopolicy.cli import INTERRUPTED, main
from robopolicy.configuration import compose
from robopolicy.core.randomness import derive_seed, episode_seeds
from robopolicy.core.spec import STATE
from robopolicy.data.lerobot_format import QUALITY, read_dataset
from robopolicy.data.quality import COLUMNS, GAUSSIAN, RANDOM, SEGMENT, TRUNCATED, read_behaviour, read_quality
from robopolicy.data.record import record
from robopolicy.evaluation.intervals import wilson
from robopolicy.evaluation.scores import normalised_score, read_anchors
from robopolicy.evaluation.success import evaluate_policy
from robopolicy.verbs import graded

pytestmark = pytest.mark.long

REACH = ["world=reach_planar", "run.threads=1", "collect.episodes=60"]
REACH += ["collect.trial_episodes=48", "collect.reference_episodes=32"]


def run(root, *settings):
    return main(["collect", *REACH, f"run.root={root}", *settings])


def folder(root, quality, name="reach_planar"):
    return root / "collect" / f"{name}-{quality}" / "0"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("graded")
    for quality in ("random", "expert", "medium", "replay", "mixed", "play"):
        assert run(root, f"collect.quality={quality}") == 0
    return root


def files(path):
    return {
        str(each.relative_to(path)): hashlib.sha256(each.read_bytes()).hexdigest()
        for each in sorted(path.rglob("*"))
        if each.is_file() and each.name not in ("versions.json", "config.yaml")
    }


def test_qualities_differ_in_measured_success(root):
    qualities = {name: read_quality(folder(root, name) / "dataset") for name in ("random", "expert", "medium", "mixed")}
    success = {name: each["measured"]["success_rate"] for name, each in qualities.items()}
    assert success["expert"] >= 0.95
    assert success["random"] <= 0.2
    low, high = wilson(round(60 * success["medium"]), 60)
    assert low < 0.5 and high > 0.3
    (tried,) = (
        each
        for each in qualities["medium"]["trials"]
        if each["level"] == qualities["medium"]["levels"]["medium"]["gaussian"]
    )
    assert 0.3 <= tried["success"] <= 0.5
    assert success["random"] < success["medium"] < success["mixed"] < success["expert"]
    score = {name: each["score"]["score"] for name, each in qualities.items()}
    assert abs(score["random"]) < 15 and abs(score["expert"] - 100) < 15
    assert score["random"] < score["medium"] < score["expert"]


def test_datasets_say_what_made_them(root):
    place = folder(root, "medium")
    quality, result = read_quality(place / "dataset"), json.loads((place / "result.json").read_text())
    assert quality["name"] == result["name"] == "gen-v1/reach_planar-medium"
    assert result["success_rate"] == quality["measured"]["success_rate"]
    assert (
        quality["generator"]["actor"] == {"kind": "expert"} and quality["generator"]["world"]["name"] == "reach_planar"
    )
    assert len(quality["hash"]) == 16 and quality["hash"] == result["hash"]
    hashes = {read_quality(folder(root, name) / "dataset")["hash"] for name in ("random", "expert", "medium", "play")}
    assert len(hashes) == 4
    episodes, behaviour = read_dataset(place / "dataset"), read_behaviour(place / "dataset")
    level = quality["levels"]["medium"]
    assert np.allclose(behaviour[GAUSSIAN], level["gaussian"]) and np.allclose(behaviour[RANDOM], level["random"])
    assert abs(float((behaviour[SEGMENT] == 1).float().mean()) - level["random"]) < 0.05
    ends = episodes.lengths.cumsum(0) - 1
    assert torch.equal(behaviour[TRUNCATED][ends].bool(), ~episodes.terminated)
    assert torch.equal(episodes.seeds, torch.as_tensor(episode_seeds(0, "collect/medium", 60)))
    own = normalised_score(graded.Performance.of_episodes(episodes), read_anchors(place / "dataset"))
    assert own.score == pytest.approx(quality["score"]["score"])
    anneal = read_behaviour(folder(root, "replay") / "dataset")[RANDOM]
    assert anneal[0] == 1 and anneal[-1] == pytest.approx(level["random"])
    assert set(read_behaviour(folder(root, "play") / "dataset")[SEGMENT].tolist()) == {0, 1, 2}


def test_one_scale_for_all_datasets_of_a_task_whatever_their_seed(root, tmp_path):
    assert run(tmp_path, "collect.quality=random", "run.seed=1", "collect.episodes=4") == 0
    other = tmp_path / "collect" / "reach_planar-random" / "1" / "dataset"
    assert read_anchors(other) == read_anchors(folder(root, "medium") / "dataset")


def test_a_run_that_is_interrupted_ends_in_the_same_place_and_measures_nothing_twice(root, tmp_path, monkeypatch):
    labels, stops = [], {1, 4}  # while the second anchor is measured, and the third trial

    def interrupted(*arguments, **rest):
        raise KeyboardInterrupt

    def counted(*arguments, **rest):
        if len(labels) in stops:
            stops.remove(len(labels))
            raise KeyboardInterrupt
        labels.append(rest["label"])
        return evaluate_policy(*arguments, **rest)

    monkeypatch.setattr(graded, "evaluate_policy", counted)
    for left in (1, 0):
        assert run(tmp_path, "collect.quality=medium") == INTERRUPTED and len(stops) == left
    for place in ("graded.record_with", "collect.write_dataset"):
        with monkeypatch.context() as patch:
            patch.setattr(f"robopolicy.verbs.{place}", interrupted)
            assert run(tmp_path, "collect.quality=medium") == INTERRUPTED
    assert run(tmp_path, "collect.quality=medium") == 0
    assert len(labels) == len(set(labels)) >= 5, "nothing is measured twice"
    assert files(folder(tmp_path, "medium")) == files(folder(root, "medium"))


def test_without_a_quality_everything_is_as_it_was(tmp_path):
    assert run(tmp_path, "collect.noise=[none,medium]", "collect.episodes=9") == 0
    data = tmp_path / "collect" / "reach_planar" / "0" / "dataset"
    assert sorted(each.name for each in data.parent.iterdir()) == [
        "config.yaml",
        "dataset",
        "result.json",
        "versions.json",
    ]
    assert not (data / QUALITY).exists()
    features = json.loads((data / "meta" / "info.json").read_text())["features"]
    assert not set(COLUMNS) & set(features)
    section = compose(REACH).world
    parts = []
    for index, (level, share) in enumerate((("none", 5), ("medium", 4))):
        world = build_world(section, episodes=5)
        expert = build_noisy_expert(section, world, level, derive_seed(0, f"collect/noise/{index}"))
        parts.append(record(world, expert, episode_seeds(0, f"collect/{index}", share)))
    assert torch.equal(read_dataset(data).actions, torch.cat([part.actions for part in parts]))


def test_a_policy_is_the_expert_where_one_is_given(tmp_path):
    made = tmp_path / "made"
    Linear(LinearConfig(), FIELDS, ACTION, fps=10.0).save(made)
    settings = ["world.name=own_things:Line", "world.batch_size=8", "world.options.horizon=8", "run.name=line"]
    assert run(tmp_path, *settings, "collect.quality=medium", f"collect.policy={made}", "run.plugins=[own_things]") == 0
    data = tmp_path / "collect" / "line" / "0" / "dataset"
    quality, behaviour = read_quality(data), read_behaviour(data)
    assert quality["generator"]["actor"]["kind"] == "policy"
    assert len(quality["generator"]["actor"]["files"]["model.safetensors"]) == 64
    assert quality["anchors"]["expert"]["success_rate"] == 1.0
    assert 0.2 < quality["measured"]["success_rate"] < 0.6
    level = quality["levels"]["medium"]
    assert 0 < level["gaussian"] < 1 and np.allclose(behaviour[GAUSSIAN], level["gaussian"])
    episodes = read_dataset(data)
    undisturbed = -episodes.observation[STATE][:-1].clamp(-0.2, 0.2)  # a chunk of two steps, decided at its first
    first = episodes.frame_starts
    own = behaviour[SEGMENT][episodes.starts] == 0
    spread = (episodes.actions[episodes.starts] - undisturbed[first])[own]
    assert 0 < spread.abs().mean() < 0.2


def complaint(capsys, *settings):
    capsys.readouterr()
    assert main(["collect", *settings]) == 2
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.filterwarnings("always::robopolicy.core.errors.RobopolicyWarning")
def test_errors_name_what_is_missing(tmp_path, capsys):
    here = [f"run.root={tmp_path}", "collect.trial_episodes=24", "collect.reference_episodes=24", "world.batch_size=8"]
    line = ["world.name=own_things:Line", *here]
    message = complaint(capsys, *line, "collect.quality=medium")
    assert "no scripted expert" in message and "collect.controller=" in message and "collect.policy=" in message
    message = complaint(capsys, *line, "collect.quality=expert", "collect.successes_only=true")
    assert "successes_only" in message
    assert "collect.quality" in complaint(capsys, *here, "collect.quality=mediocre")
    assert "at least 2" in complaint(capsys, *here, "collect.reference_episodes=1")
    short = [*line, "collect.controller=own_things:Towards", "world.options.horizon=2"]
    message = complaint(capsys, *short, "collect.quality=expert")
    assert "requires an expert with at least 95% success" in message
    assert "own_things-Line-expert" in {each.parent.name for each in (tmp_path / "collect").glob("*/0")}
    silent = ["world.name=gymnasium:Pendulum-v1", "collect.controller=own_things:Towards", *here]
    assert "does not report which episodes succeed" in complaint(capsys, *silent, "collect.quality=medium")
