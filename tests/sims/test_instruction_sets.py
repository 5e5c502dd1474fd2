"""Which instructions a world gives and in which words: drawn from the seed, judged by what they mean, for any task."""

from dataclasses import replace

import numpy as np
import pytest

from robopolicy.core.errors import ConfigError
from robopolicy.core.spec import TASK, WorldSpec
from robopolicy.testing.world import check_world
from sims.engine import MujocoWorld
from sims.instructions import WithPlainInstructions, instruction_set
from sims.registry import load_task
from sims.tasks.push_choice import INSTRUCTIONS

OTHERS = {text: (text.replace("push", "shove"), text.replace("push", "bring")) for text in INSTRUCTIONS}


@pytest.fixture
def task():
    """Somebody's task, which draws its instruction itself, with paraphrases and one instruction held out."""
    return replace(load_task("push_choice"), paraphrases=OTHERS, held_out=INSTRUCTIONS[3:])


def drawn(task, rows=400, **options):
    world = MujocoWorld(task, rows, **options)
    texts = world.reset(seeds=np.arange(rows))[TASK]
    world.close()
    return texts


def test_training_gives_what_is_not_held_out_evenly_and_all_gives_everything(task):
    texts = drawn(task)
    assert min((texts == text).sum() for text in INSTRUCTIONS[:3]) > 100 and not (texts == INSTRUCTIONS[3]).any()
    assert set(drawn(task, instructions="held_out")) == {INSTRUCTIONS[3]}
    everything = drawn(task, instructions="all")
    assert np.array_equal(everything, drawn(replace(task, held_out=())))
    kept = everything != INSTRUCTIONS[3]
    assert np.array_equal(texts[kept], everything[kept])  # what the task drew stays, where it may


def test_a_pattern_gives_the_instructions_that_it_matches(task):
    assert set(drawn(task, instructions="push the red*")) == set(INSTRUCTIONS[:2])
    assert set(drawn(task, instructions=INSTRUCTIONS[3])) == {INSTRUCTIONS[3]}, "one that is held out, too"
    blue = instruction_set(task, "*blue*", "all")
    assert len(blue.texts) == 6 and {str(text) for text in blue.meant(np.arange(6))} == set(INSTRUCTIONS[2:])


def test_paraphrases_say_the_same_in_every_wording(task):
    plain = drawn(task)
    for phrasing, count in (("paraphrased", 2), ("all", 3)):
        instructions = drawn(task, phrasing=phrasing)
        assert len(set(instructions)) == 3 * count
        assert min((instructions == text).sum() for text in set(instructions)) > 400 / (3 * count) / 2
        meant = [next((key for key, others in OTHERS.items() if text in others), text) for text in instructions]
        assert meant == list(plain)


def test_the_plain_words_may_be_said_more_often_than_others(task):
    texts = drawn(task, phrasing="all", plain_share=0.7)
    places = {text: place for plain, others in OTHERS.items() for place, text in enumerate((plain, *others))}
    shares = np.bincount([places[text] for text in texts]) / len(texts)
    assert shares == pytest.approx([0.7, 0.15, 0.15], abs=0.06)
    assert set(drawn(task, phrasing="all", plain_share=1.0)) == set(INSTRUCTIONS[:3])
    assert not set(drawn(task, phrasing="all", plain_share=0.0)) & set(INSTRUCTIONS)
    with pytest.raises(ConfigError, match=r"plain_share=0.5 is a fraction of episodes, in \[0, 1\], with phrasing=all"):
        MujocoWorld(task, 1, plain_share=0.5)


@pytest.mark.parametrize("options", [{"phrasing": "all"}, {"instructions": "held_out", "phrasing": "paraphrased"}])
def test_such_a_world_keeps_every_promise(task, options):
    check_world(lambda rows: MujocoWorld(task, rows, **options), renders=False)


def test_a_task_that_draws_no_instruction_is_given_one_by_the_world(task):
    silent = replace(task, start=lambda numbers: replace(task.start(numbers), instruction=None), held_out=())
    texts = drawn(silent)
    assert min((texts == text).sum() for text in INSTRUCTIONS) > 70


def test_an_expert_that_knows_the_plain_words_follows_the_others(task):
    world = MujocoWorld(task, 60, phrasing="paraphrased")
    expert = WithPlainInstructions(task.expert(), task.paraphrases)
    observation = world.reset(seeds=np.arange(60))
    expert.reset()
    while True:
        step = world.step(expert.act(observation)[:, None])
        observation = step.observation
        if step.ended.all():
            break
    assert step.success.mean() >= 0.95
    world.close()


def test_the_spec_says_what_texts_mean_and_comes_back_from_json(task):
    world = MujocoWorld(task, 1, phrasing="all")
    assert world.spec.goals == INSTRUCTIONS[:3] and len(world.spec.instructions) == 9
    assert WorldSpec.from_json(world.spec.to_json()) == world.spec
    before = {key: value for key, value in world.spec.to_json().items() if key != "paraphrases"}
    assert WorldSpec.from_json(before).paraphrases == {}
    world.close()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"instructions": "heldout"}, "Did you mean 'held_out'"),
        ({"instructions": "push the green*"}, "or a pattern that matches an instruction"),
        ({"phrasing": "plane"}, "Did you mean 'plain'"),
        ({"instructions": "held_out"}, "has none of these"),
        ({"phrasing": "paraphrased"}, "has no paraphrase of 'push the red cube to the left goal'"),
    ],
)
def test_what_a_task_does_not_have_is_refused(options, text):
    with pytest.raises(ConfigError, match=text):
        MujocoWorld(replace(load_task("push_choice"), paraphrases={}), 1, **options)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"held_out": ("push",)}, "held_out contains 'push', which is not one of its instructions"),
        ({"paraphrases": {"push": ("shove",)}}, "paraphrases contains 'push', which is not one of its instructions"),
        (
            {"paraphrases": {INSTRUCTIONS[0]: ("go",), INSTRUCTIONS[1]: ("go",)}},
            "uses the paraphrase 'go' for two instructions",
        ),
        ({"paraphrases": {INSTRUCTIONS[0]: (INSTRUCTIONS[1],)}}, "for two instructions"),
    ],
)
def test_a_task_whose_texts_are_at_odds_is_refused(task, changes, text):
    with pytest.raises(ConfigError, match=text):
        instruction_set(replace(task, **{"paraphrases": {}, "held_out": (), **changes}))
