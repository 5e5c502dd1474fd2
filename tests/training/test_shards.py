"""Sharded collection: results depend on the shards, and not on who plays them, in which order."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from bandit_toys import FIELDS, ChainPolicy, mean_reward
from shard_toys import SavedWorld, ShuffledPool, UnevenWorld

from robopolicy.core.errors import ConfigError, RobopolicyWarning
from robopolicy.core.rollouts import Rollouts
from robopolicy.core.run import RunFolder
from robopolicy.core.structured import to_plain
from robopolicy.core.tensors import bytes_of, to_arrays, to_tensors
from robopolicy.rl.algorithm import build_algorithm
from robopolicy.rl.critic import state_critic
from robopolicy.training.collection import ShardWorkers, make_collector
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.finetune import finetune

STREAMS = FinetuneConfig(rollout_length=3, shards=4, discount=0.9, iterations=6, epochs=1, minibatch=64,
                         checkpoint_every=3, evaluate_every=3)  # fmt: skip
GROUPS = FinetuneConfig(algorithm="grpo", coefficient="decoupled_ppo", groups=6, group_size=3, shards=4, epochs=1,
                        minibatch=128, iterations=6, checkpoint_every=3, evaluate_every=3)  # fmt: skip
OVER = replace(GROUPS, overprovision=0.5)
CASES = {"streams": STREAMS, "groups": GROUPS, "over-provisioned": OVER}


def workers_of(config: FinetuneConfig, pool, kind: str = "saved", **more) -> ShardWorkers:
    job = {"world": kind, "rows": 8, "config": to_plain(config), **more}
    return ShardWorkers(pool, "shard_toys:play_shard", job)


def collected(config: FinetuneConfig, workers=None, world=None, count: int = 4) -> list[Rollouts]:
    policy, draws = ChainPolicy(), torch.Generator().manual_seed(0)
    algorithm = build_algorithm(config)
    collector = make_collector(
        world or SavedWorld(8), policy, algorithm, config, 3, draws, images="not", workers=workers
    )
    batches = []
    for number in range(count):
        batches.append(collector.collect(number))
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(0.01)
    return batches


def same(first, second) -> bool:
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    return torch.equal(first, second) if isinstance(first, torch.Tensor) else first == second


@pytest.mark.parametrize("config", CASES.values(), ids=CASES.keys())
def test_rollouts_do_not_depend_on_who_plays(config):
    here = collected(config)
    for count, seed in ((2, 2), (4, 3)):
        there = collected(config, workers_of(config, ShuffledPool(count, seed)))
        assert all(same(one.tree(), other.tree()) for one, other in zip(here, there, strict=True))


def test_streams_continue_where_they_were_and_rows_are_distinct():
    batches = collected(STREAMS)
    assert all(batch.shape == (32, 3) for batch in batches)
    for batch in batches:
        assert batch.episode.tolist() == batch.group.tolist() == list(range(32))
    actions = torch.cat([batch.latents["chain"].flatten(1) for batch in batches])
    assert len(torch.unique(actions, dim=0)) == len(actions), "shards and batches draw their own numbers"
    running = ~batches[0].ended[:, -1]
    assert bool(running.any())
    after, before = batches[1].observation["observation.state"], batches[0].next_observation["observation.state"]
    assert torch.equal(after[running, 0], before[running, -1])


def test_groups_stay_in_their_shard_and_come_back_once():
    batches = collected(OVER, count=8)
    returned = Counter()
    for batch in batches:
        sizes = Counter(batch.group.tolist())
        assert len(sizes) == 6 and set(sizes.values()) == {3}
        returned.update(sizes)
    assert max(returned.values()) == 3
    assert any(int((batch.policy_version[batch.alive] < number).sum()) for number, batch in enumerate(batches))


def test_branches_stay_with_their_parents():
    config = replace(GROUPS, branch_at=(1,), branch_width=2, group_size=2)
    for batch in collected(config, count=2):
        children = (batch.parent >= 0).nonzero().squeeze(1)
        assert len(children)
        assert torch.equal(batch.group[children], batch.group[batch.parent[children]])


@pytest.mark.long
@pytest.mark.parametrize("config", CASES.values(), ids=CASES.keys())
def test_runs_end_alike_on_workers_and_after_an_interruption(config, tmp_path: Path):
    def run(name: str, iterations: int = 6, workers=None) -> dict[str, bytes]:
        torch.manual_seed(0)
        critic = state_critic(FIELDS, 1, width=8)
        section = replace(config, iterations=iterations)
        options = {"evaluate": mean_reward, "seed": 4, "workers": workers}
        finetune(ChainPolicy(), critic, SavedWorld(8), section, RunFolder(tmp_path / name), **options)
        folder = tmp_path / name
        return {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*.safetensors")}

    expected = run("here")
    assert run("there", workers=workers_of(config, ShuffledPool(3, 5))) == expected
    run("stopped", 3, workers_of(config, ShuffledPool(2, 6)))
    assert run("stopped") == expected
    records = RunFolder(tmp_path / "there").metrics()[1:]
    assert all(record["bytes_sent"] > 0 and record["bytes_received"] > 0 for record in records)
    assert all("shards_restarted" not in record for record in records)


def test_a_world_that_cannot_be_saved_says_what_starts_again(tmp_path: Path):
    config = replace(STREAMS, evaluate_every=0)
    with pytest.warns(RobopolicyWarning, match=r"rollout_length=24"):
        finetune(ChainPolicy(), state_critic(FIELDS, 1, width=8), UnevenWorld(8), config, RunFolder(tmp_path))
    assert [each.get("shards_restarted", 0) for each in RunFolder(tmp_path).metrics()[1:]] == [0, 4, 4, 0, 4, 4]
    with pytest.warns(RobopolicyWarning, match="cannot be saved"):
        here = collected(STREAMS, world=UnevenWorld(8))
    with pytest.warns(RobopolicyWarning, match="cannot be saved"):
        there = collected(STREAMS, workers_of(STREAMS, ShuffledPool(2), "uneven"))
    assert all(same(one.tree(), other.tree()) for one, other in zip(here, there, strict=True))
    with pytest.warns(RobopolicyWarning, match="cannot be saved"):
        over = collected(OVER, world=UnevenWorld(8), count=8)
    assert all(len(set(batch.group.tolist())) == 6 for batch in over)


def test_held_groups_of_another_number_of_shards_are_dropped(tmp_path: Path):
    run = RunFolder(tmp_path)
    finetune(ChainPolicy(), None, SavedWorld(8), replace(OVER, iterations=3, evaluate_every=0), run)
    with pytest.warns(RobopolicyWarning, match="unfinished groups"):
        other = replace(OVER, iterations=5, evaluate_every=0, shards=2)
        assert finetune(ChainPolicy(), None, SavedWorld(16), other, run).iterations == 5


def test_impossible_shards_are_refused():
    with pytest.raises(ConfigError, match="shards=0"):
        replace(STREAMS, shards=0)
    with pytest.raises(ConfigError, match=r"finetune\.groups"):
        collected(replace(GROUPS, groups=3))


def test_a_policys_props_and_delay_work_on_shards():
    for changes in ({"props_parts": 2}, {"policy_lag": 2}):
        config = replace(STREAMS, **changes)
        policy = ChainPolicy()
        finetune(policy, state_critic(FIELDS, 1, width=8), SavedWorld(8), replace(config, evaluate_every=0))


def test_trees_cross_as_arrays():
    tree = {"a": torch.ones(2, dtype=torch.bfloat16), "b": {"c": torch.arange(3)}, "d": [1, "text"], "e": None}
    arrays = to_arrays(tree)
    assert isinstance(arrays["b"]["c"], np.ndarray) and bytes_of(arrays) == 2 * 2 + 3 * 8
    arrays["b"]["c"].flags.writeable = False
    assert same(to_tensors(arrays), tree)
