"""Demonstrations as a world: it keeps a world's promises, pays for agreement, and a policy learns in it."""

from pathlib import Path

import numpy as np
import pytest
import torch

from robopolicy.core.errors import ConfigError
from robopolicy.core.spec import STATE, Field
from robopolicy.testing.world import check_world
from sims.recorded import DemonstratedWorld

FIELDS = {STATE: Field((2,))}
ACTION = Field((1,), low=-1.0, high=1.0)
LENGTHS = np.array([5, 8, 6])


def recording():
    frames, actions = [], []
    for number, length in enumerate(LENGTHS):
        time = np.arange(length + 1)
        frames.append(np.stack([np.full(length + 1, number), time], 1).astype(np.float32))
        actions.append(np.sin(number + time[:-1, None]))
    return np.concatenate(frames), np.concatenate(actions)


def make(batch: int = 3, **options) -> DemonstratedWorld:
    frames, actions = recording()
    tasks = ("push", "pull", "push")
    return DemonstratedWorld(FIELDS, ACTION, 10.0, {STATE: frames}, actions, LENGTHS, tasks, batch, **options)


def wanted(observation) -> np.ndarray:
    return np.sin(observation[STATE][:, -1, 0] + observation[STATE][:, -1, 1])[:, None, None]


def test_it_keeps_every_promise_of_a_world():
    check_world(lambda batch: make(batch, history=2, patches=1), renders=False)


def test_agreeing_to_the_end_succeeds_and_is_paid_a_step():
    world = make()
    observation, total = world.reset(seeds=[1, 2, 3]), np.zeros(3)
    for _ in range(8):
        step = world.step(wanted(observation))
        observation, total = step.observation, total + step.reward.sum(1)
    assert step.success.all()
    assert step.terminated.all()
    assert total.tolist() == [LENGTHS[int(number)] for number in observation[STATE][:, -1, 0]]


@pytest.mark.checks("UI-S1")
def test_disagreeing_is_patched_a_few_times_and_then_fails():
    world = make(patches=2)
    world.reset(seeds=[1, 2, 3])
    step = world.step(np.full((3, 3, 1), 1.0) * -np.sign(np.ones((3, 3, 1))))
    off = (step.rewards["agreement"] == 0) & step.valid
    assert (step.terminated == (off.sum(1) > 2)).all()
    assert not step.success.any()


def test_an_instruction_can_be_asked_for():
    observation = make(8).reset(seeds=range(8), options={"task": np.array([1] * 4 + [0] * 4)})
    assert observation["task"].tolist() == ["pull"] * 4 + ["push"] * 4


def test_wrong_options_are_told():
    with pytest.raises(ConfigError, match="tolerance"):
        make(tolerance=0.0)


@pytest.mark.long
def test_a_policy_learns_from_recordings_alone_by_configuration(tmp_path: Path):
    """Collected from the simulator once; then pre-training and semi-online RL see nothing but the dataset."""
    from robopolicy.cli import main
    from robopolicy.core.storage import read_json

    torch.set_num_threads(1)
    shared = ["recipe=push_cube", f"run.root={tmp_path}", "finetune.videos=0", "train.evaluate_episodes=0"]
    assert main(["collect", *shared, "collect.episodes=12"]) == 0
    assert main(["train", *shared, "train.fit.steps=60"]) == 0
    data = tmp_path / "collect" / "push_cube" / "0" / "dataset"
    tuned = [
        "world=demonstrations", f"world.data={data}", f"finetune.policy={tmp_path}/train/push_cube/0/checkpoint",
        "finetune.algorithm=step_grpo", "finetune.iterations=3", "finetune.groups=6", "finetune.group_size=4",
        "finetune.num_envs=16", "finetune.evaluate_episodes=16", "finetune.evaluate_every=3",
        "world.options.patches=100",
        "finetune.target_success=null",
    ]  # fmt: skip
    assert main(["finetune", *shared, *tuned]) == 0
    result = read_json(tmp_path / "finetune" / "demonstrations" / "0" / "result.json")
    assert result["iterations"] == 3
