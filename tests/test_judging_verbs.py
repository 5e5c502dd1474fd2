"""Judging from logs on the command line: chains that are recorded and weighed, scores between anchors, refusals."""

import json
import shutil

import pytest
import torch
from tiny_runs import TINY

from robopolicy.building import behaviours
from robopolicy.building.worlds import build_world
from robopolicy.cli import main
from robopolicy.configuration import compose
from robopolicy.core.errors import ConfigError
from robopolicy.evaluation import success
from robopolicy.policies.configuration import DenoisingPolicyConfig
from robopolicy.policies.denoising import DenoisingPolicy
from robopolicy.verbs import worldmodel

pytestmark = pytest.mark.long

SMALL = [*TINY, "collect.reference_episodes=32", "evaluate.episodes=8", "evaluate.videos=0"]


def run(root, verb, *settings):
    return main([verb, *SMALL, f"run.root={root}", *settings])


def result(root, verb, name):
    return json.loads((root / verb / name / "0" / "result.json").read_text())


def test_logged_chains_judge_and_the_logged_policy_is_no_better_than_itself(root, capsys):
    base = root / "train" / "reach_planar" / "0" / "checkpoint"
    assert run(root, "collect", f"collect.policy={base}", "collect.chains=true", "run.name=chains") == 0
    data = root / "collect" / "chains" / "0" / "dataset"
    own = "gate.evaluators=[importance]", "gate.metric=return", "gate.min_effective_episodes=24", "run.name=own"
    assert run(root, "gate", str(base), str(base), f"gate.data=[{data}]", *own) == 1
    output = " ".join(capsys.readouterr().out.split())
    assert "evaluated by importance sampling of 24 logged episodes: not significantly better" in output
    assert "Effective sample size of 24 recorded episodes: 24, 24." in output
    result_json = result(root, "gate", "own")
    assert (
        result_json["effective_episodes"] == [24.0, 24.0] and result_json["gate"]["judgements"][0]["difference"] == 0.0
    )
    plain = root / "collect" / "reach_planar" / "0" / "dataset"
    assert run(root, "gate", str(base), str(base), f"gate.data=[{plain}]", *own) == 2
    assert "collect.chains=true" in capsys.readouterr().err


def test_returns_are_scored_between_the_anchors_of_the_data(root, capsys):
    base = root / "train" / "reach_planar" / "0" / "checkpoint"
    assert run(root, "collect", "collect.quality=random", "run.name=graded") == 0
    graded, plain = (root / "collect" / name / "0" / "dataset" for name in ("graded", "reach_planar"))
    anchors = json.loads((graded / "meta" / "robopolicy" / "quality.json").read_text())["anchors"]
    zero, hundred = (anchors[name]["return_mean"] for name in ("random", "expert"))
    capsys.readouterr()
    assert run(root, "evaluate", str(base), f"evaluate.reference_dataset={graded}", "run.name=scored") == 0
    assert "policy: deterministic normalised score" in capsys.readouterr().out
    result_json = result(root, "evaluate", "scored")
    for mode in ("deterministic", "stochastic"):
        expected = 100 * (result_json["policy"][mode]["return_mean"] - zero) / (hundred - zero)
        assert result_json["normalised"]["policy"][mode]["score"] == pytest.approx(expected)
    assert (
        run(root, "evaluate", str(base), "world=push_cube", f"evaluate.reference_dataset={graded}", "run.name=other")
        == 2
    )
    assert run(root, "evaluate", str(base), f"evaluate.reference_dataset={plain}", "run.name=other") == 2
    assert "records no dataset quality" in " ".join(capsys.readouterr().err.split())
    brief = "offline.critic.steps=5", "offline.improve.steps=2", "offline.improve.observations=8", "offline.rounds=1"
    ungated = *brief, f"offline.policy={base}", "offline.gated=false", "offline.evaluate_episodes=8"
    assert run(root, "offline", str(graded), *ungated, "run.name=graded") == 0
    assert set(result(root, "offline", "graded")["normalised"]) == {"base", "tuned"}
    assert run(root, "offline", str(plain), *ungated, "run.name=plain") == 0
    assert "normalised" not in result(root, "offline", "plain")


