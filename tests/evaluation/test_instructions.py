"""Success of every instruction, and the controls of language: one that listens, one that is deaf, one that refuses."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from robopolicy.cli import main
from robopolicy.core.errors import ConfigError, RobopolicyNote, SpecError
from robopolicy.core.policy import Decision
from robopolicy.core.spec import TASK, PolicySpec
from robopolicy.core.world import episode_notes, task_names
from robopolicy.evaluation.instructions import OtherInstruction, controls_of, evaluate_controls
from robopolicy.evaluation.intervals import wilson
from robopolicy.evaluation.report import report_for_run
from robopolicy.evaluation.success import EvaluationResult, evaluate_policy
from robopolicy.evaluation.tables import task_table
from sims.engine import MujocoWorld
from sims.instructions import WithPlainInstructions
from sims.registry import load_task, make_expert, make_world
from sims.tasks.push_choice import INSTRUCTIONS, PushChoiceExpert

OTHERS = {text: (text.replace("push", "shove"), text.replace("push", "bring")) for text in INSTRUCTIONS}
EPISODES = 60


class Told:
    """The scripted expert as a policy. understands: reads paraphrases; deaf: does always the first instruction."""

    def __init__(self, world, understands=True, deaf=False):
        spec = world.spec
        self.spec = PolicySpec(spec.observation, spec.action, 1, 1, 1, 0, spec.fps, spec.instructions)
        self.understands, self.deaf, self.heard = understands, deaf, set()
        self.expert = WithPlainInstructions(PushChoiceExpert(), OTHERS)

    def reset(self, rows=None):
        self.expert.reset(rows)

    def act(self, observation, generator, *, deterministic=False):
        texts = observation[TASK]
        self.heard |= set(texts)
        if not self.understands and not set(texts) <= set(INSTRUCTIONS):
            raise SpecError("The policy was not trained with the word 'shove'.")
        arrays = {key: value.numpy() for key, value in observation.items() if key != TASK}
        arrays[TASK] = np.array([INSTRUCTIONS[0]] * len(texts) if self.deaf else texts)
        return Decision(torch.as_tensor(self.expert.act(arrays), dtype=torch.float32)[:, None])


@pytest.fixture(scope="module")
def world():
    made = MujocoWorld(replace(load_task("push_choice"), paraphrases=OTHERS), EPISODES)
    yield made
    made.close()


def judged(world, **kind):
    """Return the policy's own judgement and its controls."""
    policy, seeds = Told(world, **kind), np.arange(EPISODES)
    right = evaluate_policy(world, policy, seeds)
    play = lambda told, label: evaluate_policy(world, told, seeds, label=label)  # noqa: E731
    return policy, right, evaluate_controls(policy, world.spec, controls_of(world.spec, None), right, play)


def test_one_that_listens_fails_under_another_instruction_and_understands_other_words(world):
    policy, right, controls = judged(world)
    assert right.success_rate >= 0.95 and controls["wrong_instruction"].found.success_rate <= 0.05
    assert np.array_equal(controls["paraphrase"].found.success, right.success)
    assert {text for others in OTHERS.values() for text in others} <= policy.heard
    told = controls["wrong_instruction"].to_json()["difference"]
    assert told["high"] < -0.8 and "points" in controls["wrong_instruction"].text


def test_one_that_is_deaf_does_not_notice(world):
    _, right, controls = judged(world, deaf=True)
    assert 0.1 < right.success_rate < 0.45
    for control in controls.values():
        assert np.array_equal(control.found.success, right.success)
        assert control.to_json()["difference"]["difference"] == 0.0
    each = right.by_instruction()
    assert each[INSTRUCTIONS[0]]["success_rate"] >= 0.95
    assert not any(each[text]["successes"] for text in INSTRUCTIONS[1:])


def test_one_that_does_not_know_the_words_is_said_to_refuse(world):
    _, _, controls = judged(world, understands=False)
    assert controls["paraphrase"].to_json() == {"refused": "The policy was not trained with the word 'shove'."}
    assert (
        controls["paraphrase"].text.startswith("not possible: ")
        and "not possible" not in controls["wrong_instruction"].text
    )


