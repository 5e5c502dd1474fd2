"""`robopolicy success` from labelled data to a world's success, on the command line: states and images."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from oracle import saved_oracle

from robopolicy.cli import main
from robopolicy.core.registry import import_plugins
from robopolicy.data.lerobot_format import read_dataset
from robopolicy.success.classifier import load_classifier

pytestmark = pytest.mark.long
import_plugins(["oracle"])

NOISE = "collect.noise=[low,low,random,random]"
ON = "world.options.terminate_on_success=false"
QUICK = ("success.fit.steps=200", "success.hold=1", "success.fit.learning_rate=3e-3", "run.threads=1")
EVALUATION = ("evaluate.episodes=16", "evaluate.videos=0", "world.batch_size=16")


def run(folder: Path, verb: str, *settings: object) -> int:
    return main([verb, *map(str, settings), f"run.root={folder}"])


def result(folder: Path, verb: str, name: str) -> dict:
    return json.loads((folder / verb / name / "0" / "result.json").read_text())


@pytest.fixture(scope="module")
def folder(root, tmp_path_factory):
    """Runs of reach_planar: a policy, recordings with failures, and a classifier of states."""
    runs = tmp_path_factory.mktemp("success")
    shutil.copytree(root / "train", runs / "train")
    assert run(runs, "collect", "world=reach_planar", ON, NOISE, "collect.episodes=160", "run.name=log") == 0
    assert run(runs, "success", runs / "collect" / "log" / "0" / "dataset", *QUICK, "run.name=states") == 0
    return runs


@pytest.fixture(scope="module")
def log(folder):
    return folder / "collect" / "log" / "0" / "dataset"


@pytest.fixture(scope="module")
def classifier(folder):
    return folder / "success" / "states" / "0" / "checkpoint"


@pytest.fixture(scope="module")
def base(folder):
    return folder / "train" / "reach_planar" / "0" / "checkpoint"


def test_a_classifier_of_states_learns_and_describes_itself(folder, log, classifier, capsys):
    figures = result(folder, "success", "states")["classifier"]
    positives = figures["frames"]["false_rejects"]["total"]
    share = positives / (positives + figures["frames"]["false_accepts"]["total"])
    assert figures["frames"]["brier"] < 0.6 * share * (1 - share)  # what the share alone would give
    assert figures["false_accepts"]["rate"] <= 0.2 and figures["frames"]["false_accepts"]["rate"] < 0.02
    loaded = load_classifier(classifier)
    assert loaded.trained_on["labels"] == "frames" and loaded.trained_on["world"] == "reach_planar"
    assert sorted(path.suffix for path in classifier.iterdir()) == [".json", ".safetensors"]
    page = (folder / "success" / "states" / "0" / "report.html").read_text()
    for title in ("Error rates", "Reliability", "Scores along episodes"):
        assert title in page
    assert run(folder, "success", log, *QUICK, "run.name=states") == 0
    assert "already trained" in capsys.readouterr().out


def test_the_world_reports_a_classifiers_success_beside_its_own(folder, base, classifier, capsys):
    with_it = f"world.success={classifier}"
    assert run(folder, "evaluate", base, *EVALUATION, with_it, "run.name=classified") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "success is decided by the classifier" in printed and "simulator's own success" in printed
    metrics = result(folder, "evaluate", "classified")["policy"]["deterministic"]
    assert metrics["classifier"]["checkpoint"] == str(classifier)
    assert metrics["classifier"]["own"]["total"] == 16 and len(metrics["per_episode"]["own_success"]) == 16
    assert "Success by a classifier" in (folder / "evaluate" / "classified" / "0" / "report.html").read_text()
    assert run(folder, "evaluate", base, *EVALUATION, with_it, "workers.count=2", "run.name=workers") == 0
    again = result(folder, "evaluate", "workers")["policy"]["deterministic"]
    assert again["per_episode"] == metrics["per_episode"] and again["classifier"] == metrics["classifier"]


def test_it_is_the_reward_of_learning(folder, base, classifier, log, capsys):
    reward = (f"world.success={classifier}", "world.success_reward=true", "run.threads=1")
    small = ("finetune.iterations=1", "finetune.num_envs=8", "finetune.rollout_length=6", "finetune.minibatch=32",
             "finetune.evaluate_every=1", "finetune.evaluate_episodes=8", "finetune.critic_width=16",
             "finetune.videos=0")  # fmt: skip
    assert run(folder, "finetune", f"finetune.policy={base}", *reward, *small, "run.name=ppo") == 0
    assert "classifier" in result(folder, "finetune", "ppo")["tuned"]["deterministic"]
    small = ("online.steps=200", "online.warmup=50", "online.num_envs=4", "online.batch_size=8",
             "online.pretrain_steps=5", "online.evaluate_episodes=8", "online.evaluate_at=[0]",
             "online.agent.width=8", "online.agent.depth=1",
             "online.agent.critics=3")  # fmt: skip
    assert run(folder, "online", f"online.policy={base}", *reward, *small, "run.name=online") == 0
    assert "classifier" in result(folder, "online", "online")["tuned"]["deterministic"]
    small = ("offline.rounds=1", "offline.critic.steps=20", "offline.evaluate_episodes=8", "gate.evaluators=[fqe]",
             "gate.steps=20", "gate.num_states=8", "offline.reward=success")  # fmt: skip
    capsys.readouterr()
    settings = (log, f"offline.policy={base}", "world.name=reach_planar", f"world.success={classifier}")
    assert run(folder, "offline", *settings, *small, "run.name=offline") == 0
    assert "are successful by the classifier" in " ".join(capsys.readouterr().out.split())


def test_a_copy_of_the_data_has_the_classifiers_success(folder, log, classifier, tmp_path, capsys):
    copy = tmp_path / "copy"
    assert run(folder, "success", log, f"success.classifier={classifier}", f"success.relabelled={copy}") == 0
    assert "successful by the classifier" in " ".join(capsys.readouterr().out.split())
    before, after = read_dataset(log), read_dataset(copy)
    assert torch.equal(before.actions, after.actions) and after.success is not None and before.success is not None
    assert after.success.any() and (after.success & ~before.success).double().mean() < 0.1
    assert run(folder, "success", copy, f"success.classifier={classifier}", "run.name=examined") == 0
    figures = result(folder, "success", "examined")["classifier"]
    assert figures["false_accepts"]["count"] == figures["false_rejects"]["count"] == 0
    assert run(folder, "success", log, f"success.relabelled={copy}") == 2
    assert "success.classifier=PATH" in capsys.readouterr().err


def test_labels_of_episodes_columns_and_files(folder, log, tmp_path, capsys):
    assert run(folder, "success", log, *QUICK, "success.labels=episodes", "success.success_frames=1",
               "success.calibration=isotonic", "run.name=episodes") == 0  # fmt: skip
    assert result(folder, "success", "episodes")["classifier"]["calibration"] == "isotonic"
    success = read_dataset(log).success
    assert success is not None
    lines = [f"{episode},{int(flag)}" for episode, flag in enumerate(success)]
    (tmp_path / "labels.csv").write_text("\n".join(["episode,success", *lines]) + "\n")
    labels = f"success.labels={tmp_path / 'labels.csv'}"
    settings = ("success.success_frames=1", "success.calibration=isotonic")
    assert run(folder, "success", log, *QUICK, labels, *settings, "run.name=file") == 0
    first, second = (result(folder, "success", name)["classifier"] for name in ("episodes", "file"))
    assert first["frames"] == second["frames"]
    capsys.readouterr()
    assert run(folder, "success", log, *QUICK, "success.labels=next.reward", "run.name=reward") == 2
    assert "success labels are 1 (success), 0 (none) or NaN" in capsys.readouterr().err
    assert run(folder, "success", log, *QUICK, "success.labels=next.done", "run.name=done") == 2
    assert run(folder, "success", log, *QUICK, "success.labels=next.succes", "run.name=typo") == 2
    assert "next.success" in capsys.readouterr().err


def test_data_without_failures_is_refused_with_the_way_out(folder, log, capsys):
    good = ("collect.noise=[none]", "collect.episodes=12", "run.name=good")
    assert run(folder, "collect", "world=reach_planar", ON, *good) == 0
    good = folder / "collect" / "good" / "0" / "dataset"
    assert run(folder, "success", good, *QUICK, "run.name=nofail") == 2
    error = capsys.readouterr().err
    assert "no failed one" in error and "success.extra_datasets=[DATASET]" in error
    assert run(folder, "success", good, *QUICK, f"success.extra_datasets=[{log}]", "run.name=nofail") == 0
    assert run(folder, "success", good, *QUICK, f"success.negatives=[{log}]", "run.name=negatives") == 0


def test_a_stranger_s_kind_by_import_path(folder, log, base, capsys):
    pytest.importorskip("outside_robotics", reason="install it with: pip install -e tests/outside")
    kind = "success.kind=outside_robotics.classifier:LinearClassifier"
    assert run(folder, "success", log, *QUICK, kind, "success.config.squares=false", "run.name=linear") == 0
    checkpoint = folder / "success" / "linear" / "0" / "checkpoint"
    assert run(folder, "evaluate", base, *EVALUATION, f"world.success={checkpoint}", "run.name=linear") == 0


def test_the_bakeoff_refuses_a_liar_and_keeps_an_honest_classifier(folder, base, tmp_path, capsys):
    worse = []
    for name, steps in (("worse", 5), ("other", 60)):
        assert run(folder, "train", "world=reach_planar", f"train.data={folder / 'collect/log/0/dataset'}",
                   "policy.width=32", "policy.depth=1", "policy.sampling_steps=2", f"train.fit.steps={steps}",
                   "train.evaluate_episodes=0", "run.threads=1", f"run.name={name}") == 0  # fmt: skip
        worse.append(folder / "train" / name / "0" / "checkpoint")
    policies = f"bakeoff.policies=[{','.join(map(str, (base, *worse)))}]"
    small = ("bakeoff.episodes=24", "gate.num_states=24", "world.batch_size=24", "gate.evaluators=[world]")
    liar, honest = saved_oracle(tmp_path / "liar", lie=-2.0), saved_oracle(tmp_path / "honest")
    for name, path in (("liar", liar), ("honest", honest)):
        plugins = "run.plugins=[oracle]"
        assert (
            run(
                folder,
                "bakeoff",
                policies,
                "world=reach_planar",
                *small,
                f"world.success={path}",
                plugins,
                f"run.name={name}",
            )
            == 0
        )
        printed = " ".join(capsys.readouterr().out.split())
        assert "True performance is the simulator's own success" in printed
        refused = result(folder, "bakeoff", name)["refused"]
        assert bool(refused) == (name == "liar") == ("is refused: the success classifier" in printed)
    assert result(folder, "bakeoff", "liar")["best"] is None


def test_a_classifier_of_two_cameras_acts_where_the_policy_reads_none(folder, base, capsys):
    cameras = ("world=arm_reach", "world.cameras=[front,wrist]", "world.image_size=24", ON)
    assert run(folder, "collect", *cameras, "collect.noise=[low,random]", "collect.episodes=24", "run.name=images") == 0
    data = folder / "collect" / "images" / "0" / "dataset"
    small = ("success.fit.steps=20", "success.batch_size=16", "run.threads=1")
    assert run(folder, "success", data, *small, "run.name=images") == 0
    checkpoint = folder / "success" / "images" / "0" / "checkpoint"
    assert set(load_classifier(checkpoint).image_sizes.values()) == {(24, 24)}
    play = ("collect.episodes=4", "collect.noise=[low]", f"world.success={checkpoint}")
    assert run(folder, "collect", "world=arm_reach", *play, "run.name=played") == 0
    assert read_dataset(folder / "collect" / "played" / "0" / "dataset").cameras == ()
    capsys.readouterr()
    assert run(folder, "collect", "world=reach_planar", *play, "run.name=blind") == 2
    assert "success classifier reads the camera" in capsys.readouterr().err
    assert run(folder, "success", data, *small, "success.inputs=[writs]", "run.name=typo") == 2
    assert "Did you mean" in capsys.readouterr().err


@pytest.mark.parametrize("family", ["clip", "dinov2", "siglip"])
def test_frozen_features_of_a_local_vision_model(folder, family, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
            "image_size": 16, "patch_size": 8}  # fmt: skip
    if family == "dinov2":
        model = transformers.Dinov2Model(transformers.Dinov2Config(**size))
    else:
        text = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
                "num_attention_heads": 2, "max_position_embeddings": 8}  # fmt: skip
        classes = {"clip": (transformers.CLIPModel, transformers.CLIPConfig),
                   "siglip": (transformers.SiglipModel, transformers.SiglipConfig)}[family]  # fmt: skip
        model = classes[0](classes[1](text_config=text, vision_config=size))
    model.save_pretrained(tmp_path / family)
    cameras = ("world=push_cube", "world.cameras=[top]", "world.image_size=24", "collect.noise=[low,random]", ON)
    if not (folder / "collect" / "top").exists():
        assert run(folder, "collect", *cameras, "collect.episodes=24", "run.name=top") == 0
    data = folder / "collect" / "top" / "0" / "dataset"
    kind = ("success.kind=features", f"success.config.model={tmp_path / family}", "success.fit.steps=20")
    assert run(folder, "success", data, *kind, "run.threads=1", f"run.name={family}") == 0
    shutil.rmtree(tmp_path / family)  # the checkpoint has all it needs
    classifier = load_classifier(folder / "success" / family / "0" / "checkpoint")
    frames = read_dataset(data).observation
    assert np.isfinite(classifier.logits(frames)).all()
    capsys.readouterr()
    assert run(folder, "success", data, *kind, f"run.name={family}2") == 2
    assert "does not exist" in capsys.readouterr().err
