"""Final evaluations of verbs that learn: equal on workers, where the checkpoint is the policy; said where it is not."""

import json

import pytest
from tiny_runs import TINY

from robopolicy.cli import main

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

SHORT = [*TINY, "world.batch_size=8"]
TUNE = [
    "finetune.iterations=2", "finetune.num_envs=8", "finetune.rollout_length=4", "finetune.finetuned_steps=2",
    "finetune.evaluate_episodes=16", "finetune.videos=0",
]  # fmt: skip
VERBS = {
    "train": ["train.evaluate_episodes=16"],
    "finetune": TUNE,
    "distill": ["distill.fit.steps=5", "distill.steps=1", "distill.episodes=4", "distill.evaluate_episodes=16"],
    "teach": [
        "teach.teacher=expert", "teach.rounds=1", "teach.episodes=8", "teach.fit.steps=5", "teach.evaluate_episodes=16",
        "teach.videos=0",
    ],
    "imagine": [*TUNE, "imagine.real_eval_episodes=16"],
}  # fmt: skip


def result_of(root, verb, count):
    base = root / "train" / "reach_planar" / "0" / "checkpoint"
    places = {
        "train": [f"train.data={root / 'collect' / 'reach_planar' / '0' / 'dataset'}"],
        "finetune": [f"finetune.policy={base}"],
        "distill": [f"distill.policy={base}"],
        "imagine": [
            f"finetune.policy={base}",
            f"imagine.model={root / 'worldmodel' / 'reach_planar' / '0' / 'checkpoint'}",
        ],
    }.get(verb, [])
    run = [f"run.root={root}", f"run.name=final{count}", f"workers.count={count}"]
    assert main([verb, *SHORT, *VERBS[verb], *places, *run]) == 0
    text = (root / verb / f"final{count}" / "0" / "result.json").read_text()

    def without(value):
        if isinstance(value, dict):
            return {
                key: without(each)
                for key, each in value.items()
                if not key.startswith("seconds") and key != "times_faster"
            }
        return value

    return without(json.loads(text))


@pytest.mark.parametrize("verb", VERBS)
def test_the_result_does_not_depend_on_workers(root, warm, capsys, verb):
    alone = result_of(root, verb, 1)
    capsys.readouterr()
    assert result_of(root, verb, 2) == alone
    printed = capsys.readouterr().out
    assert "evaluated in this process" not in printed
