"""Credit per unit: masks and modulations by hand; rewards and auxiliary losses."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from made_rollouts import make_rollouts

from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import Scores
from robopolicy.core.spec import STATE
from robopolicy.rl import rewards
from robopolicy.rl.context import Context
from robopolicy.rl.experimental import auxiliaries, credit
from robopolicy.rl.experimental import rewards as experimental_rewards
from robopolicy.rl.weights import step_mean

CONTEXT = Context(torch.Generator(), iteration=5, iterations=10)


def with_entropy(entropy: list, lengths: list[int], group: list[int] | None = None):
    tensor = torch.tensor(entropy)
    return make_rollouts(lengths, group or [0] * len(lengths), steps=tensor.shape[-1]).with_extras(entropy=tensor)


@pytest.mark.checks("credit/top_entropy")
def test_only_the_most_uncertain_units_are_learned_from():
    rollouts = with_entropy([[[0.1, 0.9]], [[0.2, 0.8]], [[0.3, 0.4]]], [1, 1, 1])
    advantages = credit.top_entropy(rollouts, torch.ones(3, 1, 2), CONTEXT, share=0.34)
    assert advantages.flatten().tolist() == [0, 1, 0, 1, 0, 0]


def test_the_share_of_units_kept_grows_along_the_run():
    rollouts = with_entropy([[[1.0]], [[1.0]], [[1.0]], [[1.0]]], [1] * 4)
    advantage = torch.tensor([4.0, -3.0, 2.0, 1.0])[:, None, None]
    early = credit.d3s_steps(rollouts, advantage, replace(CONTEXT, iteration=0), start=0.25)
    late = credit.d3s_steps(rollouts, advantage, replace(CONTEXT, iteration=10), start=0.25)
    assert early.flatten().tolist() == [4, 0, 0, 0]
    assert late.flatten().tolist() == [4, -3, 2, 1]


def test_confident_decisions_weigh_more_and_clear_futures_are_rewarded():
    rollouts = with_entropy([[[0.0], [1.0]], [[1.0], [0.0]]], [2, 2])
    advantages = credit.empg(rollouts, torch.ones(2, 2, 1), CONTEXT, bonus=0.0)
    assert float(advantages[0, 0]) > 0 > float(advantages[0, 1])
    assert float(advantages.sum()) == pytest.approx(0.0, abs=1e-6)
    rewarded = credit.empg(rollouts, torch.zeros(2, 2, 1), CONTEXT, bonus=1.0)
    assert float(rewarded[1, 0]) > float(rewarded[0, 0])


@pytest.mark.checks("credit/gtpo")
def test_shared_beginnings_are_protected_and_wild_episodes_dropped():
    rollouts = with_entropy([[[0.1], [0.1]], [[0.1], [0.1]], [[2.0], [2.0]]], [2, 2, 2])
    rollouts = replace(rollouts, latents={"tokens": torch.tensor([[[3], [1]], [[3], [2]], [[4], [4]]])})
    advantage = torch.tensor([1.0, -1.0, 1.0])[:, None, None].expand(3, 2, 1)
    advantages = credit.gtpo(rollouts, advantage, CONTEXT, penalty=0.0).squeeze(-1)
    assert advantages.tolist() == [[2.0, 1.0], [0.0, -1.0], [0.0, 0.0]]


@pytest.mark.checks("credit/vppo")
def test_units_that_depend_on_the_image_are_kept():
    rollouts = make_rollouts([1, 1], [0, 0], steps=2)
    rollouts = rollouts.with_extras(blackout_divergence=torch.tensor([[[2.0, 0.0]], [[0.5, 0.0]]]))
    advantages = credit.vppo(rollouts, torch.ones(2, 1, 2), CONTEXT, share=0.5, low=0.5)  # one of two a row
    assert advantages.flatten().tolist() == pytest.approx([1.5, 0.0, 0.5, 0.0])


@pytest.mark.checks("credit/seed_grpo")
def test_a_start_with_many_different_ends_gets_smaller_updates():
    rollouts = make_rollouts([1] * 4, [0, 0, 1, 1])
    ends = torch.tensor([0.0, 9.0, 0.0, 0.0])[:, None, None, None].expand(4, 1, 1, 3)
    rollouts = replace(rollouts, next_observation={STATE: ends})
    advantages = credit.seed_grpo(rollouts, torch.ones(4, 1, 2), CONTEXT, alpha=0.5)[:, 0, 0]
    assert advantages.tolist() == pytest.approx([0.5, 0.5, 1.0, 1.0], abs=1e-5)


@pytest.mark.checks("rewards/success_only")
def test_success_alone_is_paid_once():
    rollouts = make_rollouts([3, 2], [0, 0], [2.0, -1.0])
    success = rollouts.success.clone()
    success[0, 1:] = True
    paid = rewards.success_only(replace(rollouts, success=success), CONTEXT)
    assert paid.reward.tolist() == [[0, 1, 0], [0, 0, 0]]
    assert paid.row_return.tolist() == [1, 0]
    priced = {**rollouts.rewards, "uncertainty": torch.full_like(rollouts.valid, -0.5, dtype=torch.float32)}
    paid = rewards.success_only(replace(rollouts, success=success, rewards=priced), CONTEXT)
    assert set(paid.rewards) == {"success", "uncertainty"}


@pytest.mark.checks("rewards/hurry")
def test_only_successes_are_hurried():
    charged = experimental_rewards.hurry(make_rollouts([3, 2], [0, 0], [2.0, -1.0]), CONTEXT, cost=0.1)
    assert charged.row_return.tolist() == pytest.approx([2.0 - 0.6, -1.0])


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_kl_to_the_base_has_its_minimum_at_the_base(estimator):
    base = torch.tensor([[-1.0, -2.0]])
    logp = base.clone().requires_grad_()
    inputs = SimpleNamespace(
        base=SimpleNamespace(log_prob=lambda *_: Scores(base, torch.zeros_like(base))),
        observation={},
        latents={},
        mask=torch.tensor([[True, True]]),
        step_weights=step_mean(torch.tensor([[True, True]])),
        scores=Scores(logp, torch.zeros_like(base)),
    )
    loss = auxiliaries.stay_near_base(inputs, weight=1.0, estimator=estimator)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert logp.grad is not None
    assert not logp.grad.any()
    inputs.scores = Scores(base + 0.5, torch.zeros_like(base))
    assert float(auxiliaries.stay_near_base(inputs, weight=1.0, estimator=estimator)) > 0.1


def test_an_entropy_bonus_pays_for_entropy():
    entropy = torch.tensor([[0.5, 9.0]], requires_grad=True)
    mask = torch.tensor([[True, False]])
    inputs = SimpleNamespace(mask=mask, step_weights=step_mean(mask), scores=Scores(torch.zeros(1, 2), entropy))
    assert float(auxiliaries.entropy_bonus(inputs, weight=0.1).detach()) == pytest.approx(-0.05)
    inputs.scores = Scores(torch.zeros(1, 2), entropy.detach())
    with pytest.raises(ConfigError, match="noise is fixed"):
        auxiliaries.entropy_bonus(inputs)


def test_a_chunk_of_one_step_is_smooth():
    rollouts = make_rollouts([2, 1], [0, 0], [1.0, 0.0])
    single = replace(
        rollouts,
        actions=rollouts.actions[:, :, :1],
        valid=rollouts.valid[:, :, :1],
        rewards={"reward": rollouts.rewards["reward"][:, :, 1:]},
    )
    paid = experimental_rewards.smooth(single, CONTEXT, cost=1.0)
    assert paid.rewards["smooth"].tolist() == [[[0.0], [0.0]], [[0.0], [0.0]]]
