"""A run killed with SIGKILL and started again ends byte for byte where an unbroken run ends."""

from pathlib import Path

import torch
from bandit_toys import FIELDS, ChainPolicy, MortalWorld, mean_reward, run_apart

from robopolicy.core.run import RunFolder
from robopolicy.rl.critic import state_critic
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.finetune import finetune


def train(folder: Path, kill_at: int) -> None:
    world = MortalWorld(16, horizon=5)
    world.kill_at = kill_at
    torch.manual_seed(0)
    critic = state_critic(FIELDS, 1, width=8)
    config = FinetuneConfig(
        iterations=7,
        rollout_length=3,
        epochs=2,
        minibatch=32,
        scored_steps=1,
        auxiliaries=("bc",),
        discount=0.9,
        checkpoint_every=2,
        evaluate_every=3,
    )
    finetune(ChainPolicy(), critic, world, config, RunFolder(folder), evaluate=mean_reward, seed=4)


def test_kill_and_resume_end_in_the_same_place(tmp_path: Path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train(whole, kill_at=0)
    assert run_apart(train, broken, kill_at=11) == -9  # in iteration 4, after the checkpoint of iteration 2
    train(broken, kill_at=0)
    files = [path.relative_to(whole) for path in sorted(whole.rglob("*")) if path.is_file()]
    assert files == [path.relative_to(broken) for path in sorted(broken.rglob("*")) if path.is_file()]
    for file in files:
        if file.name != "metrics.jsonl":
            assert (whole / file).read_bytes() == (broken / file).read_bytes(), file
    timeless = [
        [{key: value for key, value in record.items() if not key.startswith("seconds")} for record in records]
        for records in (RunFolder(whole).metrics(), RunFolder(broken).metrics())
    ]
    assert timeless[0] == timeless[1]
    assert [record["iteration"] for record in timeless[0]] == list(range(8))
