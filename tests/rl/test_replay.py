"""Replay: what is kept, how it is judged by now, how old it may be, and that it survives a restart."""

from dataclasses import replace

import pytest
import torch
from made_rollouts import make_rollouts

from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import RECENT
from robopolicy.rl.advantages.group import grpo
from robopolicy.rl.context import Context
from robopolicy.rl.experimental.replay import PartialUpdates, ReMix, SuccessPool
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
@pytest.mark.parametrize(("history", "kept", "gain"), [((0.0, 1.0), 1, 0.5), ((0.0, 0.0, 1.0), 2, 1.0)])
def test_the_median_of_two_groups_lies_between_them(history, kept, gain):
    spear = Spear(warmup=0.0, weight=1.0, share=10.0)
    first = batch([1.0, 0.25], seed=1)
    spear.mix(first.with_extras(advantage=torch.ones_like(first.extras["advantage"])), iteration(1))
    today = batch([1.0, 0.0], seed=2)
    mixed = spear.mix(today, iteration(2, history=history))
    assert len(mixed.group) == 2 + kept  # .25 is no more than usual where usual is .5
    assert float(mixed.extras["advantage"][2, 0, 0]) == pytest.approx(gain / 0.5, rel=1e-4)


@pytest.mark.checks("replay/spear")
@pytest.mark.parametrize("outcome", [0.0, 1.0])
def test_a_past_success_counts_no_more_than_its_return_where_all_outcomes_are_equal(outcome):
    spear = Spear(warmup=0.0, weight=0.5, share=10.0)
    spear.mix(batch([1.0, 0.0], seed=1), iteration(1))
    mixed = spear.mix(batch([outcome, outcome], seed=2), iteration(2, history=(0.25, 0.25)))
    assert float(mixed.extras["advantage"][2, 0, 0]) == pytest.approx(0.5 * 0.75)


@pytest.mark.checks("replay/spear")
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_nearly_equal_dense_returns_are_no_scale(offset):
    spear = Spear(warmup=0.0, weight=0.5, share=10.0)
    spear.mix(batch([offset + 1.0, offset], seed=1), iteration(1))
    mixed = spear.mix(batch([offset, offset + 1e-4], seed=2), iteration(2, history=(offset,)))
    assert float(mixed.extras["advantage"][2, 0, 0]) == pytest.approx(0.5)


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


def of_one_start(returns: list[float], seed: int):
    rollouts = batch(returns, seed)
    return rollouts.with_extras(start=torch.full(rollouts.shape, 3))


@pytest.mark.checks("models/success_pool", "DART-GUI", "DaGRPO")
def test_a_group_without_success_gets_a_stored_one_for_a_failure():
    pool = SuccessPool(None, capacity=2)  # type: ignore[arg-type]
    first = pool.annotate(of_one_start([1.0, 2.0, 0.0, 3.0], seed=1), iteration(1))
    assert first.row_return.tolist() == [1.0, 2.0, 0.0, 3.0] and not first.extras["replayed"].any()
    failed = of_one_start([0.0] * 4, seed=2)
    mixed = pool.annotate(failed, iteration(2))
    assert sorted(mixed.row_return.tolist())[:3] == [0.0] * 3
    assert float(mixed.row_return[-1]) in (2.0, 3.0), "the newest two are kept"
    assert mixed.group.tolist() == [0] * 4 and mixed.policy_version[:, 0].tolist() == [2, 2, 2, 1]
    source = first.row_return.tolist().index(float(mixed.row_return[-1]))
    assert torch.equal(mixed.logp_behaviour[-1], first.logp_behaviour[source]), "as it was chosen then"
    assert torch.equal(mixed.fresh.row_return, torch.zeros(3))
    advantages = grpo(replace(mixed, rewards={"reward": mixed.rewards["reward"].clamp(max=1)}), iteration(2))
    assert advantages[:, 0].tolist() == pytest.approx([-0.577, -0.577, -0.577, 1.732], abs=1e-3)
    other = SuccessPool(None, capacity=2)  # type: ignore[arg-type]
    other.restore(pool.tree())
    again, resumed = (each.annotate(failed, iteration(3)) for each in (pool, other))
    assert torch.equal(again.logp_behaviour, resumed.logp_behaviour)
    solved = of_one_start([0.0, 1.0], seed=4)
    assert torch.equal(pool.annotate(solved, iteration(4)).row_return, solved.row_return), "one success is enough"


def test_a_pool_of_successes_is_refused_where_episodes_branch():
    rollouts = of_one_start([0.0, 0.0], seed=1)
    rollouts.parent[1] = 0
    with pytest.raises(ConfigError, match=r"set branch_at=\[\]"):
        SuccessPool(None).annotate(rollouts, iteration(1))  # type: ignore[arg-type]


@pytest.mark.checks("replay/partial_updates", "ReLIC")
def test_parts_are_learned_from_as_they_come_and_then_all_together():
    replay, parts = PartialUpdates(parts=3), [batch([1.0, float(number)], seed=number) for number in range(6)]
    assert replay.mix(parts[0], iteration(0)) is parts[0] and replay.mix(parts[1], iteration(1)) is parts[1]
    resumed = PartialUpdates(parts=3)
    resumed.restore(replay.tree())
    for each in (replay, resumed):
        whole = each.mix(parts[2], iteration(2))
        assert whole.policy_version[:, 0].tolist() == [2, 2, 0, 0, 1, 1]
        torch.testing.assert_close(whole.extras["advantage"][2:4], parts[0].extras["advantage"])
        assert each.mix(parts[3], iteration(3)) is parts[3]
    alone = PartialUpdates(parts=1)
    assert all(alone.mix(part, iteration(number)) is part for number, part in enumerate(parts))


@pytest.mark.checks("replay/partial_updates", "ReLIC")
def test_a_part_has_gradients_for_its_own_frames_and_a_whole_rollout_for_all():
    """Decisions of two control steps, of which the second decision of row 1 executed one."""
    replay, part = PartialUpdates(parts=2), batch([1.0, 0.0])
    part = replace(part, whole=False, latents={**part.latents, RECENT: torch.full((2, 2), 5)})
    part.valid[1, 0, 1] = False
    assert replay.mix(part, iteration(0)).latents[RECENT].tolist() == [[1, 3], [1, 2]]
    assert replay.mix(part, iteration(1)).latents[RECENT].eq(5).all()
    episodes = replace(part, whole=True)
    assert replay.mix(episodes, iteration(2)) is episodes
    short = replace(part, latents={RECENT: torch.full((2, 2), 2)})
    assert PartialUpdates(parts=2).mix(short, iteration(0)).latents[RECENT].tolist() == [[1, 2], [1, 2]]
