"""What papers and their authors' code compute, by hand, where a mechanism here once computed something else."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from made_rollouts import make_rollouts, make_scored
from scipy import stats

from robopolicy.core.errors import ConfigError, RobopolicyWarning
from robopolicy.core.segments import entropy_level
from robopolicy.core.spec import STATE
from robopolicy.policies.token.decoding import ActionLanguage
from robopolicy.rl import coefficients
from robopolicy.rl.advantages import group
from robopolicy.rl.algorithm import build_algorithm
from robopolicy.rl.configuration import AlgorithmConfig
from robopolicy.rl.context import Context
from robopolicy.rl.experimental import advantages, credit, selection
from robopolicy.rl.experimental import advantages as experimental_advantages
from robopolicy.rl.experimental import coefficients as experimental_coefficients
from robopolicy.rl.experimental.auxiliaries import step_preference_loss
from robopolicy.rl.experimental.initial_states import ReplaySampler
from robopolicy.rl.objective import policy_loss
from robopolicy.rl.registry import Need
from robopolicy.training.configuration import LOG_RATIO_CLAMP

CONTEXT = Context(torch.Generator(), discount=1.0)


def scored_at(ratios: list[float], advantages: list[float]):
    """One decision of one step an episode, with these ratios and advantages."""
    rollouts = make_rollouts([1] * len(ratios), [0] * len(ratios), steps=1)
    log_ratio = torch.tensor(ratios, dtype=torch.float64).log()[:, None, None]
    advantage = torch.tensor(advantages, dtype=torch.float64)[:, None, None]
    return make_scored(rollouts, rollouts.logp_behaviour + log_ratio, advantage)


@pytest.mark.checks("coefficient/rec")
def test_the_ring_of_rec_drops_what_lies_between_near_and_far_astray():
    good = scored_at([0.3, 0.41, 0.7, 0.81, 1.19, 1.3, 4.0], [1.0] * 7)
    kept = experimental_coefficients.rec(good, region="ring", importance=False)[0].flatten()
    assert kept.tolist() == [1, 0, 0, 1, 1, 0, 0]
    bad = scored_at([0.3, 0.79, 0.81, 1.19, 1.5, 2.9, 3.1], [-1.0] * 7)
    kept = experimental_coefficients.rec(bad, region="ring", importance=False)[0].flatten()
    assert kept.tolist() == [0, 0, -1, -1, 0, 0, -1]
    wider = experimental_coefficients.rec(good, region="ring", importance=False, far_low=0.5)[0].flatten()
    assert wider.tolist() == [1, 1, 0, 1, 1, 0, 0]


def far_away(log_ratio: list[float], advantage: list[float]):
    """Steps as the trainer scores them: log-ratios beyond its clamp are cut and marked."""
    scored = scored_at([1.0] * len(log_ratio), advantage)
    exact = torch.tensor(log_ratio, dtype=scored.log_ratio.dtype).reshape(scored.log_ratio.shape)
    limit = LOG_RATIO_CLAMP
    return replace(scored, log_ratio=exact.clamp(-limit, limit), clamped=exact.abs() > limit)


@pytest.mark.checks("coefficient/rec")
def test_without_a_ratio_as_weight_rec_learns_from_steps_however_far_they_moved():
    """By the authors' masks of the ratio, c = A M: both steps went astray, the other two are as far the right way."""
    scored = far_away([-3.5, 3.5, 3.5, -3.5], [1.0, -1.0, 1.0, -1.0])
    for region, expected in (("ring", [1, -1, 0, 0]), ("one_side", [1, -1, 0, 0]), ("none", [1, -1, 1, -1])):
        kept = experimental_coefficients.rec(scored, region=region, importance=False)[0].flatten()
        assert kept.tolist() == expected, region
    weighted = experimental_coefficients.rec(scored, region="none", importance=False, tau=1.0)[0].flatten()
    assert weighted.tolist() == pytest.approx([math.e, -1 / math.e, math.e, -1 / math.e])
    assert experimental_coefficients.rec(scored)[0].tolist() == torch.zeros_like(scored.advantage).tolist()