def test_wrong_is_never_what_is_asked_and_reaches_every_other(world):
    wrong = OtherInstruction(Told(world), "wrong", world.spec)
    for text in INSTRUCTIONS:
        for asked_text in (text, *OTHERS[text]):
            told = {wrong._told(asked_text, row) for row in range(6)}
            assert told == set(INSTRUCTIONS) - {text}
    again = OtherInstruction(Told(world), "paraphrase", world.spec)
    assert {again._told(OTHERS[INSTRUCTIONS[0]][0], row) for row in range(3)} == {OTHERS[INSTRUCTIONS[0]][1]}


def test_controls_that_a_world_cannot_have_are_refused(world):
    one = replace(world.spec, instructions=INSTRUCTIONS[:1], paraphrases={})
    assert controls_of(world.spec, None) == ("wrong_instruction", "paraphrase") and controls_of(world.spec, ()) == ()
    assert controls_of(one, None) == () and controls_of(replace(world.spec, paraphrases={}), None) == (
        "wrong_instruction",
    )
    for spec, name, text in (
        (one, "wrong_instruction", "has one instruction"),
        (one, "paraphrase", "has no paraphrase of every instruction"),
        (world.spec, "paraphrases", "Did you mean 'paraphrase'"),
    ):
        with pytest.raises(ConfigError, match=text):
            controls_of(spec, (name,))


def result(**changes):
    """Four episodes of two instructions: one of two, two of two."""
    given = {
        "world": "here",
        "seeds": np.arange(4),
        "success": np.array([True, False, True, True]),
        "returns": np.array([1.0, 0.0, 2.0, 4.0]),
        "lengths": np.full(4, 5),
        "cut": np.zeros(4, dtype=bool),
        "deterministic": True,
        "seconds": 1.0,
        "steps": 20,
        "instructions": ("open", "open", "close", "close"),
    }
    return EvaluationResult(**(given | changes))


def test_figures_of_every_instruction_by_hand():
    figures = result().by_instruction()
    low, high = wilson(1, 2)
    assert figures["open"] == {
        "episodes": 2, "successes": 1, "success_rate": 0.5, "low": low, "high": high, "return_mean": 0.5
    }  # fmt: skip
    assert figures["close"]["success_rate"] == 1.0 and figures["close"]["return_mean"] == 3.0
    assert EvaluationResult.from_json(json.loads(json.dumps(result().to_json()))).by_instruction() == figures
    alone = result(instructions=()).to_json()
    assert "by_instruction" not in alone and "instructions" not in alone["per_episode"]


def test_figures_of_every_task_by_hand_and_in_a_table():
    names = ("10 put the bowl on the plate", "2 open the drawer", "2 open the drawer", "10 put the bowl on the plate")
    figures = result(tasks=names)
    assert list(figures.by_task()) == ["2 open the drawer", "10 put the bowl on the plate"]
    assert [each["successes"] for each in figures.by_task().values()] == [1, 2]
    summary = figures.summary()
    assert "by_instruction" not in summary and summary["by_task"] == figures.by_task()
    again = EvaluationResult.from_json(json.loads(json.dumps(figures.to_json())))
    assert again.by_task() == figures.by_task() and again.instructions == figures.instructions
    assert task_table([("policy", result().summary())]) is None
    header, rows = task_table([("base", summary), ("policy", summary)])
    assert header == ["task", "base", "policy"] and [row[0] for row in rows] == [*figures.by_task(), "all tasks"]
    assert rows[0][1].startswith("50% [") and rows[-1][2].startswith("75% [") and rows[-1][2].endswith("of 4")


def test_a_world_names_its_episodes_tasks_also_behind_a_wrapper():
    class Tasks:
        def task_names(self, seeds):
            return [f"task {seed % 2}" for seed in seeds]

    class Wrapper:
        world = Tasks()

    assert task_names(Wrapper(), np.arange(3)) == ("task 0", "task 1", "task 0")
    assert task_names(Tasks(), np.array([0, 2])) == () and task_names(object(), np.arange(2)) == ()


def test_what_a_rate_over_these_episodes_means_is_noted():
    world = make_world("reach_planar", 1)
    world.episode_notes = lambda seeds: [f"{len(seeds)} episodes are too few"]
    with pytest.warns(RobopolicyNote, match="2 episodes are too few"):
        evaluate_policy(world, make_expert("reach_planar", world.spec), [0, 1])
    assert episode_notes(object(), np.arange(2)) == ()
    world.close()


