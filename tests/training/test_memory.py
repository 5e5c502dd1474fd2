"""The budget of memory is what one decision and its scores really keep, times how many there are."""

import warnings
from dataclasses import replace

import pytest
import torch
from bandit_toys import BanditWorld
from seeing_toys import SeeingWorld, denoising_policy

from robopolicy.core.errors import ConfigError, RobopolicyWarning
from robopolicy.core.machine import free_memory
from robopolicy.nn.optimisers import optimiser_bytes
from robopolicy.nn.precision import training_precision
from robopolicy.rl.registry import Need
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.memory import MemoryBudget, packed_image_fraction, plan_memory, plan_pretraining, policy_copies


def prepared(**changes):
    policy = denoising_policy(SeeingWorld(1), cameras=True, **changes)
    policy.prepare_finetuning()
    return policy


def test_what_is_kept_is_counted():
    policy = prepared()
    budget = plan_memory(policy, 10, 4)
    # A row: an image of 20 x 20 x 3 bytes, a state of 2 floats, and 2 + 1 latents [1, 2] of floats.
    assert budget.kept == (10 + 4) * (1200 + 8 + 4 * 3 * 2)  # with a minibatch's copy
    assert plan_memory(policy, 10, 4, packed=0.25).kept == 10 * (300 + 8 + 4 * 3 * 2) + 4 * (1200 + 8 + 4 * 3 * 2)
    assert 0 < packed_image_fraction(SeeingWorld(2)) < 0.3 and packed_image_fraction(BanditWorld(2)) == 1
    assert plan_memory(policy, 10, 4, images=False).kept == (10 + 4) * (8 + 4 * 3 * 2)
    tuned = sum(weight.numel() for weight in policy.trainable_parameters())
    assert budget.learning == 4 * 4 * tuned
    assert budget.weights == 4 * tuned
    assert budget.weights + budget.rest == 4 * sum(weight.numel() for weight in policy.parameters())
    assert budget.minibatch == budget.at_once == 4
    assert 0 < 4 * budget.each <= budget.activations
    assert plan_memory(policy, 2, 4).minibatch == 2
    pieces = plan_memory(policy, 10, 4, micro_batch=3)
    assert (pieces.minibatch, pieces.at_once, pieces.activations) == (4, 3, budget.activations - budget.each)
    assert plan_memory(policy, 10, 4, micro_batch=5) == budget
    both = plan_memory(policy, 10, 4, replicas=2)  # they divide the minibatch, and add their gradients
    assert (both.minibatch, both.at_once, both.activations) == (4, 2, budget.activations - 2 * budget.each)
    assert both.kept == (10 + 2) * (1200 + 8 + 4 * 3 * 2) and both.learning == 5 * 4 * tuned
    assert both.text().startswith("Estimated memory of each of 2 processes: ")
    # The gradient is complete for a moment, in two types; what stays of it, of the weights and moments is divided.
    divided = plan_memory(policy, 10, 4, replicas=2, fsdp=True)
    assert divided.learning == (2 + 4 / 2) * 4 * tuned


def test_frames_of_a_history_are_counted_once_but_in_copies():
    policy = prepared(history=3)
    frame, vectors = 1200, 3 * 8 + 4 * 3 * 2
    assert plan_memory(policy, 10, 4).kept == 10 * (frame + vectors) + 4 * (3 * frame + vectors)


def test_activations_are_those_of_what_is_scored():
    policy = torch.nn.Module()
    policy.weight = torch.nn.Parameter(torch.ones(3))
    x = torch.ones(5, 3)

    from robopolicy.training.memory import _saved

    assert _saved(policy, lambda: (policy.weight * x).exp().sum()) == 2 * 60  # x, and the result of exp
    policy = prepared()
    few, all_of_them = (plan_memory(policy, 8, 8, scored_steps=steps).activations for steps in (1, 2))
    assert 0 < few < all_of_them