def test_a_judge_that_knows_too_little_of_a_policy_is_left_out_of_the_bakeoff(root, capsys):
    base = root / "train" / "reach_planar" / "0" / "checkpoint"
    others = []
    for name in ("one", "two"):
        assert run(root, "train", f"run.name={name}", f"train.data={root}/collect/reach_planar/0/dataset") == 0
        others.append(root / "train" / name / "0" / "checkpoint")
    assert run(root, "collect", f"collect.policy={base}", "collect.chains=true", "run.name=chains") == 0
    data = root / "collect" / "chains" / "0" / "dataset"
    policies = ",".join(map(str, (base, *others)))
    judges = "gate.evaluators=[importance,critic]", f"gate.data=[{data}]", "gate.steps=10", "gate.width=16"
    asked = (
        f"bakeoff.policies=[{policies}]",
        "bakeoff.episodes=4",
        "gate.num_states=8",
        "gate.min_effective_episodes=25",
    )
    assert run(root, "bakeoff", *asked, *judges) == 0
    output = capsys.readouterr().out
    assert "importance sampling of 24 logged episodes is not applicable: The effective sample size of 24 " in output
    assert "recorded episodes is 24.0, below 25" in output
    result_json = result(root, "bakeoff", "reach_planar")
    assert len(result_json["refused"]) == 1 and len(result_json["judges"]) == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["offline", "gate.data=[somewhere]"], "offline does not use gate.data: evaluators use a fraction"),
        (["offline", "gate.candidate=here"], "offline does not use gate.candidate"),
        (["offline", "gate.incumbent=here"], "the policy to improve is offline.policy=CHECKPOINT"),
        (["offline", "gate.evaluators=[model,importance]"], "works only in robopolicy gate and bakeoff"),
        (["collect", "collect.chains=true"], "set collect.policy=CHECKPOINT"),
        (
            ["collect", "collect.chains=true", "collect.policy=a", "plan.model=b"],
            "planning (plan.model) does not provide",
        ),
        (["gate", "a", "b", "gate.min_effective_episodes=0"], "at least 1"),
    ],
)
def test_mistakes_end_with_a_sentence_and_status_2(arguments, text, capsys, tmp_path):
    assert main([*arguments, f"run.root={tmp_path}"]) == 2
    assert text in " ".join(capsys.readouterr().err.split())


def test_a_criterion_that_a_model_cannot_apply_is_refused_before_it_is_trained(root, monkeypatch, capsys):
    def refuse(section, model):
        raise ConfigError(f"No state is read off {type(model).__name__}.")

    trained = []
    monkeypatch.setattr(worldmodel, "fit_stages", lambda *given: trained.append(given))
    monkeypatch.setattr(behaviours, "state_criterion", refuse)
    named = "run.name=criterion", "run.inputs=reach_planar"
    assert run(root, "worldmodel", *named, "world.imagination.success=state") == 2
    assert "No state is read off EnsembleModel." in capsys.readouterr().err and not trained


def test_a_policy_that_reads_several_frames_is_recorded_for_a_model(root, monkeypatch):
    settings = *TINY, f"run.root={root}", "world.batch_size=4", "worldmodel.noise=[none]", "worldmodel.transitions=2000"
    config = compose([*settings, "worldmodel.policies=[looks_back]"])
    world = build_world(config.world)
    sizes = DenoisingPolicyConfig(chunk=2, prediction_steps=2, sampling_steps=2, width=8, depth=1, history=3)
    fields, action = world.spec.observation, world.spec.action
    policy = DenoisingPolicy(sizes, fields, action, fps=world.spec.fps, instructions=world.spec.instructions)
    monkeypatch.setattr(worldmodel, "load_policy", lambda *given: policy)
    episodes, recorded = worldmodel.gather(config, world, torch.Generator())
    assert episodes.step_count >= 2000 and len(recorded) == 2
    assert min(each.episodes.step_count for each in recorded) > 0
    world.close()