def test_the_report_tells_instructions_and_controls_apart(tmp_path):
    told = {"wrong_instruction": {**result().summary(), "difference": {"difference": -0.5, "low": -0.9, "high": -0.1}}}
    controls = {"policy": {**told, "paraphrase": {"refused": "not trained with the word 'shove'"}}}
    judged = {"deterministic": result().to_json(), "stochastic": result().to_json()}
    (tmp_path / "result.json").write_text(json.dumps({"policy": judged, "controls": controls}))
    page = report_for_run(tmp_path).read_text()
    for text in (
        "Success by instruction",
        "50% [9%, 91%] of 2",
        "Language conditioning",
        "-50.0 points [-90.0, -10.0]",
        "shove",
    ):
        assert text in page, text


@pytest.mark.long
def test_evaluate_prints_and_keeps_instructions_and_controls(tmp_path, capsys):
    """The whole way through the command line, with a policy that has learned next to nothing."""
    small = ["recipe=tidy", f"run.root={tmp_path}", "collect.episodes=9", "policy.width=16", "policy.word_dropout=0.2"]
    small += ["train.fit.steps=2", "train.batch_size=16", "train.evaluate_episodes=0", "world.batch_size=6"]
    for verb in ("collect", "train"):
        assert main([verb, *small]) == 0
    checkpoint = str(tmp_path / "train" / "tidy" / "0" / "checkpoint")
    capsys.readouterr()
    asked = ["evaluate.episodes=6", "evaluate.videos=0", "world.options.instructions=held_out"]
    assert main(["evaluate", checkpoint, f"run.root={tmp_path}", *asked]) == 0
    output = capsys.readouterr().out
    assert "policy, wrong instruction: 0.0%" in output and "policy, paraphrase: 0.0%" in output
    kept = json.loads(next(tmp_path.glob("evaluate/*/0/result.json")).read_text())
    assert set(kept["controls"]["policy"]) == {"wrong_instruction", "paraphrase"}
    assert set(kept["policy"]["deterministic"]["by_instruction"]) <= set(load_task("tidy").held_out)
    assert "Language conditioning" in next(tmp_path.glob("evaluate/*/0/report.html")).read_text()
    assert main(["evaluate", checkpoint, f"run.root={tmp_path}", *asked, "evaluate.controls=[]"]) == 0
    assert "controls" not in json.loads(next(tmp_path.glob("evaluate/*/0/result.json")).read_text())
    capsys.readouterr()
    slow = ["evaluate.instruction=wrong", "evaluate.latency_steps=1", f"evaluate.base={checkpoint}"]
    assert main(["evaluate", checkpoint, f"run.root={tmp_path}", *asked, *slow]) == 0
    output = capsys.readouterr().out
    assert (
        "Evaluation conditions: instruction another instruction of the world; inference latency 1 control steps"
        in output
    )
    assert "Difference to base: +0.0 points" in output
    page = next(tmp_path.glob("evaluate/*/0/report.html")).read_text()
    assert (
        "Evaluation conditions" in page
        and "Smoothness of the actions" in page
        and "another instruction of the world" in page
    )
    both = ["evaluate.instruction=wrong", "evaluate.controls=[wrong_instruction]"]
    assert main(["evaluate", checkpoint, f"run.root={tmp_path}", *asked, *both]) == 2
    assert "set only one of them" in " ".join(capsys.readouterr().err.split())
    assert main(["evaluate", checkpoint, f"run.root={tmp_path}", *asked, "evaluate.latency_steps=5000"]) == 2
    assert "no action would be executed" in " ".join(capsys.readouterr().err.split())


def test_the_wrong_instruction_is_said_in_words_that_the_world_uses():
    """A world that speaks in paraphrases may have taught its policy no plain word."""
    spec = make_world("tidy", 1, phrasing="paraphrased").spec
    nobody = Told(make_world("push_choice", 1))
    told = OtherInstruction(nobody, "wrong", spec)
    for row, text in enumerate(spec.instructions):
        other = told._told(text, row)
        assert other in spec.instructions and spec.meaning(other) != spec.meaning(text)
    plain = make_world("tidy", 1).spec
    assert OtherInstruction(nobody, "wrong", plain)._told(plain.goals[0], 0) == plain.goals[1]
