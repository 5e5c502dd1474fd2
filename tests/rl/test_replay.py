"""Replay: what is kept, how it is judged by now, how old it may be, and that it survives a restart."""

from dataclasses import replace

import pytest
import torch
from made_rollouts import make_rollouts

from robopolicy.rl.context import Context
from robopolicy.rl.experimental.replay import ReMix
from robopolicy.rl.replay import Spear


def iteration(number: int, history=(0.5,) * 8, of: int = 10) -> Context:
    return Context(torch.Generator().manual_seed(number), iteration=number, iterations=of, history=history)


def batch(returns: list[float], seed: int = 0):
    rollouts = make_rollouts([2] * len(returns), [0] * len(returns), returns, seed=seed)
    advantage = (rollouts.row_return - rollouts.row_return.mean())[:, None, None].expand(rollouts.mask.shape)
    version = torch.full(rollouts.shape, seed)
    return replace(rollouts, policy_version=version).with_extras(advantage=advantage.clone())


@pytest.mark.checks("replay/spear")
def test_good_episodes_come_back_judged_against_the_median_of_recent_groups():
    spear = Spear(warmup=0.0, weight=0.5, share=10.0)
    first = batch([1.0, 0.0, 0.9, 0.1], seed=1)
    assert spear.mix(first, iteration(1)) is first
    today = batch([0.6, 0.2, 0.4, 0.8], seed=2)
    mixed = spear.mix(today, iteration(2))
    assert mixed.row_return.tolist() == [*today.row_return.tolist(), 1.0, torch.tensor(0.9).item()]
    spread = float(today.row_return.std(unbiased=False)) + 1e-6
    advantages = mixed.extras["advantage"][4:, 0, 0]
    torch.testing.assert_close(advantages, 0.5 * (torch.tensor([1.0, 0.9]) - 0.5) / spread)
    assert mixed.group[4:].min() > today.group.max()
    torch.testing.assert_close(mixed.extras["advantage"][:4], today.extras["advantage"])


@pytest.mark.checks("replay/spear")
def test_what_is_no_longer_better_than_most_is_left_out_and_the_weight_grows():
    spear = Spear(warmup=0.5, weight=1.0, share=10.0)
    spear.mix(batch([1.0, 0.0], seed=1), iteration(0))
    assert len(spear.mix(batch([1.0, 1.5], seed=2), iteration(2, history=(1.2,))).group) == 2
    early = spear.mix(batch([1.0, 0.0], seed=3), iteration(1, history=(0.2,), of=100)).extras["advantage"][-1, 0, 0]
    late = spear.mix(batch([1.0, 0.0], seed=4), iteration(90, history=(0.2,), of=100)).extras["advantage"]
    assert 0 < float(early) < 0.05
    assert len(late) == 2  # everything had become too old


def test_the_buffer_is_bounded_and_survives_a_restart():
    spear = Spear(capacity=3, warmup=0.0, share=10.0)
    for number in range(4):
        spear.mix(batch([1.0 + number, 0.0, 0.9, 0.1], seed=number), iteration(number))
    assert sum(len(part.group) for _, part in spear.kept) <= 3
    other = Spear(capacity=3, warmup=0.0, share=10.0)
    other.restore(spear.tree())
    today = batch([0.6, 0.2], seed=9)
    first, second = spear.mix(today, iteration(5)), other.mix(today, iteration(5))
    assert torch.equal(first.logp_behaviour, second.logp_behaviour)
    assert torch.equal(first.extras["advantage"], second.extras["advantage"])


@pytest.mark.checks("replay/remix")
def test_remix_mixes_recent_rows_until_it_goes_on_policy():
    remix = ReMix(keep=2, share=0.5, until=0.6)
    parts = [batch([1.0, 0.0, 2.0, 3.0], seed=number) for number in range(4)]
    assert remix.mix(parts[0], iteration(0)) is parts[0]
    assert len(remix.mix(parts[1], iteration(1)).group) == 6
    mixed = remix.mix(parts[2], iteration(2))
    assert sorted(mixed.policy_version[:, 0].tolist()) == [0, 1, 2, 2, 2, 2]
    assert remix.mix(parts[3], iteration(6)) is parts[3]
