"""Simulated 8-bit products: rounding by hand and against a slow reference, and tokens scored as they were drawn."""

import pytest
import torch
from seeing_toys import SeeingWorld, denoising_policy
from torch import nn
from torch.nn import functional

from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import to_tensors
from robopolicy.core.spec import STATE
from robopolicy.nn.fp8 import EightBitProducts, rounded_e4m3
from robopolicy.nn.micro_batches import in_micro_batches, scores_of
from robopolicy.nn.precision import training_precision
from robopolicy.policies import TokenConfig, TokenPolicy, TokenPolicyConfig
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.finetune import finetune


def rounded(x: torch.Tensor) -> torch.Tensor:
    """To three bits behind the first; the largest number is scaled to 448 = 1.75 * 2^8, the least power is -6."""
    scale = 448 / x.abs().max()
    exponent = torch.floor(torch.log2((x * scale).abs().clamp(min=2**-6)))
    step = 2.0 ** (exponent - 3)
    return (x * scale / step).round() * step / scale


@pytest.mark.checks("Jet-RL")
def test_rounding_by_hand():
    """At scale 1: between 1 and 1.125 the middle goes to the even one, 1; near 448 steps are 32 wide."""
    x = torch.tensor([[448.0, 1.0625, 1.07, -1.9, 417.0, 0.0, 0.0098]])
    assert rounded_e4m3(x).tolist()[0] == pytest.approx([448.0, 1.0, 1.125, -1.875, 416.0, 0.0, 5 * 2**-9])
    assert rounded_e4m3(torch.zeros(2, 3)).tolist() == [[0.0] * 3] * 2


@pytest.mark.checks("Jet-RL")
def test_groups_of_128_have_a_scale_each():
    draws = torch.Generator().manual_seed(0)
    x = torch.randn((3, 300), generator=draws) * torch.logspace(-3, 3, 300)
    expected = torch.cat([torch.stack([rounded(row) for row in part]) for part in x.split(128, 1)], 1)
    torch.testing.assert_close(rounded_e4m3(x), expected, rtol=1e-6, atol=0)
    assert torch.equal(rounded_e4m3(x[1:2]), rounded_e4m3(x)[1:2]), "whatever the other rows are"
    weight = torch.randn((200, 300), generator=draws) * torch.logspace(-2, 2, 300)
    expected = torch.cat([torch.cat([rounded(part) for part in rows.split(128, 1)], 1) for rows in weight.split(128)])
    torch.testing.assert_close(rounded_e4m3(weight, 2), expected, rtol=1e-6, atol=0)


@pytest.mark.checks("Jet-RL")
def test_linear_layers_multiply_rounded_numbers_in_both_directions():
    draws = torch.Generator().manual_seed(0)
    layer = nn.Linear(200, 7)
    x = torch.randn((5, 200), generator=draws).requires_grad_()
    upstream = torch.randn((5, 7), generator=draws)
    with EightBitProducts():
        out = functional.silu(layer(x))
    low, weight = rounded_e4m3(x.detach()), rounded_e4m3(layer.weight.detach(), 2)
    hidden = low @ weight.T + layer.bias.detach()
    torch.testing.assert_close(out, functional.silu(hidden), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(out, functional.silu(layer(x)), atol=1e-3)
    out.backward(upstream)
    sigmoid = hidden.sigmoid()
    inner = upstream * (sigmoid + hidden * sigmoid * (1 - sigmoid))
    torch.testing.assert_close(x.grad, inner @ weight, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(layer.weight.grad, inner.T @ low, atol=1e-5, rtol=1e-4)


def policy_of(world) -> TokenPolicy:
    token = TokenConfig(width=64, depth=2, heads=4, feed_forward=96, bins=32)
    config, spec = TokenPolicyConfig(chunk=2, observation_keys=(STATE,), token=token), world.spec
    return TokenPolicy(config, spec.observation, spec.action, fps=spec.fps, instructions=spec.instructions)


@pytest.mark.checks("Jet-RL")
@pytest.mark.parametrize("rows", [48, 5, 1])
def test_tokens_are_scored_exactly_as_they_were_drawn(rows: int):
    """One after another with a cache, then all at once in a batch of another size."""
    world = SeeingWorld(48)
    policy, observation = policy_of(world), to_tensors(world.reset(seeds=range(48)))

    def worst(acting: str, scoring: str) -> float:
        with training_precision(acting):
            decision = policy.act(observation, torch.Generator().manual_seed(0))
        part = {key: value[:rows] for key, value in observation.items()}
        with training_precision(scoring), torch.no_grad():
            scores = policy.log_prob(part, {key: value[:rows] for key, value in decision.latents.items()})
        return float((scores.logp - decision.logp[:rows]).abs().max())

    assert worst("fp8", "fp8") < 1e-5
    assert worst("fp32", "fp8") > 0.01, "two precisions differ, as the paper says"


@pytest.mark.checks("Jet-RL")
def test_micro_batches_recompute_in_8_bits():
    world = SeeingWorld(48)
    policy, observation = policy_of(world), to_tensors(world.reset(seeds=range(48)))
    gradients = []
    with training_precision("fp8"):
        latents = policy.act(observation, torch.Generator().manual_seed(0)).latents
        for rows in (0, 7):
            with in_micro_batches(rows):
                (gradient,) = torch.autograd.grad(
                    scores_of(policy, observation, latents).logp.sum(), policy.action_embedding.weight
                )
            gradients.append(gradient)
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)


@pytest.mark.checks("Jet-RL")
def test_a_run_in_8_bits_starts_at_ratios_of_one():
    config = FinetuneConfig(
        algorithm="grpo", iterations=2, groups=4, group_size=4, epochs=2, minibatch=64, evaluate_every=0,
        precision="fp8", ratio_tolerance=1e-5, learning_rate=1e-3,
    )  # fmt: skip
    world = SeeingWorld(8)
    policy = policy_of(world)
    policy.prepare_finetuning()
    before = [weight.detach().clone() for weight in policy.parameters()]
    finetune(policy, None, world, config)
    assert any(not torch.equal(one, other) for one, other in zip(before, policy.parameters(), strict=True))
    other = denoising_policy(world)
    other.prepare_finetuning()
    with pytest.raises(ConfigError, match="set precision=fp32 or bf16"):
        finetune(other, None, world, config)
