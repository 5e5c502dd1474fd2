"""Every coefficient is the gradient of its textbook loss, by autograd in fp64."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_rollouts import make_rollouts, make_scored
from torch import Tensor

from robopolicy.core.errors import ConfigError
from robopolicy.rl import coefficients
from robopolicy.rl.context import Scored
from robopolicy.rl.experimental import coefficients as experimental_coefficients
from robopolicy.rl.objective import policy_loss

Loss = Callable[[Tensor, Tensor, Tensor, Scored], Tensor]
"""(logp, old, advantage, scored) -> textbook loss of each unit [B, T, K]."""


def clipped(ratio: Tensor, advantage: Tensor, low: Tensor | float, high: Tensor | float) -> Tensor:
    return -torch.min(
        ratio * advantage, torch.minimum(torch.maximum(ratio, torch.as_tensor(low)), torch.as_tensor(high)) * advantage
    )


def decoupled(logp, old, advantage, scored):
    return scored.staleness.exp().clamp(max=5.0) * clipped((logp - old).exp(), advantage, 0.8, 1.2)


def cispo(logp, old, advantage, scored):
    return -(logp - old).exp().clamp(0.0, 1.28).detach() * advantage * logp


def one_side(logp, old, advantage, scored):
    ratio = (logp - old).exp()
    kept = torch.where(advantage >= 0, ratio <= 1.2, ratio >= 0.8)
    return -kept.double() * ratio * advantage


def two_side_plain(logp, old, advantage, scored):
    ratio = (logp - old).exp()
    return -((ratio <= 1.2) & (ratio >= 0.8)).double() * advantage * logp


def opmd(logp, old, advantage, scored):
    return (-advantage * logp + 0.5 * 0.7 * (logp - old).square()) / 1.7


def asym(logp, old, advantage, scored):
    return -(advantage + 0.1) * logp


def dcpo(logp, old, advantage, scored):
    q = old.exp()
    low = 0.5 + 0.5 * (1 - 4 * 0.16 / q).clamp(min=0).sqrt()
    ratio = (logp - old).exp()
    loss = clipped(ratio, advantage, low, (0.5 + 0.5 * (1 + 4 * 0.2 / q).sqrt()).clamp(max=10))
    return torch.where(advantage < 0, torch.minimum(loss, -10 * advantage), loss)


def min_pro(logp, old, advantage, scored):
    log_ratio = torch.where(scored.mask, logp - scored.rollouts.logp_behaviour, 0.0).detach()  # to who played
    weight = torch.zeros_like(log_ratio).flatten(1)
    flat = log_ratio.flatten(1)
    for row in range(len(flat)):
        before: list[float] = []
        for place in range(flat.shape[1]):
            weight[row, place] = min(5.0, float((flat[row, place] + min(before, default=0.0)).exp()))
            before.append(float(flat[row, place]))
    return -weight.reshape(logp.shape) * advantage * logp


def mirror(logp, old, advantage, scored):
    ratio = (logp - old).exp()
    return -ratio * advantage + (ratio * (logp - old) - ratio + 1) / 0.55


def awr(logp, old, advantage, scored):
    return -advantage.div(0.5).exp().clamp(max=10.0) * logp


def positive_part(logp, old, advantage, scored):
    return -advantage.clamp(0, 3) * logp


CASES: dict[str, tuple[Callable, dict, Loss]] = {
    "decoupled": (coefficients.decoupled_ppo, {}, decoupled),
    "cispo": (experimental_coefficients.cispo, {}, cispo),
    "rec one side": (experimental_coefficients.rec, {}, one_side),
    "rec two sides": (experimental_coefficients.rec, {"region": "two_side", "importance": False}, two_side_plain),
    "mdpo": (experimental_coefficients.mdpo, {"start": 0.55, "end": 0.55}, mirror),
    "awr": (experimental_coefficients.advantage_weighted, {"temperature": 0.5}, awr),
    "clipped advantage": (
        experimental_coefficients.clipped_advantage,
        {"form": "positive", "limit": 3.0},
        positive_part,
    ),
    "opmd": (experimental_coefficients.opmd, {"tau": 0.7}, opmd),
    "asym_re": (experimental_coefficients.asym_re, {}, asym),
    "dcpo": (experimental_coefficients.dcpo, {}, dcpo),
    "min_pro": (experimental_coefficients.min_pro, {}, min_pro),
}


@pytest.mark.checks(
    "coefficient/decoupled_ppo",
    "coefficient/cispo",
    "coefficient/rec",
    "coefficient/mdpo",
    "coefficient/awr",
    "coefficient/clipped_advantage",
    "coefficient/opmd",
    "coefficient/asym_re",
    "coefficient/dcpo",
    "coefficient/min_pro",
)
@pytest.mark.parametrize("name", CASES)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), lengths=st.lists(st.integers(1, 4), min_size=2, max_size=5))
def test_coefficients_are_gradients(name: str, seed: int, lengths: list[int]):
    function, options, textbook = CASES[name]
    draws = torch.Generator().manual_seed(seed)
    rollouts = make_rollouts(lengths, [0] * len(lengths), seed=seed)
    old = -rollouts.logp_behaviour.abs() - 0.05
    stale = old - 0.3 * torch.rand(old.shape, generator=draws, dtype=torch.float64)
    rollouts = replace(rollouts, logp_behaviour=stale, logp_proximal=old)
    noise, advantage = (torch.randn(old.shape, generator=draws, dtype=torch.float64) for _ in range(2))
    advantage = torch.where(rollouts.mask, advantage, 0.0)
    logp = (old + 0.3 * noise).requires_grad_()
    scored = make_scored(rollouts, logp, advantage)

    loss = torch.where(scored.mask, textbook(logp, old, advantage, scored), 0.0).sum()
    (expected,) = torch.autograd.grad(loss, logp)
    c, _ = function(scored, **options)
    (gradient,) = torch.autograd.grad(policy_loss(logp, c, scored.mask.double()), logp)
    torch.testing.assert_close(gradient, expected, atol=1e-10, rtol=1e-10)


@pytest.mark.checks("coefficient/bapo")
def test_bapo_widens_until_good_decisions_are_half():
    rollouts = make_rollouts([1] * 8, [0] * 8, steps=1)
    ratio = torch.tensor([1.0, 1.5, 3.0, 0.65, 0.7, 0.75, 1.0, 1.1], dtype=torch.float64)[:, None, None]
    advantage = torch.tensor([1.0, 1.0, 1.0, -1, -1, -1, -1, -1], dtype=torch.float64)[:, None, None]
    scored = make_scored(rollouts, rollouts.logp_behaviour + ratio.log(), advantage)
    c, stats = coefficients.bapo(scored)
    assert float(stats["positive_share"]) >= 0.5
    assert float(stats["bapo_low"]) == pytest.approx(0.9)
    assert float(stats["bapo_high"]) == pytest.approx(2.3)  # 1 + 1.5 + 2.3 of the good against 3 * 0.9 + 2.1
    assert float(c[1, 0, 0]) == pytest.approx(1.5)  # beyond PPO's 1.2, inside the widened bound
    assert float(c[3, 0, 0]) == 0.0
    balanced, stats = coefficients.bapo(replace(scored, advantage=torch.where(advantage > 0, -0.5, 1.0).double()))
    assert float(stats["bapo_low"]) == pytest.approx(0.6)
    assert float(stats["bapo_high"]) == pytest.approx(1.2)
    assert float(balanced[3, 0, 0]) == pytest.approx(0.65)


@pytest.mark.checks("coefficient/grpo_guard")
def test_the_guarded_ratio_stays_at_one_where_the_plain_one_drifts():
    draws = torch.Generator().manual_seed(0)
    std = torch.tensor([0.05, 0.1, 0.2], dtype=torch.float64)[:, None, None]  # a noise for each of three steps
    old = torch.randn(20_000, 1, 3, 2, 3, generator=draws, dtype=torch.float64)
    new = old + 0.75 * std * torch.randn(old.shape, generator=draws, dtype=torch.float64)
    value = old + std * torch.randn(old.shape, generator=draws, dtype=torch.float64)
    density = torch.distributions.Normal
    log_ratio = (density(new, std).log_prob(value) - density(old, std).log_prob(value)).mean((3, 4))
    shift = ((new - old).square() / (2 * std**2)).mean((3, 4))
    guarded = coefficients.guarded_log_ratio(log_ratio, shift, std.flatten().expand_as(shift))
    assert bool((log_ratio.exp().mean(0) < 0.85).all())
    torch.testing.assert_close(guarded.mean(0), torch.zeros(1, 3, dtype=torch.float64), atol=2e-3, rtol=0)
    torch.testing.assert_close(guarded.exp().mean(0), torch.ones(1, 3, dtype=torch.float64), atol=5e-3, rtol=0)


def test_an_unknown_region_is_named():
    rollouts = make_rollouts([1, 1], [0, 0])
    scored = make_scored(rollouts, rollouts.logp_behaviour, torch.zeros_like(rollouts.logp_behaviour))
    with pytest.raises(ConfigError, match=r"one_sided.*one_side"):
        experimental_coefficients.rec(scored, region="one_sided")