def test_a_verb_that_runs_again_says_what_it_replaces(root, capsys):
    base = root / "train" / "reach_planar" / "0" / "checkpoint"
    shared = [f"evaluate.policy={base}", "run.name=twice"]
    assert run(root, "evaluate", *shared) == 0 and run(root, "evaluate", *shared) == 0
    assert "replaces" not in capsys.readouterr().out  # the same settings: the same result
    assert run(root, "evaluate", *shared, "evaluate.episodes=4") == 0
    assert "contains a run with other settings, which this run replaces; run.name=NAME keeps both" in " ".join(
        capsys.readouterr().out.split()
    )


def test_what_ends_half_way_leaves_nothing_of_other_settings(root, monkeypatch):
    """Else a page would show one policy's settings beside another's figures and films."""
    base, place = root / "train" / "reach_planar" / "0" / "checkpoint", root / "evaluate" / "half" / "0"
    shared = [f"evaluate.policy={base}", "run.name=half"]
    assert run(root, "evaluate", *shared) == 0
    (place / "policy.mp4").write_bytes(b"a film")
    assert run(root, "evaluate", *shared) == 0 and (place / "policy.mp4").exists(), "the same settings: the same film"
    monkeypatch.setattr("robopolicy.verbs.evaluate.evaluate_both_modes", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(root, "evaluate", *shared, "evaluate.episodes=4")
    assert not any((place / name).exists() for name in ("result.json", "report.html", "report.json", "policy.mp4"))


def test_an_evaluation_that_is_broken_off_goes_on_and_ends_where_an_unbroken_one_does(root, monkeypatch, capsys):
    base = root / "train" / "reach_planar" / "0" / "checkpoint"
    shared = [f"evaluate.policy={base}", "world.batch_size=3"]  # 8 episodes: three waves in each mode
    played, play = [], success.play_episode_batch

    def mortal(*given, **told):
        played.append(told["deterministic"])
        if len(played) == 5:
            raise KeyboardInterrupt
        return play(*given, **told)

    def outcomes(name):
        result_json = result(root, "evaluate", name)["policy"]
        return [
            (result_json[mode]["per_episode"], result_json[mode]["steps"]) for mode in ("deterministic", "stochastic")
        ]

    def broken_off(name, *settings):
        played.clear()
        monkeypatch.setattr(success, "play_episode_batch", mortal)
        assert run(root, "evaluate", *shared, f"run.name={name}", *settings) == 130
        monkeypatch.setattr(
            success, "play_episode_batch", lambda *given, **told: played.append(0) or play(*given, **told)
        )
        played.clear()
        capsys.readouterr()

    assert run(root, "evaluate", *shared, "run.name=whole") == 0
    broken_off("broken")
    place = root / "evaluate" / "broken" / "0"
    with (place / "waves.jsonl").open("a") as file:
        file.write('{"key": "policy, stoch')  # a process that was killed as it wrote
    assert run(root, "evaluate", *shared, "run.name=broken") == 0
    assert len(played) == 2 and "Resuming: 11 episodes were played" in " ".join(capsys.readouterr().out.split())
    assert outcomes("broken") == outcomes("whole") and not (place / "waves.jsonl").exists()
    assert run(root, "evaluate", *shared, "run.name=broken") == 0 and len(played) == 2 + 6, "what is whole begins anew"

    broken_off("anew")
    assert run(root, "evaluate", *shared, "run.name=anew", "run.overwrite=true") == 0 and len(played) == 6
    other = root / "other"
    shutil.copytree(base, other)
    broken_off("other", f"evaluate.policy={other}")
    (other / "note").write_text("it is not the checkpoint that was judged")
    assert run(root, "evaluate", *shared, "run.name=other", f"evaluate.policy={other}") == 0 and len(played) == 6
