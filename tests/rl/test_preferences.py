"""Preference coefficients are the gradients of their losses; ties and strangers make no pairs."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from made_rollouts import make_rollouts, make_scored
from torch.nn import functional

from robopolicy.core.errors import ConfigError
from robopolicy.rl.algorithm import build_algorithm
from robopolicy.rl.configuration import AlgorithmConfig
from robopolicy.rl.experimental import coefficients as experimental_coefficients
from robopolicy.rl.experimental.coefficients import pacs
from robopolicy.rl.objective import policy_loss
from robopolicy.rl.presets import RatioLevel
from robopolicy.rl.registry import Need
from robopolicy.training.update import Learner

GROUPS, RETURNS = [0, 0, 0, 1, 1, 2], [1.0, 0.0, 0.0, 2.0, 2.0, 5.0]


def scored_at(seed: int):
    rollouts = make_rollouts([2, 3, 1, 2, 2, 1], GROUPS, RETURNS, seed=seed)
    draws = torch.Generator().manual_seed(seed)
    noise = 0.2 * torch.randn(rollouts.logp_behaviour.shape, generator=draws, dtype=torch.float64)
    logp = (rollouts.logp_behaviour + noise).requires_grad_()
    return rollouts, logp, make_scored(rollouts, logp.detach(), torch.zeros_like(logp.detach()))


def sums(rollouts, logp):
    return torch.where(rollouts.mask, logp - rollouts.logp_behaviour, 0.0).sum((1, 2))


def dpo_loss(total):
    pairs = [(0, 1), (0, 2)]
    terms = [-functional.logsigmoid(0.1 * (total[better] - total[worse])) for better, worse in pairs]
    return len(total) * torch.stack(terms).mean()


def sppo_loss(total):
    rate = torch.tensor([1.0, 0.25, 0.25, 0.5, 0.5, 0.5], dtype=torch.float64)
    return (total - (rate - 0.5)).square().sum()


def p3o_loss(total):
    ratio = total.exp()
    gain = [0.5 * (1 + 1) / 2, 0.5 * (-1 + 0) / 2, 0.5 * (-1 + 0) / 2, 0.0, 0.0, 0.0]
    return -sum(
        torch.min(ratio[row] * value, ratio[row].clamp(0.8, 1.2) * value) for row, value in enumerate(gain) if value
    )


@pytest.mark.checks("coefficient/dpo", "coefficient/sppo", "coefficient/p3o")
@pytest.mark.parametrize(
    ("function", "loss"),
    [
        (experimental_coefficients.dpo, dpo_loss),
        (experimental_coefficients.sppo, sppo_loss),
        (experimental_coefficients.p3o, p3o_loss),
    ],
)
@pytest.mark.parametrize("seed", range(5))
def test_gradients(function, loss, seed: int):
    rollouts, logp, scored = scored_at(seed)
    coefficient, _ = function(scored)
    gradient = torch.autograd.grad(policy_loss(logp, coefficient, scored.mask.double()), logp)[0]
    expected = torch.autograd.grad(loss(sums(rollouts, logp)), logp)[0]
    torch.testing.assert_close(gradient, expected, atol=1e-9, rtol=1e-7)


@pytest.mark.checks("coefficient/dpo", "coefficient/sppo", "coefficient/p3o", "coefficient/tpo", "coefficient/pacs")
@pytest.mark.parametrize("level", RatioLevel)
def test_an_episode_s_log_ratio_counts_every_step_once_at_every_level(level: RatioLevel):
    """Two decisions of two steps, each +.1: .4 in an episode, not .8 (decision_sum) or 1.6 (episode_sum)."""
    rollouts = make_rollouts([2, 2], [0, 0], [1.0, 0.0], steps=2)
    moved = rollouts.logp_behaviour + torch.tensor([0.1, 0.0], dtype=torch.float64)[:, None, None]
    scored = make_scored(rollouts, moved, torch.ones_like(moved), level=level, steps_per_action=1)
    alone = make_scored(rollouts, moved, torch.ones_like(moved))
    assert experimental_coefficients.episode_log_ratio(scored).tolist() == pytest.approx([0.4, 0.0])
    assert experimental_coefficients.sppo(scored)[0][:, 0, 0].tolist() == pytest.approx([2 * (0.5 - 0.4), 2 * -0.5])
    for function in (
        experimental_coefficients.dpo,
        experimental_coefficients.sppo,
        experimental_coefficients.p3o,
        pacs,
    ):
        torch.testing.assert_close(function(scored)[0], function(alone)[0])


@pytest.mark.parametrize("level", [level for level in RatioLevel if level.value.endswith("_sum")])
def test_the_divergence_that_ends_an_iteration_counts_every_step_once(level: RatioLevel):
    rollouts = make_rollouts([2, 2], [0, 0], [1.0, 0.0], steps=2)
    moved = rollouts.logp_behaviour + torch.randn(2, 2, 2, generator=torch.Generator().manual_seed(1)).double()

    def diagnosed(level: RatioLevel) -> dict[str, torch.Tensor]:
        scored = make_scored(rollouts, moved, torch.ones_like(moved), level=level, steps_per_action=1)
        learner = SimpleNamespace(algorithm=SimpleNamespace(ratio_level=level), sampling_steps=2, most=2)
        learner._steps = lambda: range(2)
        return Learner._diagnose(learner, scored)  # type: ignore[arg-type]

    for name in ("kl", "effective_sample_size"):
        assert float(diagnosed(level)[name]) == pytest.approx(float(diagnosed(RatioLevel.STEP)[name]))


@pytest.mark.parametrize("coefficient", ["min_pro", "grpo_guard"])
def test_formulas_of_single_steps_refuse_shared_ratios(coefficient: str):
    for level in RatioLevel:
        algorithm = build_algorithm(AlgorithmConfig(coefficient=coefficient, ratio_level=level))
        if level is RatioLevel.STEP:
            algorithm.resolved.check(frozenset(Need))
        else:
            with pytest.raises(
                ConfigError, match=f"coefficient={coefficient} needs a separate ratio for every step.*=step"
            ):
                algorithm.resolved.check(frozenset(Need))


def test_steps_are_cut_where_ratios_are():
    rollouts, logp, _ = scored_at(0)
    scored = replace(make_scored(rollouts, logp.detach() + 9, torch.zeros_like(logp.detach())), limit=3.0)
    assert torch.equal(scored.step_log_ratio, torch.where(scored.mask, 3.0, 0.0).double())


def test_pairs_are_of_one_group_and_unequal():
    _, _, scored = scored_at(0)
    assert experimental_coefficients.preferred(scored).nonzero().tolist() == [[0, 1], [0, 2]]


def test_p3o_does_not_mind_a_constant_added_to_a_start():
    _, _, scored = scored_at(1)
    before, _ = experimental_coefficients.p3o(scored)
    shift = torch.tensor([7.0 if group == 0 else 0.0 for group in GROUPS])
    rewards = {"reward": scored.rollouts.rewards["reward"]}
    last = scored.rollouts.terminated
    rewards["extra"] = torch.zeros_like(rewards["reward"])
    rewards["extra"][..., 0] = torch.where(last, shift[:, None], 0.0)
    from dataclasses import replace

    moved = replace(scored, rollouts=replace(scored.rollouts, rewards=rewards))
    torch.testing.assert_close(experimental_coefficients.p3o(moved)[0], before, atol=1e-6, rtol=1e-5)