@pytest.mark.checks("coefficient/mdpo")
def test_mdpo_pulls_back_what_moved_beyond_the_clamp_of_log_ratios():
    """r (A - log r / t) with r cut at e^3: 20.1 (1 - 3 / .5); nothing else bounds a step."""
    scored = far_away([3.5, 2.9], [1.0, 1.0])
    c = experimental_coefficients.mdpo(scored, start=0.5, end=0.5)[0].flatten()
    assert c.tolist() == pytest.approx([math.exp(3) * -5.0, math.exp(2.9) * -4.8], rel=1e-4)


@pytest.mark.checks("coefficient/rec")
def test_rec_weighs_data_by_their_advantage_and_may_hold_the_policy_near_as_opmd_does():
    scored = scored_at([1.0, 1.1], [1.7321, -0.5774])
    plain = experimental_coefficients.rec(scored, importance=False)[0].flatten()
    for tau, weights in ((1.0, [5.6525, 0.5614]), (2.0, [2.3775, 0.7492])):
        weighted = experimental_coefficients.rec(scored, importance=False, tau=tau)[0].flatten()
        assert (weighted / plain).tolist() == pytest.approx(weights, abs=1e-3)
    near = experimental_coefficients.rec(scored, importance=False, proximity=0.5)[0].flatten()
    assert (plain - near).tolist() == pytest.approx([0.0, 0.5 * math.log(1.1)], abs=1e-6)
    opmd = experimental_coefficients.opmd(scored, tau=0.5)[0].flatten()
    assert near.tolist() == pytest.approx((1.5 * opmd).tolist(), abs=1e-6), "no step is masked here"


