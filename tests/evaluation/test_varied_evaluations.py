"""Success and agreement by factor of variation, from the command line: paired, the same on workers, refused early."""

import json
from pathlib import Path

import pytest

from robopolicy.cli import main
from robopolicy.evaluation.report import varied_agreement

TINY = (
    "world=push_cube",
    "run.threads=1",
    "policy.width=32",
    "policy.depth=1",
    "policy.sampling_steps=2",
    "collect.episodes=12",
    "train.fit.steps=20",
    "train.evaluate_episodes=0",
    "evaluate.episodes=6",
    "evaluate.videos=0",
    "world.batch_size=4",
)
VARIATIONS = "evaluate.variations={mass: [0.2, [0.5, 2]], light: 1}"


def result(root: Path, verb: str, name: str):
    return json.loads((root / verb / name / "0" / "result.json").read_text())


@pytest.mark.long
def test_a_policy_is_evaluated_under_one_factor_after_another(tmp_path, capsys):
    root = [f"run.root={tmp_path}", *TINY]
    randomised = "world.options.variation={size: [0.9, 1.1], light: [0, 1]}"
    assert main(["collect", *root, randomised]) == 0
    assert main(["train", *root]) == 0
    checkpoint = str(tmp_path / "train" / "push_cube" / "0" / "checkpoint")
    origin = json.loads((Path(checkpoint) / "config.json").read_text())["world"]
    assert origin["options"]["variation"] == {"size": [0.9, 1.1], "light": [0, 1]}, "collected with it"
    plain = "world.options.variation=null"
    assert main(["evaluate", checkpoint, *root, plain, VARIATIONS, "run.name=here"]) == 0
    said = capsys.readouterr().out
    assert "Success by factor of variation" in said and "only images change with light, and none are read" in said
    assert main(["evaluate", checkpoint, *root, plain, VARIATIONS, "run.name=there", "workers.count=2"]) == 0
    here, there = (result(tmp_path, "evaluate", name)["variations"]["policy"] for name in ("here", "there"))
    assert list(here) == ["none", "mass 0.2", "mass 0.5 to 2", "light 1"]
    for label, figures in here.items():
        assert {**figures, "seconds": 0} == {**there[label], "seconds": 0}
    returns = {label: figures["return_mean"] for label, figures in here.items()}
    assert returns["light 1"] == returns["none"], "a policy of states sees no light"
    assert len({returns[label] for label in ("none", "mass 0.2", "mass 0.5 to 2")}) == 3
    assert {"difference", "low", "high"} <= here["mass 0.2"]["difference"].keys()
    assert "mass 0.5 to 2" in (tmp_path / "evaluate" / "here" / "0" / "report.html").read_text()
    sessions = ["evaluate.sessions=2", "evaluate.variations={mass: [0.2, 0.4]}", "run.name=sessions"]
    assert main(["evaluate", checkpoint, *root, plain, *sessions]) == 0
    served = result(tmp_path, "evaluate", "sessions")["variations"]["policy"]
    assert [label.partition(": mass 0.")[0] for label in served] == ["none", "session 1", "session 2"]
    assert served["none"]["return_mean"] == returns["none"] != [*served.values()][1]["return_mean"]
    assert main(["evaluate", checkpoint, *root, "evaluate.variations=[weight]", "run.name=wrong"]) == 2
    assert "no factor of variation 'weight'" in capsys.readouterr().err
    assert not (tmp_path / "evaluate" / "wrong" / "0" / "waves.jsonl").exists()


@pytest.mark.long
def test_the_agreement_of_a_model_is_reported_by_factor(root, capsys):
    """A model of states sees no light, so it agrees with the simulator as it does without."""
    options = [
        "world=reach_planar",
        f"run.root={root}",
        "run.threads=1",
        "rank.episodes=8",
        "rank.noise=[none,low,random]",
    ]
    assert main(["rank", *options, "rank.variations={light: 1, camera: [0.5]}"]) == 0
    said = capsys.readouterr().out
    assert "Agreement by factor of variation" in said and "only images change with light and camera" in said
    models = result(root, "rank", "reach_planar")["models"]
    (name, figures), *_ = models.items()
    assert list(figures["variations"]) == ["light 1", "camera 0.5"]
    for varied in figures["variations"].values():
        assert varied["statistics"] == figures["statistics"]
    assert [line[0] for line in varied_agreement(models)] == [f"{name}, light 1", f"{name}, camera 0.5"]
    assert main(["rank", *options, "rank.variations=[mass]", "run.name=heavy", "run.inputs=reach_planar"]) == 2
    assert "'reach_planar' cannot vary mass" in capsys.readouterr().err
