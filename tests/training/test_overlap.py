"""Learning from groups as they arrive: the gradient is that of all groups at once, by one policy, in any order."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from bandit_toys import ChainPolicy
from shard_toys import SavedWorld, ShuffledPool
from test_shards import workers_of

from robopolicy.core.errors import ConfigError
from robopolicy.core.run import RunFolder
from robopolicy.rl.algorithm import build_algorithm
from robopolicy.training.collection import make_collector
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.finetune import finetune
from robopolicy.training.update import Learner

CONFIG = FinetuneConfig(
    algorithm="grpo", groups=6, group_size=3, shards=4, epochs=1, minibatch=4096, iterations=1, evaluate_every=0,
    checkpoint_every=3, overlap_update=True,
)  # fmt: skip


def learned(monkeypatch, config: FinetuneConfig, workers=None, run=None):
    """Return the gradients of every step that the run takes, and the policy."""
    gradients, plain = [], Learner._descend

    def spy(self, loss, where):
        gradients.append(torch.cat([each.grad.flatten() for each in self.parameters]))
        return plain(self, loss, where)

    monkeypatch.setattr(Learner, "_descend", spy)
    policy = ChainPolicy()
    finetune(policy, None, SavedWorld(8), config, run, seed=4, workers=workers)
    monkeypatch.undo()
    return gradients, policy


@pytest.mark.checks("Periodic-Async")
@pytest.mark.parametrize(
    "changes",
    [{}, {"weight": "step_mean"}, {"advantage": "mc_grpo"}, {"coefficient": "cispo", "rewards": ("smooth",)}],
    ids=["episodes", "steps", "dropped rows", "shaped"],
)
def test_the_gradient_is_that_of_all_groups_at_once_in_any_order(monkeypatch: pytest.MonkeyPatch, changes):
    config = replace(CONFIG, **changes)
    (expected,), _ = learned(monkeypatch, replace(config, overlap_update=False))
    assert expected.abs().max() > 1e-3
    for seed in (1, 2):
        (gradient,), _ = learned(monkeypatch, config, workers_of(config, ShuffledPool(2, seed)))
        torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-5)
    (gradient,), _ = learned(monkeypatch, replace(config, minibatch=5, micro_batch=2))
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-5, msg="in small pieces, too")


@pytest.mark.checks("Periodic-Async")
def test_groups_are_learned_from_while_the_same_version_plays_others(monkeypatch: pytest.MonkeyPatch):
    events, versions, weights = [], [], []
    plain = Learner.accumulate

    class Pool(ShuffledPool):
        def map(self, function, items):
            for index, reply in super().map(function, items):
                events.append(f"play {index}")
                yield index, reply

    def spy(self, rollouts, *rest):
        events.append("learn")
        versions.extend(rollouts.policy_version[rollouts.alive].tolist())
        weights.append(torch.cat([each.detach().flatten().clone() for each in self.parameters]))
        return plain(self, rollouts, *rest)

    monkeypatch.setattr(Learner, "accumulate", spy)
    config = replace(CONFIG, iterations=2)
    finetune(ChainPolicy(), None, SavedWorld(8), config, seed=4, workers=workers_of(config, Pool(2, 3)))
    assert len(events) == 16 and events[1::2] == ["learn"] * 8, "each after its arrival, before the next"
    assert sorted(events[0:8:2]) == [f"play {shard}" for shard in range(4)] != events[0:8:2]
    first, second = np.split(np.array(versions), [versions.index(1)])
    assert (first == 0).all() and (second == 1).all()
    assert all(torch.equal(each, weights[0]) for each in weights[:4]) and not torch.equal(weights[0], weights[4])


@pytest.mark.checks("Periodic-Async")
def test_nothing_is_lost_by_an_interruption_and_later_epochs_follow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    config = replace(CONFIG, iterations=6, epochs=3, num_initial_states=9, minibatch=32)
    steps, expected = learned(monkeypatch, config, run=RunFolder(tmp_path / "whole"))
    learned(monkeypatch, replace(config, iterations=3), run=RunFolder(tmp_path / "stopped"))
    _, resumed = learned(monkeypatch, config, run=RunFolder(tmp_path / "stopped"))
    for one, other in zip(expected.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)
    records = RunFolder(tmp_path / "whole").metrics()[1:]
    assert sum(record["actor_steps"] for record in records) == len(steps) > 6
    assert all(record["policy_loss"] and record["episodes"] == 18 for record in records)
    resumed_records = RunFolder(tmp_path / "stopped").metrics()[1:]
    assert [record["success"] for record in records] == [record["success"] for record in resumed_records]


@pytest.mark.checks("Periodic-Async")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shards": 1}, "set shards=2"),
        ({"staleness": 1}, "set staleness=0"),
        ({"overprovision": 0.5}, "set overprovision=0.0"),
        ({"scored_steps": 1}, "set scored_steps=0"),
        ({"proximal_policy": "average"}, "set proximal_policy=current"),
        ({"advantage": "reinforce_pp"}, "choose one of dr_grpo, grpo, mc_grpo, rloo"),
        ({"selection": ("mixed_outcomes",)}, r"set selection=\[\]"),
        ({"auxiliaries": ("kl_base",)}, r"set auxiliaries=\[\]"),
        ({"coefficient": "clip_cov"}, "choose one of cispo"),
        ({"algorithm": "gspo"}, "whole episodes"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_needs_the_whole_batch_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        finetune(ChainPolicy(), None, SavedWorld(8), replace(CONFIG, **changes))


def test_stored_pairs_do_not_arrive_in_shards():
    config = replace(CONFIG, algorithm="grape", shards=1)
    draws = torch.Generator()
    with pytest.raises(ConfigError, match="set overlap_update=false"):
        make_collector(SavedWorld(8), ChainPolicy(), build_algorithm(config), config, 0, draws, pairs=object())
