"""A newcomer's own world: a gymnasium environment goes from its name to a fine-tuned policy by configuration alone."""

import json

import pytest

from robopolicy.cli import main
from robopolicy.data.lerobot_reading import read_dataset
from robopolicy.policies import load_policy

pytestmark = pytest.mark.long

pytest.importorskip("gymnasium_robotics")

SMALL = [
    "recipe=fetch_push",
    "world.options.workers=0",
    "collect.episodes=8",
    "policy.width=32",
    "policy.depth=1",
    "policy.sampling_steps=2",
    "train.fit.steps=40",
    "train.evaluate_episodes=4",
    "finetune.iterations=2",
    "finetune.num_envs=4",
    "finetune.rollout_length=13",
    "finetune.minibatch=16",
    "finetune.evaluate_every=2",
    "finetune.evaluate_episodes=4",
    "finetune.critic_width=16",
    "finetune.critic_warmup=1",
    "finetune.videos=0",
]


def test_from_a_name_to_a_fine_tuned_policy(tmp_path):
    folder = {verb: tmp_path / verb / "gymnasium-FetchPush-v4" / "0" for verb in ("collect", "train", "finetune")}
    for verb in folder:
        assert main([verb, *SMALL, f"run.root={tmp_path}"]) == 0, verb

    episodes = read_dataset(folder["collect"] / "dataset")
    assert len(episodes) == 8
    assert episodes.success is not None
    assert episodes.success.float().mean() >= 0.75

    result = json.loads((folder["finetune"] / "result.json").read_text())
    assert result["base_checkpoint"] == str(folder["train"] / "checkpoint")
    for judged in ("base", "tuned"):
        for mode in ("deterministic", "stochastic"):
            assert result[judged][mode]["world"] == "gymnasium:FetchPush-v4"
            assert result[judged][mode]["episodes"] == 4
    assert result["env_steps"] > 0

    base, last = load_policy(folder["finetune"] / "base"), load_policy(folder["finetune"] / "last")
    assert base.spec == last.spec
    changed = [name for name, value in base.state_dict().items() if not value.equal(last.state_dict()[name])]
    assert changed, "fine-tuning left every weight as it was"