def test_too_little_is_an_error_with_ways_out():
    three, counts = ("tuned", "base", "best"), (10**8, 10**7, 2 * 10**9, 3 * 10**12)
    each = 3 * 10**8  # and 0.8 GB more that do not depend on how many there are
    budget = MemoryBudget(10**9, three, 3 * 10**9, 4 * 10**9, 512, 20 * 10**9, each, 64, 64, *counts)
    assert budget.ahead == 28 * 10**9
    with pytest.warns(
        RobopolicyWarning,
        match="about 28 GB are needed and 30 GB are free; measured use exceeded such estimates by up to 30%",
    ):
        budget.require(30 * 10**9)
    with warnings.catch_warnings(action="error"):
        budget.require(37 * 10**9)
        budget.require(None)
    with pytest.raises(
        ConfigError, match=r"needs about 28 GB more memory, but only 16 GB are free. micro_batch=11 fits"
    ):
        budget.require(16 * 10**9)
    fits = replace(budget, at_once=24, activations=20 * 10**9 - 40 * each)
    with pytest.warns(RobopolicyWarning, match="may be too small"):
        fits.require(16 * 10**9)
    with pytest.raises(ConfigError, match="micro_batch=11 fits"):
        fits.require(fits.ahead - 1)
    with pytest.raises(ConfigError, match=r"No micro_batch is small enough.* Or lower minibatch=64, or the 512"):
        budget.require(8 * 10**9)
    assert "512 action chunks and a minibatch of 64 4 GB, activations of 64 chunks 20 GB" in budget.text()
    assert "weights 1 GB, stored 3 times (tuned, base, best)" in budget.text()
    resting = replace(budget, rest=7 * 10**9)
    assert "weights frozen 7 GB and trainable 1 GB, stored 3 times (tuned, base, best)" in resting.text()
    assert (resting.ahead, resting.held, resting.loading) == (budget.ahead, 9 * 10**9, 16 * 10**9)
    assert "Total memory about 37 GB" in resting.whole()
    assert "100 million parameters, 10 million trainable. One policy call takes 2 billion FLOPs" in budget.whole()
    assert "gradient thrice that" in budget.whole() and "gradient four times that" in fits.whole()
    assert "log-probability 3 trillion" in budget.whole() and "Total memory about 30 GB" in budget.whole()
    free = free_memory(torch.device("cpu"))
    assert free is None or free > 10**6


def test_everybody_who_holds_the_weights_is_counted():
    def extra(needs=(), **changes):
        return policy_copies(frozenset(needs), FinetuneConfig(**changes))[3:]

    assert extra() == ()
    assert extra((Need.BASE,), props_parts=2) == ("reference", "acting")
    assert extra(staleness=2) == ("acting", "earlier", "earlier")
    assert extra(policy_lag=1) == ("acting", "earlier", "earlier")
    assert extra(proximal_policy="average") == ("average", "average before")


def test_pretraining_that_does_not_fit_is_told_the_micro_batch_that_does():
    policy = denoising_policy(SeeingWorld(1), cameras=True)
    just = next(size for size in range(0, 10**9, 10_000) if _fits(policy, 3, size))
    enough = int(1.3 * just) + 1
    with pytest.raises(
        ConfigError, match=r"micro_batch=3 fits: the activations of 8 chunks at once .* lower batch_size=8"
    ):
        plan_pretraining(policy, 8, enough)
    assert "activations of 3 chunks" in plan_pretraining(policy, 8, enough, 3)
    with pytest.warns(RobopolicyWarning, match="may be too small"):
        plan_pretraining(policy, 8, just, 3)
    plan_pretraining(policy, 8, None)


def test_what_imitation_keeps_is_what_its_loss_keeps():
    """A sample that is denoised at eight levels keeps about eight times as much as at one."""
    one, eight = (denoising_policy(SeeingWorld(1), levels_per_sample=levels) for levels in (1, 8))
    learning = [4 * 4 * sum(weight.numel() for weight in each.trainable_parameters()) for each in (one, eight)]
    needed = [
        next(size for size in range(base, 10**9, 5_000) if _fits(each, 64, size)) - base
        for each, base in zip((one, eight), learning, strict=True)
    ]
    assert 4 < needed[1] / needed[0] < 9


def _fits(policy, batch_size: int, available: int) -> bool:
    try:
        with warnings.catch_warnings(action="ignore", category=RobopolicyWarning):
            plan_pretraining(policy, batch_size, available)
    except ConfigError:
        return False
    return True


def test_activations_grow_by_the_row_and_casts_of_weights_do_not():
    policy = prepared()
    for precision in ("fp32", "bf16"):
        with training_precision(precision):
            few, many = plan_memory(policy, 20, 2), plan_memory(policy, 20, 20)
        assert many.activations - few.activations == 18 * few.each
    assert few.activations - 2 * few.each > 0  # weights in bfloat16 are held once


def test_averages_of_eight_bits_are_counted_with_their_scales():
    weights = [torch.nn.Parameter(torch.empty(count)) for count in (4095, 4096, 5000)]
    assert optimiser_bytes("adamw", weights) == 8 * (4095 + 4096 + 5000)
    assert optimiser_bytes("adamw8bit", weights) == 8 * 4095 + 2 * (4096 + 16 * 4) + 2 * (5000 + 20 * 4)
    policy = prepared()
    plain, eight = plan_memory(policy, 4, 4), plan_memory(policy, 4, 4, optimiser="adamw8bit")
    learns = list(policy.trainable_parameters())
    assert plain.learning - eight.learning == optimiser_bytes("adamw", learns) - optimiser_bytes("adamw8bit", learns)
