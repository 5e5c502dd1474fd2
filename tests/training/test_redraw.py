"""Dynamic sampling: groups that all end alike are replaced by others, until enough have both outcomes."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from seeing_toys import SeeingWorld, token_policy

from robopolicy.core.errors import ConfigError
from robopolicy.core.run import RunFolder
from robopolicy.core.segments import Segments
from robopolicy.rl.algorithm import build_algorithm
from robopolicy.training.collection import make_collector
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.finetune import finetune

CONFIG = FinetuneConfig(
    algorithm="dapo", allocator="redraw", iterations=2, groups=4, group_size=2, epochs=1, minibatch=64,
    evaluate_every=0, learning_rate=1e-3,
)  # fmt: skip


class Graded(SeeingWorld):
    """By its initial state an episode always succeeds, never, or in every other row."""

    mixed = 0.06

    def step(self, actions):
        result = super().step(actions)
        kind = self.context[:, 0]
        every_other = np.arange(self.batch_size) % 2 == 0
        success = np.where(np.abs(kind) < self.mixed, every_other, kind > 0)
        return replace(result, success=result.terminated & success)


def collected(world, config: FinetuneConfig, batches: int = 2):
    policy = token_policy(world)
    policy.prepare_finetuning()
    draws = torch.Generator().manual_seed(0)
    collector = make_collector(world, policy, build_algorithm(config), config, 0, draws)
    return [collector.collect(number) for number in range(batches)]


def rates_of(rollouts) -> torch.Tensor:
    return Segments.of(rollouts.group).mean(rollouts.row_success.double())


@pytest.mark.checks("allocator/redraw", "DAPO")
@pytest.mark.parametrize("starts", [0, 50])
def test_as_many_groups_have_both_outcomes_as_are_learned_from(starts: int):
    batches = collected(Graded(8), replace(CONFIG, num_initial_states=starts))
    for rollouts in batches:
        rates = rates_of(rollouts)
        assert int(((rates > 0) & (rates < 1)).sum()) == 4
        assert rollouts.group.unique(return_counts=True)[1].tolist() == [2] * len(rates)
        first = rollouts.observation["observation.state"][:, 0, 0]
        for group in rollouts.group.unique():
            members = first[rollouts.group == group]
            assert torch.equal(members[0], members[1]), "of one initial state"
    assert sum(len(rates_of(rollouts)) for rollouts in batches) > 8, "others were replaced"
    assert not set(batches[0].group.tolist()) & set(batches[1].group.tolist())
    again = collected(Graded(8), replace(CONFIG, num_initial_states=starts))
    assert all(torch.equal(one.actions, other.actions) for one, other in zip(batches, again, strict=True))
    plain = collected(Graded(8), replace(CONFIG, num_initial_states=starts, allocator="uniform"), 1)[0]
    assert torch.equal(plain.actions, batches[0].actions[:8]), "the first draw is the usual one"


@pytest.mark.checks("allocator/redraw", "DAPO")
def test_it_gives_up_after_some_rounds():
    world = Graded(8)
    world.mixed = 0.0
    rollouts = collected(world, replace(CONFIG, options={"redraw": {"rounds": 3}}), 1)[0]
    assert len(rates_of(rollouts)) == 4 * 4 and bool(((rates_of(rollouts) == 0) | (rates_of(rollouts) == 1)).all())


def test_every_round_draws_its_own_hints():
    drawn = []

    class Hint:
        def depth(self, starts, rates, context, draws):
            drawn.append(draws.random(len(starts)))
            return drawn[-1]

    world = Graded(8)
    world.mixed = 0.0
    config = replace(CONFIG, options={"redraw": {"rounds": 2}})
    policy = token_policy(world)
    policy.prepare_finetuning()
    collector = make_collector(world, policy, build_algorithm(config), config, 0, torch.Generator().manual_seed(0))
    collector.hint = Hint()
    collector.demonstrations = SimpleNamespace(state=lambda start, depth: (None, depth))
    hints = collector.collect(0).extras["hint"][:, 0]
    assert len(drawn) == 3 and np.unique(drawn).size == 12
    np.testing.assert_allclose(hints[::2].numpy(), np.concatenate(drawn), rtol=1e-6)


@pytest.mark.checks("allocator/redraw", "DAPO")
def test_a_run_learns_from_full_batches_of_them(tmp_path):
    policy, run = token_policy(Graded(8)), RunFolder(tmp_path)
    policy.prepare_finetuning()
    finetune(policy, None, Graded(8), CONFIG, run)
    records = run.metrics()[1:]
    assert [record["signal"] for record in records] == [1, 1]
    assert sum(record["episodes"] for record in records) > 16
    with pytest.raises(ConfigError, match="set shards=1"):
        finetune(policy, None, Graded(8), replace(CONFIG, shards=2))
