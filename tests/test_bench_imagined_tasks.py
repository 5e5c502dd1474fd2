"""The benchmark of imaginary rollouts: what is joined, read and told; and all of it, much smaller."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from robopolicy.benchmarks import imagined_tasks
from robopolicy.benchmarks.imagined_tasks import ReadsWords, Words, fulfils, in_a_row, judged, other_texts
from robopolicy.cli import main
from robopolicy.core.episodes import Episodes
from robopolicy.core.spec import ENVIRONMENT_STATE, STATE, TASK, Field
from robopolicy.rl.offline.interface import Interface
from sims.registry import load_task

TINY = [
    "collect.episodes=40",
    "policy.width=16",
    "policy.text_features=8",
    "train.fit.steps=20",
    "train.evaluate_episodes=0",
    "worldmodel.fit.steps=20",
    "worldmodel.validation_episodes=4",
    "worldmodel.validation_steps=50",
]


def episodes(lengths, offset, task):
    steps, frames = sum(lengths), sum(lengths) + len(lengths)
    return Episodes(
        {STATE: Field((1,))},
        Field((1,)),
        10.0,
        {STATE: offset + torch.arange(frames, dtype=torch.float32)[:, None]},
        offset + torch.arange(steps, dtype=torch.float32)[:, None],
        torch.tensor(lengths),
        tuple(task for _ in lengths),
        step_success=torch.ones(steps, dtype=torch.bool),
        terminated=torch.ones(len(lengths), dtype=torch.bool),
    )


@pytest.mark.checks("ImagineBench")
def test_what_was_imagined_one_after_the_other_is_one_episode():
    joined = in_a_row(episodes([2, 1], 0, "a"), episodes([1, 2], 100, "b"))
    assert joined.lengths.tolist() == [3, 3] and joined.tasks == ("a, then b",) * 2
    assert joined.actions[:, 0].tolist() == [0, 1, 100, 2, 101, 102]
    # The last frame of the first part is the first of the second.
    assert joined.observation[STATE][:, 0].tolist() == [0, 1, 100, 101, 3, 102, 103, 104]
    assert joined.step_success.tolist() == [False, False, True, False, True, True]


@pytest.mark.checks("ImagineBench")
def test_an_episode_is_judged_by_the_order_of_what_it_did():
    """The drawer opens and shuts again: of the two orders one was followed."""
    task = load_task("tidy")
    opening = task.observation[ENVIRONMENT_STATE].names.index("drawer_opening")
    scene = torch.zeros(4, 69)
    scene[:, opening] = torch.tensor([0.07, 0.12, 0.07, 0.0])
    whole = Episodes(
        task.observation,
        task.action,
        10.0,
        {STATE: torch.zeros(4, 19), ENVIRONMENT_STATE: scene},
        torch.zeros(3, 4),
        torch.tensor([3]),
        ("open the drawer, then close the drawer",),
    )
    assert fulfils(task, whole, 0)
    assert not fulfils(task, replace(whole, tasks=("close the drawer, then open the drawer",)), 0)


def test_words_are_read_by_part_and_unknown_ones_ignored():
    words = Words(["open the drawer", "open the box, then close it"])
    read = words({TASK: ["open the drawer", "close it", "close it, then open the window"]})
    names = sorted(words.words, key=words.words.__getitem__)
    parts = read.reshape(3, 2, -1)
    marked = [[{names[place] for place in part.nonzero()[:, 0]} for part in row] for row in parts]
    assert marked == [[{"open", "the", "drawer"}, set()], [{"close", "it"}, set()], [{"close", "it"}, {"open", "the"}]]


class Still:
    """An agent that ignores its state."""

    def act(self, state, generator=None):
        return torch.zeros(len(state), 4)


@pytest.mark.checks("ImagineBench")
def test_a_policy_that_ignores_words_does_no_better_with_its_own_instruction(monkeypatch):
    """The rephrased tier has a control: told of another task, such a policy scores what it scored before."""
    task = load_task("tidy")
    monkeypatch.setattr(imagined_tasks, "EPISODES", 9)
    words = Words(task.instructions)
    interface = Interface(task.observation, task.action, features=words, feature_size=words.size)
    told = other_texts()
    meaning = {text: own for own, others in task.paraphrases.items() for text in others}
    assert len(told) == 27 and all(meaning[own] != meaning[other] for own, other in told.items())
    own, wrong = (judged(ReadsWords(Still(), interface, texts), "rephrase", 0) for texts in ({}, told))
    assert own == wrong and own["success_rate"] < 0.2


class Told:
    def __init__(self):
        self.read = []

    def act(self, state, generator=None):
        self.read.append(state)
        return torch.zeros(len(state), 4)


def test_a_controller_reads_what_it_is_told(monkeypatch):
    words = Words(["open the drawer", "shut the drawer"])
    interface = Interface({STATE: Field((1,))}, Field((4,), low=-1, high=1), features=words, feature_size=words.size)
    agent = Told()
    observation = {STATE: np.zeros((1, 1, 1)), TASK: np.array(["open the drawer"])}
    for told in ({}, {"open the drawer": "shut the drawer"}):
        ReadsWords(agent, interface, told).act(observation)
    first, second = (read[0, 1:] for read in agent.read)
    assert torch.equal(first, words({TASK: ["open the drawer"]})[0])
    assert torch.equal(second, words({TASK: ["shut the drawer"]})[0])


@pytest.mark.slow
def test_every_agent_learns_from_each_kind_of_data(tmp_path, monkeypatch):
    monkeypatch.setattr(imagined_tasks, "NOVEL", 12)
    monkeypatch.setattr(imagined_tasks, "EPISODES", 6)
    monkeypatch.setattr(imagined_tasks.learned, "__defaults__", (3,))
    overrides = ",".join(f"'{each}'" for each in TINY)
    asked = ["bench", "imagined_tasks", "bench.seeds=[3]", f"bench.overrides=[{overrides}]"]
    assert main([*asked, "run.threads=1", f"run.root={tmp_path}", f"json={tmp_path}/out.json"]) == 0
    figures = json.loads((tmp_path / "out.json").read_text())
    assert set(figures["agents"]) == set(imagined_tasks.AGENT_KINDS)
    rates = figures["agents"]["cql"]["3"]
    assert set(rates) == {"real", "imaginary", "bound"} and set(rates["real"]) == {"rephrase", "easy", "hard", "wrong"}
    table, kept = imagined_tasks.tables(figures)
    assert len(table.lines) == 15 and [line[0] for line in kept.lines] == ["rephrase", "easy", "hard"]