@pytest.mark.checks("coefficient/min_pro")
def test_the_prefix_of_min_pro_may_exceed_one():
    rollouts = make_rollouts([3, 2], [0, 0], steps=1)
    ratio = torch.tensor([[1.35, 1.35, 1.35], [0.5, 2.0, 9.9]], dtype=torch.float64)[..., None]
    scored = make_scored(rollouts, rollouts.logp_behaviour + ratio.log(), torch.ones_like(ratio))
    weight = experimental_coefficients.min_pro(scored)[0].squeeze(-1)
    expected = torch.tensor([[1.35, 1.35**2, 1.35**2], [0.5, 1.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(weight, expected)


@pytest.mark.checks("coefficient/min_pro")
def test_min_pro_corrects_old_data_also_where_the_proximal_policy_is_the_current_one():
    rollouts = make_rollouts([3], [0], steps=1)
    change = torch.tensor([0.5, 2.0, 1.35], dtype=torch.float64).log()[None, :, None]
    current = rollouts.logp_behaviour + change
    scored = make_scored(replace(rollouts, logp_proximal=current), current, torch.ones_like(current))
    weight = experimental_coefficients.min_pro(scored)[0].flatten()
    assert weight.tolist() == pytest.approx([0.5, 1.0, 0.675]), "to the policy that acted, before the first step too"


@pytest.mark.checks("coefficient/bapo")
def test_bapo_leaves_bounds_alone_where_clipped_values_are_already_in_balance():
    # min(r, 1.2) A sums to 2.4 over the good, max(r, 0.6) |A| to 1.6 over the bad.
    _, stats = coefficients.bapo(scored_at([1.5, 2.0, 0.5, 1.0], [1.0, 1.0, -1.0, -1.0]))
    assert (float(stats["bapo_low"]), float(stats["bapo_high"])) == pytest.approx((0.6, 1.2))
    assert float(stats["positive_share"]) == pytest.approx(0.6)
    # 2.4 against 2.62 at first; the lower bound raises that to 2.92, so the upper one must reach 1.5.
    _, stats = coefficients.bapo(scored_at([1.9, 2.0, 0.5, 1.0, 1.02], [1.0, 1.0, -1.0, -1.0, -1.0]))
    assert (float(stats["bapo_low"]), float(stats["bapo_high"])) == pytest.approx((0.9, 1.5))
    assert float(stats["positive_share"]) == pytest.approx(3.0 / 5.92)


@pytest.mark.checks("coefficient/grpo_guard")
def test_grpo_guard_is_the_gradient_of_its_clipped_surrogate():
    draws = torch.Generator().manual_seed(0)
    rollouts = make_rollouts([1] * 64, [0] * 64, steps=3)
    std = torch.tensor([0.4, 0.2, 0.05], dtype=torch.float64)[:, None, None].expand(64, 1, 3, 2, 1)
    old = torch.randn(64, 1, 3, 2, 1, generator=draws, dtype=torch.float64)
    mean = old + 0.8 * std * torch.randn(old.shape, generator=draws, dtype=torch.float64)
    rollouts = replace(rollouts, latents={"mean": old})
    advantage = torch.randn(64, 1, 3, generator=draws, dtype=torch.float64)
    noise = torch.randn(advantage.shape, generator=draws, dtype=torch.float64)
    logp = (rollouts.logp_behaviour + 0.5 * noise).requires_grad_()
    scored = make_scored(
        rollouts,
        logp,
        advantage,
        (0.05, 0.05),
        extras={"mean": mean, "std": std, "logp_precision": 1 / std.square() / 2},
    )

    shift, spread = coefficients.mean_shift(scored)
    regulated = ((logp - rollouts.logp_behaviour + shift) * spread).exp()
    surrogate = torch.minimum(regulated * advantage, regulated.clamp(0.95, 1.05) * advantage)
    (expected,) = torch.autograd.grad(-surrogate.sum(), logp)
    c, _ = coefficients.grpo_guard(scored)
    (gradient,) = torch.autograd.grad(policy_loss(logp, c, torch.ones_like(logp)), logp)
    torch.testing.assert_close(gradient, expected, atol=1e-12, rtol=1e-12)
    assert 0.1 < float((gradient == 0).double().mean()) < 0.9, "some are clipped, some are not"


@pytest.mark.checks("credit/gtpo")
def test_gtpo_takes_the_penalty_off_before_it_protects():
    entropy = torch.tensor([[[0.2], [0.4]], [[0.1], [0.3]]])
    rollouts = make_rollouts([2, 2], [0, 0], steps=1).with_extras(entropy=entropy)
    rollouts = replace(rollouts, latents={"tokens": torch.tensor([[[3], [1]], [[3], [2]]])})
    advantage = torch.tensor([1.0, -1.0])[:, None, None].expand(2, 2, 1)
    computed_advantages = credit.gtpo(rollouts, advantage, CONTEXT, penalty=0.1)
    good, bad = 1.0 - 0.1 * 0.3, -1.0 - 0.1 * 0.2  # minus the episode's mean entropy
    torch.testing.assert_close(computed_advantages.squeeze(-1), torch.tensor([[2 * good, good], [0.0, bad]]))
    with pytest.warns(RobopolicyWarning, match=r"excludes every episode.*entropy_limit=0\.1"):
        assert not credit.gtpo(rollouts, advantage, CONTEXT, entropy_limit=0.1).any()


@pytest.mark.checks("credit/vppo")
def test_vppo_keeps_the_same_share_of_every_episode():
    rollouts = make_rollouts([2, 1], [0, 0], steps=2)
    divergence = torch.tensor([[[3.0, 2.0], [2.5, 0.0]], [[0.2, 0.1], [0.0, 0.0]]])
    rollouts = rollouts.with_extras(blackout_divergence=divergence)
    advantage = credit.vppo(rollouts, torch.ones(2, 2, 2), CONTEXT, share=0.3, low=1.0)
    # ceil(0.3 * 4) = 2 steps of the episode that looks, ceil(0.3 * 2) = 1 of the one that hardly does.
    assert advantage.tolist() == [[[1, 0], [1, 0]], [[1, 0], [0, 0]]]


@pytest.mark.checks("advantage/hgpo")
def test_hgpo_skips_levels_that_say_nothing():
    rollouts = make_rollouts([2, 2, 2], [0, 0, 0], [1.0, 0.0, 0.0], steps=1)
    keys = torch.tensor([[0, 7], [0, 8], [0, 8]])
    level_advantages = advantages.hgpo(rollouts.with_extras(state_key=keys), CONTEXT, context_length=1)
    first = 2**0.5  # of returns 1, 0, 0: (1 - 1/3) / std, with std = sqrt(2) / 3
    # The second decision of the first episode is alone at both levels; those of the others have equal returns.
    expected = torch.tensor([[first, 0.0], [-first / 2, 0.0], [-first / 2, 0.0]])
    torch.testing.assert_close(level_advantages, expected, atol=1e-4, rtol=0)


@pytest.mark.checks("advantage/risk_po")
def test_risk_po_scores_bundles_against_quantiles_that_it_tracks():
    returns = [1.0, 0.0, 2.0, 0.0, 3.0, 1.0, 4.0]  # groups of 2, 2 and 3; the first two make a bundle of 3 and 0
    rollouts = make_rollouts([1] * 7, [4, 4, 6, 6, 9, 9, 9], returns, steps=1)
    context = replace(CONTEXT, memory={"risk_po": [1.0, 3.0]})
    advantage = experimental_advantages.risk_po(
        rollouts, context, bundle=2, low=0.2, high=0.8, tail=1.5, rate=0.1, scale=False
    )[:, 0]

    def by_hand(score: float) -> float:
        middle = (max(score - 1.0, 0.0) - max(score - 3.0, 0.0) + 1.0 - 3.0) / 0.6
        return (middle - 1.5 * max(1.0 - score, 0.0) / 0.2) / 2.5

    expected = [by_hand(score) for score in (3.0, 0.0, 3.0, 0.0, 3.0, 1.0, 4.0)]
    assert advantage.tolist() == pytest.approx(expected)
    assert expected[0] == expected[6] == 0.0 and expected[1] < expected[5] < 0
    # Sums are 3, 0 | 3, 1, 4: one of five below 1, two below 3.
    assert context.memory["risk_po"] == pytest.approx([1.0 + 0.1 * (0.2 - 0.2), 3.0 + 0.1 * (0.8 - 0.4)])

    scaled = experimental_advantages.risk_po(rollouts, replace(CONTEXT, memory={"risk_po": [1.0, 3.0]}), bundle=2)[:, 0]
    spread = [torch.tensor(sums).std().item() for sums in ((3.0, 0.0), (3.0, 1.0, 4.0))]
    assert scaled.tolist() == pytest.approx(
        [value / spread[number > 3] for number, value in enumerate(expected)], abs=1e-4
    )
    first = replace(CONTEXT, memory={})
    experimental_advantages.risk_po(rollouts, first, bundle=2)
    assert first.memory["risk_po"] == pytest.approx(np.quantile([3, 0, 3, 1, 4], [0.2, 0.8]).tolist())
    # Sums 2 and 1: half of them lie below either quantile, but they are the first batch's own and stay.
    few = make_rollouts([1] * 4, [0, 0, 1, 1], [1.0, 0.0, 1.0, 1.0], steps=1)
    first = replace(CONTEXT, memory={})
    experimental_advantages.risk_po(few, first, bundle=2, high=0.9)
    assert first.memory["risk_po"] == pytest.approx([1.2, 1.9])
    experimental_advantages.risk_po(few, first, bundle=2, high=0.9)
    assert first.memory["risk_po"] == pytest.approx([1.17, 1.94])


def test_risk_po_leaves_out_what_is_beyond_the_smallest_group_of_a_bundle():
    rollouts = make_rollouts([1] * 5, [0, 0, 0, 1, 1], [1.0, 1.0, 9.0, 1.0, 0.0], steps=1)
    advantage = experimental_advantages.risk_po(rollouts, replace(CONTEXT, memory={"risk_po": [5.0, 6.0]}), bundle=2)[
        :, 0
    ]
    assert advantage[2] == 0 and bool((advantage[[0, 1, 3, 4]] < 0).all())


def test_a_bundle_of_equal_sums_has_no_deviation_to_divide_by():
    """Two groups that fail altogether: divided by 1e-6, their advantage would be -400,000 instead of -0.4."""
    rollouts = make_rollouts([1] * 4, [0, 0, 1, 1], [0.0] * 4, steps=1)
    memory = {"risk_po": [0.0, 0.6]}
    scaled, plain = (
        experimental_advantages.risk_po(rollouts, replace(CONTEXT, memory=dict(memory)), bundle=2, scale=scale)[:, 0]
        for scale in (True, False)
    )
    assert scaled.tolist() == plain.tolist() == pytest.approx([-0.4] * 4)


@pytest.mark.checks("advantage/sas")
def test_sas_judges_groups_by_what_came_of_the_same_start_before():
    context = replace(CONTEXT, memory={})

    def visited(returns: list[float], start: int) -> list[float]:
        rollouts = make_rollouts([1] * len(returns), [0] * len(returns), returns, steps=1)
        rollouts = rollouts.with_extras(start=torch.full((len(returns), 1), start))
        return experimental_advantages.sas(rollouts, context)[:, 0].tolist()

    std = 2**-0.5  # of 0 and 1, over n - 1
    assert visited([0.0, 1.0], 7) == pytest.approx([-0.5 / std, 0.5 / std])
    # All alike: the group says nothing, the start's past does. Pooled: mean (0.5 + 1) / 2, variance as in the formula.
    pooled = ((1 * std**2 + 0 + 0.5 * 0.5**2) / 2) ** 0.5
    assert visited([1.0, 1.0], 7) == pytest.approx([0.5 * (1 - 0.75) / pooled] * 2)
    assert visited([1.0, 1.0], 8) == [0.0, 0.0]
    assert context.memory["sas"]["7"] == pytest.approx([2, 0.75, pooled])
    mean, variance = (2 * 0.75 + 0.5) / 3, (2 * pooled**2 + std**2 + 2 / 3 * 0.25**2) / 3
    new, every = 0.5 / std, (1 - mean) / variance**0.5
    candidates = ((2 * new + every) / 3, (new + 2 * every) / 3)
    assert visited([0.0, 1.0], 7)[1] == pytest.approx(min(candidates))


@pytest.mark.checks("coefficient/hapo")
def test_hapo_moves_forks_further_and_counts_them_more_outside_the_neutral_zone():
    ratios, entropies = [1.0, 1.25, 0.85, 1.0, 0.7, 1.15], [4.0, 4.0, 4.0, 0.25, 0.25, 1.0]
    scored = scored_at(ratios, [1.0, 1.0, -1.0, 1.0, -1.0, 1.0])
    entropy = torch.tensor(entropies, dtype=torch.float64)[:, None, None]
    h = entropy_level(entropy, scored.mask, 0.5)
    # The nearest entry to the middle of log(.25, .25, 1, 4, 4, 4) is log 1 or log 4; sides are scaled by themselves.
    assert set(h.flatten().tolist()) <= {-1.0, 0.0, 0.5, 1.0, -0.5}
    scored = replace(scored, extra=lambda name: entropy)
    c = experimental_coefficients.hapo(scored, pivot=0.5, clip_strength=1.0, gain=0.5)[0].flatten().tolist()
    levels = h.flatten().tolist()
    for value, ratio, level, advantage in zip(c, ratios, levels, [1.0, 1.0, -1.0, 1.0, -1.0, 1.0], strict=True):
        low, high = 0.2 * (1 - min(level, 0.0)), 0.2 * (1 + max(level, 0.0))
        neutral = 1 - low / 2 < ratio < 1 + high / 2
        counted = advantage if neutral == (level > 0) else advantage * (1 + 0.5 * level)
        kept = ratio <= 1 + high if counted >= 0 else ratio >= 1 - low
        assert value == pytest.approx(ratio * counted * kept)


@pytest.mark.checks("coefficient/hapo")
def test_hapo_by_hand():
    scored = scored_at([1.25, 1.25, 1.0, 0.7], [1.0, 1.0, 1.0, -1.0])
    entropy = torch.tensor([4.0, 1.0, 0.5, 0.25], dtype=torch.float64)[:, None, None]
    scored = replace(scored, extra=lambda name: entropy)
    assert entropy_level(entropy, scored.mask, 0.6).flatten().tolist() == pytest.approx([1, 0, -0.5, -1])
    c = experimental_coefficients.hapo(scored, pivot=0.6, gain=0.5)[0].flatten().tolist()
    # A fork beyond the neutral zone: A (1 + .5), kept up to 1.4. At the pivot: clipped at 1.2. A sure step in the zone:
    # A (1 - .25). A sure step outside it: A as it is, kept down to 0.6.
    assert c == pytest.approx([1.25 * 1.5, 0.0, 0.75, -0.7])


@pytest.mark.checks("advantage/ngrpo")
def test_ngrpo_remembers_the_best_of_the_run_and_clips_as_the_paper():
    context = replace(CONTEXT, memory={})
    group.ngrpo(make_rollouts([1, 1], [0, 0], [1.0, 0.0], steps=1), context)
    failed = group.ngrpo(make_rollouts([1, 1], [0, 0], [0.0, 0.0], steps=1), context)[:, 0]
    # Returns 0, 0 and a virtual 1: mean 1/3, standard deviation sqrt(1/3), as one of three.
    assert failed.tolist() == pytest.approx([-(1 / 3) * 3**0.5] * 2, abs=1e-4)
    # The paper's example of one success in eight.
    one = group.ngrpo(make_rollouts([1] * 8, [0] * 8, [1.0] + [0.0] * 7, steps=1), context)[:, 0]
    assert one[:2].tolist() == pytest.approx([1.764, -0.504], abs=1e-3)
    coefficient = build_algorithm(AlgorithmConfig(algorithm="ngrpo")).coefficient(
        scored_at([0.83, 0.85, 1.23, 1.25], [-1.0, -1.0, 1.0, 1.0])
    )
    assert coefficient[0].flatten().tolist() == pytest.approx([0.0, -0.85, 1.23, 0.0])
    own = AlgorithmConfig(algorithm="ngrpo", options={"ppo": {"low": 0.2}})
    assert float(build_algorithm(own).coefficient(scored_at([0.83], [-1.0]))[0]) == pytest.approx(-0.83)


@pytest.mark.checks("advantage/bnpo")
def test_bnpo_divides_by_the_density_of_rates_however_alike_they_are():
    success = [1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0]
    rollouts = make_rollouts([1] * 12, [0] * 4 + [1] * 4 + [2] * 4, success, steps=1)
    rates = np.array([0.5, 0.5, 0.75])
    strength = rates.mean() * (1 - rates.mean()) / rates.var(ddof=1) - 1
    a, b = 1 + rates.mean() * strength / 3, 1 + (1 - rates.mean()) * strength / 3
    expected = (1 - 0.5) / stats.beta(a, b).pdf(0.5)
    assert float(experimental_advantages.bnpo(rollouts, CONTEXT)[0, 0]) == pytest.approx(expected, rel=1e-4)


@pytest.mark.checks("selection/void_turns")
def test_episodes_with_a_void_turn_are_dropped():
    rollouts = make_rollouts([2, 2, 1], [0, 0, 0], steps=1)
    before = rollouts.observation[STATE]
    after = before + 1.0
    after[1, 1] = before[1, 1]  # nothing moved in the second decision of the second episode
    after[2, 1] = before[2, 1]  # padding
    rollouts = replace(rollouts, next_observation={STATE: after})
    assert selection.drop_void(rollouts, CONTEXT).tolist() == [[True], [False], [True]]
    assert not selection.drop_void(replace(rollouts, next_observation={STATE: before}), CONTEXT).any()
    # What counts as moving is relative to the spread, here 8.9: 0.05 is half a hundredth of it.
    wide = torch.tensor([-10.0, 10.0, -10.0, 10.0, 0.0, 0.0]).reshape(3, 2, 1, 1).expand(3, 2, 1, 3)
    shift = torch.tensor([1.0, 1.0, 1.0, 0.05, 1.0, 1.0]).reshape(3, 2, 1, 1)
    rollouts = replace(rollouts, observation={STATE: wide}, next_observation={STATE: wide + shift})
    assert selection.drop_void(rollouts, CONTEXT, still=1e-2).tolist() == [[True], [False], [True]]
    assert selection.drop_void(rollouts, CONTEXT, still=1e-3).all()
    # Rounding errors of what stays are no movement.
    kept = torch.full((3, 2, 1, 3), 5.0)
    rollouts = replace(rollouts, observation={STATE: kept}, next_observation={STATE: kept + 1e-6})
    assert not selection.drop_void(rollouts, CONTEXT).any()
    with pytest.raises(ConfigError, match=r"void_turns.*vector fields"):
        selection.drop_void(replace(rollouts, observation={}, next_observation={}), CONTEXT)


@pytest.mark.checks("selection/void_turns")
def test_an_episode_with_a_void_turn_leaves_the_update_and_not_the_baseline():
    """Two successes and two failures, one of them void: the group's mean is 1/2, not that of the three that stay."""
    rollouts = make_rollouts([2] * 4, [0] * 4, [1.0, 1.0, 0.0, 0.0], steps=1)
    before = rollouts.observation[STATE]
    after = before + 1.0
    after[3, 0] = before[3, 0]
    rollouts = replace(rollouts, next_observation={STATE: after})
    algorithm = build_algorithm(AlgorithmConfig("dr_grpo", selection=("void_turns",)))
    assert Need.EPISODES in algorithm.needs, "in streams a row is many episodes"
    prepared = algorithm.prepare(rollouts, CONTEXT)
    assert prepared.extras["advantage"][:, 0, 0].tolist() == pytest.approx([0.5, 0.5, -0.5])
    # Beside one that selects rows at once: the void failure counts as a mixed outcome.
    pair = rollouts.take(torch.tensor([0, 3]))
    both = build_algorithm(AlgorithmConfig("dr_grpo", selection=("void_turns", "mixed_outcomes")))
    assert both.prepare(pair, CONTEXT).extras["advantage"][:, 0, 0].tolist() == pytest.approx([0.5])
    still = replace(rollouts, next_observation={STATE: before})
    assert len(algorithm.prepare(still, CONTEXT).group) == 4, "where all have one, all are learned from"
    worst = replace(
        rollouts, rewards={"reward": rollouts.rewards["reward"] - 1.0 * (torch.arange(4) == 3)[:, None, None]}
    )
    config = AlgorithmConfig("dpo", advantage="best_and_worst", selection=("void_turns",))
    prepared = build_algorithm(config).prepare(worst, CONTEXT)
    assert prepared.row_return.tolist() == [1.0, 0.0], "where rows are compared, the worst that stays is in the pair"
    # The advantage keeps the best and the worst of three, and both have a void turn.
    three = replace(make_rollouts([2] * 3, [0] * 3, [1.0, 0.5, 0.0], steps=1), next_observation={STATE: after[:3]})
    three.next_observation[STATE][[0, 2]] = three.observation[STATE][[0, 2]]
    pair = build_algorithm(AlgorithmConfig("grpo", advantage="best_and_worst", selection=("void_turns",)))
    assert pair.prepare(three, CONTEXT).row_return.tolist() == [1.0, 0.0], "something is left to learn from"


@pytest.mark.checks("auxiliaries/spo")
def test_a_step_preference_saturates_and_lets_go_beyond_its_clip():
    better = torch.tensor([0.0, 0.05, 0.2, -0.2], dtype=torch.float64, requires_grad=True)
    worse = torch.tensor([0.0, -0.05, -0.2, 0.2], dtype=torch.float64, requires_grad=True)
    loss = step_preference_loss(better, worse, beta=10.0, clip=0.1)
    margins = [0.0, 0.1, math.log(1.1) - math.log(0.9), math.log(0.9) - math.log(1.1)]
    assert loss.tolist() == pytest.approx([math.log1p(math.exp(-10 * margin)) for margin in margins])
    loss.sum().backward()
    # -beta sigmoid(-beta margin): half of beta at first, less once it is ranked rightly, none beyond the clip.
    assert better.grad.tolist() == pytest.approx([-5.0, -10 / (1 + math.exp(1.0)), 0.0, 0.0])
    assert worse.grad.tolist() == pytest.approx([5.0, 10 / (1 + math.exp(1.0)), 0.0, 0.0])


@pytest.mark.checks("sampler/prompt_replay")
def test_prompt_replay_takes_those_nearest_to_one_half():
    sampler = ReplaySampler(share=1.0, rates=(0.1, 0.9), cooldown=0, limit=9)
    won = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])
    chosen = sampler.propose(7, 7, np.random.default_rng(0))
    sampler.observe(np.arange(7), won, np.full(7, 8.0), np.ones(7))
    assert sorted(chosen.tolist()) == list(range(7))
    for seed in range(5):
        fresh = ReplaySampler(share=1.0, rates=(0.1, 0.9), cooldown=0, limit=9)
        fresh.restore(sampler.state())
        assert sorted(fresh.propose(3, 7, np.random.default_rng(seed)).tolist()) == [2, 3, 4]


@pytest.mark.checks("sampler/prompt_replay")
def test_prompt_replay_leaves_groups_without_a_signal_and_those_outside_its_bounds():
    """Of 0, 1 and 2 successes of 2, and 1, 2 and 6 of 8 episodes, only 1 of 2 and 2 of 8 lie within .24 and .7."""
    won, played = np.array([0.0, 1.0, 2.0, 1.0, 2.0, 6.0]), np.array([2.0, 2.0, 2.0, 8.0, 8.0, 8.0])
    sampler = ReplaySampler(share=0.5, cooldown=2)
    sampler.propose(6, 40, np.random.default_rng(0))
    sampler.last, sampler.used = (dict.fromkeys(range(6), value) for value in (1, 1))
    sampler.observe(np.arange(6), won, played, np.ones(6))
    assert not set(sampler.propose(9, 40, np.random.default_rng(0)).tolist()) & set(range(6)), "a proposal has to pass"
    chosen = sampler.propose(9, 40, np.random.default_rng(0)).tolist()
    assert chosen[:2] == [1, 4] and not set(chosen) & {0, 2, 3, 5}
    sampler.used[1] = 1 + sampler.limit
    sampler.round += 1
    assert 1 not in sampler.propose(9, 40, np.random.default_rng(0)).tolist(), "replayed five times"


@pytest.mark.checks("HAPO")
def test_uncertain_tokens_are_drawn_hotter_and_certain_ones_colder():
    """Of five places the most certain has h = -1, the .8 quantile 0, the most uncertain 1."""
    logits = torch.tensor([[9.0, 0.0], [3.0, 0.0], [2.5, 0.0], [2.0, 0.0], [0.5, 0.0]], dtype=torch.float64)
    language = ActionLanguage(None, None, None, 1.0, 0.05)  # type: ignore[arg-type]
    drawn = language.sampled(logits.log_softmax(-1))
    for place, temperature in ((0, 0.95), (3, 1.0), (4, 1.05)):
        torch.testing.assert_close(drawn[place], (logits[place] / temperature).log_softmax(-1))
    plain = ActionLanguage(None, None, None, 1.0)  # type: ignore[arg-type]
    assert torch.equal(plain.sampled(drawn), drawn)
