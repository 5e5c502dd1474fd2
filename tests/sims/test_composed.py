"""Two instructions in a row: by hand from two flags, in the world, and followed by the expert."""

from dataclasses import replace

import numpy as np
import pytest

from robopolicy.core.errors import ConfigError
from robopolicy.core.spec import TASK
from robopolicy.testing.world import check_world
from sims.composed import in_order
from sims.instructions import instruction_set
from sims.registry import load_task, make_expert, make_world
from sims.tasks.tidy import COMPOSITIONS, HELD_OUT, INSTRUCTIONS


def flags(text: str) -> np.ndarray:
    return np.array([[letter == "1" for letter in text]])


@pytest.mark.checks("ImagineBench")
@pytest.mark.parametrize(
    ("first", "second", "at"),
    [
        ("0100", "0010", 2),  # A, then B
        ("0100", "0100", None),  # both at once
        ("0010", "0100", None),  # B, then A
        ("0011", "0111", None),  # B before A, and it stays: not done after A
        ("00100", "01001", 4),  # B before A, undone and done again
        ("01000", "00011", 3),  # A need not stay
        ("1000", "0010", None),  # A in the frame before: counts only if it was reached in an earlier chunk
        ("0000", "0010", None),
    ],
)
def test_a_then_b_by_hand(first, second, at):
    success, reached = in_order(flags(first), flags(second), np.zeros(1, dtype=bool))
    assert np.flatnonzero(success[0]).tolist() == ([] if at is None else [at - 1])
    assert np.array_equal(reached[0], np.logical_or.accumulate(flags(first)[0, 1:]))
    later, _ = in_order(flags("0000"), flags("0010"), np.ones(1, dtype=bool))
    assert np.flatnonzero(later[0]).tolist() == [1]


@pytest.mark.checks("ImagineBench")
def test_the_tiers_share_no_instruction():
    task = load_task("tidy")
    tiers = {
        "training": instruction_set(task),
        "rephrase": instruction_set(task, phrasing="paraphrased"),
        "easy": instruction_set(task, "held_out"),
        "hard": instruction_set(task, "composed"),
    }
    texts = [text for tier in tiers.values() for text in tier.texts]
    assert len(set(texts)) == len(texts)
    meanings = {name: {INSTRUCTIONS[goal] for goal in tier.goals} for name, tier in tiers.items()}
    assert meanings["rephrase"] == meanings["training"] == set(INSTRUCTIONS) - set(HELD_OUT)
    assert meanings["easy"] == set(HELD_OUT)
    # The parts of what is composed are trained; no pair is.
    assert {text for pair in COMPOSITIONS for text in pair} <= meanings["training"]


def test_the_expert_does_both_in_order_whatever_the_chunks_are():
    world = make_world("tidy", 24, instructions="composed")
    expert = make_expert("tidy", world.spec)
    assert world.spec.horizon == 140
    observation = world.reset(seeds=np.arange(24))
    task, texts = world.task, observation[TASK]
    assert len(set(texts)) == len(COMPOSITIONS)
    frames, actions, rewards = [], [], 0.0
    while True:
        frames.append({key: observation[key][:, -1].astype(float) for key in task.observation})
        actions.append(expert.act(observation))
        step = world.step(actions[-1][:, None])
        observation, rewards = step.observation, rewards + step.reward[:, 0]
        if step.ended.all():
            break
    assert step.success.mean() >= 0.9
    first = np.array([text.split(", then ")[0] for text in texts])
    met = np.array([task.succeeded({**frame, TASK: first}) for frame in frames])
    assert met[:, step.success].any(axis=0).all()
    # The same actions in chunks: the same rewards and outcomes.
    world.reset(seeds=np.arange(24))
    total, moves = 0.0, np.stack(actions, axis=1)
    for begin in range(0, moves.shape[1], 5):
        chunk = world.step(moves[:, begin : begin + 5])
        total = total + chunk.reward.sum(axis=1)
    np.testing.assert_allclose(total, rewards, atol=1e-9)
    np.testing.assert_array_equal(chunk.success, step.success)
    world.close()


def test_such_a_world_keeps_every_promise():
    check_world(lambda rows: make_world("tidy", rows, instructions="composed", horizon=6), renders=False)


def test_what_a_task_does_not_compose_is_refused():
    with pytest.raises(ConfigError, match="has no compositions"):
        make_world("push_choice", 1, instructions="composed")
    with pytest.raises(ConfigError, match="no paraphrases of compositions"):
        make_world("tidy", 1, instructions="composed", phrasing="all")
    task = replace(load_task("tidy"), compositions=(("sing", "dance"),))
    with pytest.raises(ConfigError, match="sing"):
        instruction_set(task)
