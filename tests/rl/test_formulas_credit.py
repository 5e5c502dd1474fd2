"""What shares out an advantage among steps, by hand tables and slow references."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from made_rollouts import make_rollouts

from robopolicy.core.policy import Scores
from robopolicy.core.spec import STATE
from robopolicy.rl.advantages import gae
from robopolicy.rl.context import Context
from robopolicy.rl.experimental import credit as experimental_credit
from robopolicy.rl.objective import divergence_between

CONTEXT = Context(torch.Generator(), iteration=0, iterations=10)


@pytest.mark.checks("credit/denoising_discount")
def test_noisy_steps_get_less_credit():
    rollouts = make_rollouts([1], [0], steps=3)
    advantages = gae.discount_denoising(rollouts, torch.full((1, 1, 3), 2.0), CONTEXT, gamma=0.5)
    assert advantages.tolist() == [[[0.5, 1.0, 2.0]]]


@pytest.mark.checks("credit/d3s_steps")
def test_d3s_keeps_the_steps_with_the_largest_advantage_times_entropy():
    entropy = torch.tensor([[[0.1, 2.0], [1.0, 0.5]], [[3.0, 0.2], [9.0, 9.0]]])
    rollouts = make_rollouts([2, 1], [0, 0]).with_extras(entropy=entropy)
    advantage = torch.tensor([[[5.0, 1.0], [-4.0, 2.0]], [[-0.5, 3.0], [9.0, 9.0]]])
    # |A| H: .5, 2, 4, 1 | 1.5, .6; the last decision is padding.
    for iteration, kept in ((0, [[0, 1, 1, 0], [0, 0]]), (5, [[0, 1, 1, 1], [1, 0]]), (10, [[1, 1, 1, 1], [1, 1]])):
        mask = experimental_credit.d3s_steps(rollouts, advantage, replace(CONTEXT, iteration=iteration), start=0.3)
        expected = advantage[rollouts.mask] * torch.tensor([value for row in kept for value in row])
        assert mask[rollouts.mask].tolist() == expected.tolist(), iteration


@pytest.mark.checks("credit/empg")
def test_empg_equals_a_slow_reference():
    lengths, draws = [3, 1, 2], np.random.default_rng(0)
    entropy, advantage = draws.random((3, 3, 2)) * 2, draws.normal(size=(3, 3, 2))
    rollouts = make_rollouts(lengths, [0] * 3).with_extras(entropy=torch.tensor(entropy))
    rollouts.mask[2, 1, 1] = False  # a decision of one step
    advantages = experimental_credit.empg(
        rollouts, torch.tensor(advantage), CONTEXT, damping=1.5, clarity=0.7, bonus=0.2
    )

    places = [(row, column) for row, length in enumerate(lengths) for column in range(length)]
    steps = {place: rollouts.mask[place].numpy() for place in places}
    mean = {place: entropy[place][steps[place]].mean() for place in places}
    least, most = min(mean.values()), max(mean.values())
    scaled = {place: (value - least) / (most - least) for place, value in mean.items()}
    gain = {place: math.exp(-1.5 * value) for place, value in scaled.items()}
    usual = sum(gain.values()) / len(gain)
    shaped = {}
    for row, column in places:
        shaped[row, column] = advantage[row, column] * gain[row, column] / usual
        if (row, column + 1) in scaled:
            shaped[row, column] += 0.2 * math.exp(-0.7 * scaled[row, column + 1])
    centre = np.mean([shaped[place][steps[place]].mean() for place in places])
    for place in places:
        assert advantages[place].tolist() == pytest.approx(((shaped[place] - centre) * steps[place]).tolist())
    assert not advantages[~rollouts.mask].any()


@pytest.mark.checks("credit/seed_grpo")
def test_seed_grpo_shrinks_by_the_entropy_of_what_a_start_leads_to():
    rollouts = make_rollouts([1] * 6, [0, 0, 0, 0, 1, 1])
    ends = torch.tensor([0.0, 9.0, 9.0, -9.0, 9.0, 9.0])[:, None, None, None].expand(6, 1, 1, 3)
    rollouts = replace(rollouts, next_observation={STATE: ends})
    advantages = experimental_credit.seed_grpo(rollouts, torch.full((6, 1, 2), 2.0), CONTEXT, alpha=0.5)[:, 0, 0]
    # Clusters of 1, 2 and 1 of four: H = 2 (1/4) log 4 + (1/2) log 2 = 1.5 log 2 of at most log 4; then one of two.
    shrunk = 2 * (1 - 0.5 * 1.5 * math.log(2) / math.log(4))
    assert advantages.tolist() == pytest.approx([shrunk] * 4 + [2.0] * 2)
    # Ends that differ by rounding errors alone are one cluster, and so is a single one.
    alike = (5.0 + 5e-7 * torch.arange(6.0))[:, None, None, None].expand(6, 1, 1, 3)
    rollouts = replace(rollouts, next_observation={STATE: alike})
    assert experimental_credit.seed_grpo(rollouts, torch.ones(6, 1, 2), CONTEXT).tolist() == [[[1.0, 1.0]]] * 6
    assert experimental_credit.seed_grpo(make_rollouts([1], [0]), torch.ones(1, 1, 2), CONTEXT).all()


@pytest.mark.checks("credit/vppo")
def test_vppo_scales_episodes_by_their_mean_dependency_and_centres_the_scale():
    rollouts = make_rollouts([1, 1, 1], [0, 0, 0], steps=2)
    divergence = torch.tensor([[1.1, 0.7], [0.1, 0.0], [0.0, 9.0]], dtype=torch.float64)[:, None]
    rollouts = rollouts.with_extras(blackout_divergence=divergence)
    advantages = experimental_credit.vppo(
        rollouts, torch.ones(3, 1, 2, dtype=torch.float64), CONTEXT, share=0.5, low=0.8
    )
    mean = divergence.numpy()[:, 0].mean(1)
    place = (mean - mean.min()) / (mean.max() - mean.min())
    most = 0.8 + 0.2 / place.mean()
    scale = 0.8 + place * (most - 0.8)
    assert scale.min() == pytest.approx(0.8) and scale.mean() == pytest.approx(1.0)
    kept = np.array([[1, 0], [1, 0], [0, 1]])
    torch.testing.assert_close(advantages[:, 0], torch.tensor(kept * scale[:, None]), atol=1e-6, rtol=1e-6)
    # An episode without scored steps has no dependency, which sets neither the scale's minimum nor its mean.
    empty = make_rollouts([1, 1, 1, 1], [0, 0, 0, 0], steps=2)
    empty = replace(empty, mask=empty.mask & (torch.arange(4) < 3)[:, None, None])
    empty = empty.with_extras(
        blackout_divergence=torch.cat([divergence, torch.full((1, 1, 2), 99.0, dtype=torch.float64)])
    )
    others = experimental_credit.vppo(empty, torch.ones(4, 1, 2, dtype=torch.float64), CONTEXT, share=0.5, low=0.8)
    torch.testing.assert_close(others[:3], advantages)
    assert not others[3].any()
    alike = rollouts.with_extras(blackout_divergence=divergence[:1].expand(3, 1, 2))
    assert experimental_credit.vppo(alike, torch.ones(3, 1, 2), CONTEXT, low=0.8)[:, 0, 0].tolist() == [1.0] * 3


@pytest.mark.checks("credit/vppo")
def test_the_divergence_of_steps_is_that_of_their_distributions_and_else_estimated_from_the_drawn_step():
    drawn, played = torch.zeros(1, 1), torch.ones(1, 2, dtype=torch.bool)
    tokens = [
        Scores(drawn, drawn, {"log_probabilities": torch.tensor([[each]]).log()}) for each in ([0.5, 0.5], [0.25, 0.75])
    ]
    assert float(divergence_between(*tokens, played)) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    far = (
        torch.tensor([0.6, 0.0, 9.0]).reshape(1, 1, 3, 1).expand(1, 1, 3, 2)
    )  # of three predicted steps two are played
    normals = [
        Scores(drawn, drawn, {"mean": mean, "std": torch.full((1, 1, 1, 1), std)})
        for mean, std in ((torch.zeros_like(far), 0.3), (far, 0.3), (far, 0.6))
    ]
    assert float(divergence_between(normals[0], normals[1], played)) == pytest.approx((0.6**2 / (2 * 0.3**2) + 0) / 2)
    wider = math.log(2) + 0.3**2 / (2 * 0.6**2) - 0.5
    assert float(divergence_between(normals[0], normals[2], played)) == pytest.approx(wider + 0.5 / 2)
    normals[0].extras["logp_precision"] = torch.tensor([0.0, 1.0, 0.0]).reshape(1, 1, 3, 1).expand(far.shape)
    assert float(divergence_between(normals[0], normals[1], played)) == 0.0
    others = (Scores(drawn + value, drawn) for value in (-1.0, 4.0))
    estimates = [float(divergence_between(Scores(drawn, drawn), other, played)) for other in others]
    assert estimates == pytest.approx([math.exp(-1), 10.0])  # e^4 - 5 is 49.6


@pytest.mark.checks("credit/instruction_contrast")
def test_what_depends_on_the_instruction_weighs_more_in_good_and_less_in_bad_episodes():
    rollouts = make_rollouts([1, 1], [0, 0], steps=3)
    delta = torch.tensor([0.2, 5.0, -5.0], dtype=torch.float64).expand(2, 1, 3)
    rollouts = rollouts.with_extras(contrast_logp=rollouts.logp_behaviour - delta, current_logp=rollouts.logp_behaviour)
    advantage = torch.tensor([2.0, -1.0], dtype=torch.float64)[:, None, None].expand(2, 1, 3)
    advantages = experimental_credit.instruction_contrast(rollouts, advantage, CONTEXT, share=0.4, epsilon=0.5)
    good = [2 * (0.6 + 0.4 * math.exp(0.2)), 2 * (0.6 + 0.4 * 1.5), 2 * (0.6 + 0.4 * 0.5)]
    bad = [-(0.6 + 0.4 * math.exp(-0.2)), -(0.6 + 0.4 * 0.5), -(0.6 + 0.4 * 1.5)]
    assert advantages[:, 0].flatten().tolist() == pytest.approx(good + bad)


@pytest.mark.checks("credit/gtpo")
def test_gtpo_protects_tokens_that_good_and_bad_episodes_chose_at_the_same_place():
    """Masks: build_conflict_mask of github.com/winstonsmith1897/GTPO at 5d33811, forward half."""
    tokens = torch.tensor([[3, 1, 5], [3, 2, 5], [4, 1, 6], [3, 1, 5]])[..., None]
    entropy = torch.zeros(4, 3, 1)
    rollouts = make_rollouts([3] * 4, [0, 0, 0, 1], steps=1).with_extras(entropy=entropy)
    rollouts = replace(rollouts, latents={"tokens": tokens})
    advantage = torch.tensor([1.0, -1.0, -1.0, 1.0])[:, None, None].expand(4, 3, 1)
    advantages = experimental_credit.gtpo(rollouts, advantage, CONTEXT)[..., 0]
    # The first shares its first and third tokens with the second, its second with the third, which are both bad: an
    # unbroken run. The run of the others ends where a token of theirs is nobody else's; the last has no group.
    assert advantages.tolist() == [[2, 2, 2], [0, -1, -1], [-1, -1, -1], [1, 1, 1]]
    rollouts = rollouts.with_extras(entropy=torch.tensor([0.3, 0.5, 9.0])[:, None].expand(4, 3, 1))
    rollouts.mask[:, 2] = False  # the mean is over steps that were chosen
    advantages = experimental_credit.gtpo(rollouts, advantage, CONTEXT, penalty=0.5)[..., 0]
    assert advantages[0].tolist() == pytest.approx([1.6, 1.6, 0.0])


@pytest.mark.checks("credit/gtpo")
def test_gtpo_goes_on_past_tokens_that_were_not_chosen():
    """Two chunks of two tokens, the first of each kept from the chunk before: the chosen ones are a run."""
    tokens = torch.tensor([[[9, 1], [8, 2]], [[7, 1], [6, 2]]])
    rollouts = make_rollouts([2, 2], [0, 0], steps=2).with_extras(entropy=torch.zeros(2, 2, 2))
    rollouts = replace(rollouts, latents={"tokens": tokens})
    rollouts.mask[:, :, 0] = False
    advantage = torch.tensor([1.0, -1.0])[:, None, None].expand(2, 2, 2)
    advantages = experimental_credit.gtpo(rollouts, advantage, CONTEXT)
    assert advantages.tolist() == [[[0, 2], [0, 2]], [[0, 0], [0, 0]]]


@pytest.mark.checks("credit/entropy_gain")
def test_aepo_weighs_uncertain_steps_more():
    entropy = torch.tensor([[[0.2], [0.4]], [[0.6], [9.0]]])
    rollouts = make_rollouts([2, 1], [0, 0], steps=1).with_extras(entropy=entropy)
    advantages = experimental_credit.entropy_gain(rollouts, torch.ones(2, 2, 1), CONTEXT)
    assert advantages[rollouts.mask].tolist() == pytest.approx([0.7551, 1.0, 1.2449], abs=1e-4)


@pytest.mark.checks("credit/top_entropy", "DART-GUI")
def test_dart_keeps_whole_decisions_by_their_mean_entropy():
    mean = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5])
    entropy = torch.stack([mean - 0.09, mean + 0.09], -1)[None]
    rollouts = make_rollouts([5], [0], steps=2).with_extras(entropy=entropy)
    advantages = experimental_credit.top_entropy(rollouts, torch.ones(1, 5, 2), CONTEXT, share=0.8, per_chunk=True)
    assert advantages.tolist() == [[[0, 0], [1, 1], [1, 1], [1, 1], [1, 1]]]


@pytest.mark.checks("credit/by_difficulty")
def test_starts_that_fail_weigh_more():
    rollouts = make_rollouts([1] * 8, [0] * 4 + [1] * 4, [1, 1, 1, -1, 1, -1, -1, -1])
    advantages = experimental_credit.by_difficulty(rollouts, torch.full((8, 1, 2), 2.0), CONTEXT)
    assert advantages[:, 0, 0].tolist() == pytest.approx([1.0] * 4 + [3.0] * 4)
    solved = make_rollouts([1] * 4, [0, 0, 1, 1], [1, 1, 1, -1])
    advantages = experimental_credit.by_difficulty(solved, torch.ones(4, 1, 2), CONTEXT)
    assert advantages[:, 0, 0].tolist() == pytest.approx([1e-3] * 2 + [2.0] * 2), "what is solved is not forgotten"
