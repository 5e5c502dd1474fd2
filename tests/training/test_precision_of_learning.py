"""Policies and critics learn in bfloat16: where it multiplies, what stays fp32, and where it is refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from bandit_toys import FIELDS, BanditWorld, ChainPolicy

from robopolicy.core.errors import ConfigError, RobopolicyWarning
from robopolicy.core.randomness import Generators
from robopolicy.core.spec import Field
from robopolicy.nn.configuration import DenoiserKind
from robopolicy.nn.precision import (
    backward_precision,
    is_lowered,
    require_precision,
    run_in_training_precision,
    tolerance_in,
    training_precision,
)
from robopolicy.policies import DenoisingPolicy
from robopolicy.policies.configuration import DenoisingPolicyConfig, Likelihood
from robopolicy.rl.critic import state_critic
from robopolicy.training.configuration import FinetuneConfig, FitConfig
from robopolicy.training.finetune import finetune
from robopolicy.training.fit import fit

CPU = torch.device("cpu")
MULTIPLIES = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
needs_bf16 = pytest.mark.skipif(not MULTIPLIES, reason="this CPU does not multiply bfloat16")
SMALL = DenoisingPolicyConfig(chunk=4, prediction_steps=4, sampling_steps=3, width=32, depth=2, heads=2)
TUNING = FinetuneConfig(iterations=2, rollout_length=2, epochs=1, minibatch=64, evaluate_every=1, target_kl=None)


def _policy(config=SMALL, observation=FIELDS, actions=3) -> DenoisingPolicy:
    """A policy whose prediction is not zero, as that of a new network is."""
    bound = np.ones(actions, np.float32)
    policy = DenoisingPolicy(config, observation, Field((actions,), low=-bound, high=bound), fps=10, seed=1)
    draws = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in policy.network.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=draws))
    return policy


def _seen(rows: int, observation=FIELDS) -> dict[str, torch.Tensor]:
    draws = torch.Generator().manual_seed(2)
    return {key: torch.randn((rows, 1, *field.shape), generator=draws) for key, field in observation.items()}


def _gradient(policy, observation, latents, precision) -> tuple[torch.Tensor, torch.Tensor]:
    weights = policy.trainable_parameters()
    for weight in weights:
        weight.grad = None
    with training_precision(precision):
        logp = policy.log_prob(observation, latents).logp
    with backward_precision(precision):
        (logp * torch.linspace(-1, 1, logp.numel()).view_as(logp)).sum().backward()
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    assert {item.dtype for item in gradients} == {torch.float32}
    return logp.detach(), torch.cat([item.flatten() for item in gradients])


@needs_bf16
@pytest.mark.parametrize("denoiser", list(DenoiserKind), ids=lambda kind: kind.value)
@pytest.mark.parametrize("likelihood", [Likelihood.CHAIN, Likelihood.MATCHING], ids=lambda kind: kind.value)
def test_a_policy_acts_and_is_scored_alike_in_bfloat16(denoiser, likelihood):
    policy = _policy(replace(SMALL, denoiser=denoiser, likelihood=likelihood))
    policy.prepare_finetuning(2)
    observation = _seen(40)
    exact = policy.act(observation, torch.Generator().manual_seed(3))
    with training_precision("bf16"), torch.no_grad():
        decision = policy.act(observation, torch.Generator().manual_seed(3))
        rows = torch.arange(40).repeat(5)  # as many more as there are in minibatches
        again = policy.log_prob(
            {key: value[rows] for key, value in observation.items()},
            {name: value[rows] for name, value in decision.latents.items()},
        )
    assert decision.logp.dtype == again.logp.dtype == torch.float32
    assert float((again.logp - decision.logp[rows]).abs().max()) <= tolerance_in("bf16", 1e-5)
    moved = float((decision.actions - exact.actions).abs().max())
    assert 0 < moved < 0.1  # another rounding, not another policy


@needs_bf16
def test_backward_alone_leaves_scores_as_they_are_and_gradients_nearly():
    policy = _policy()
    policy.prepare_finetuning(2)
    observation = _seen(64)
    latents = policy.act(observation, torch.Generator().manual_seed(3)).latents
    results = {name: _gradient(policy, observation, latents, name) for name in ("fp32", "bf16_backward", "bf16")}
    logp, gradient = results["fp32"]
    assert torch.equal(results["bf16_backward"][0], logp)
    assert not torch.equal(results["bf16"][0], logp)
    for name in ("bf16_backward", "bf16"):
        assert not torch.equal(results[name][1], gradient)
        assert float(torch.cosine_similarity(results[name][1], gradient, 0)) > 0.999


@needs_bf16
def test_only_the_hidden_layers_of_a_critic_are_lowered():
    critic, observation = state_critic(FIELDS, 1, width=32), _seen(50)
    torch.nn.init.normal_(critic.layers[-1].weight)
    exact = critic(observation).detach()
    dtypes: list[torch.dtype] = []
    critic.layers[-1].register_forward_pre_hook(lambda module, inputs: dtypes.append(inputs[0].dtype))
    with training_precision("bf16"):
        values = critic(observation).detach()
    assert values.dtype == torch.float32
    assert dtypes == [torch.float32]
    assert 0 < float((values - exact).abs().max()) < 0.05 * float(exact.abs().max())


def test_nothing_is_lowered_outside_and_the_context_ends_with_errors():
    weight = torch.randn(8, 8)
    with pytest.raises(RuntimeError, match="on the way"), training_precision("bf16"):
        assert is_lowered()
        raise RuntimeError("on the way")
    assert not is_lowered()
    made = weight @ weight
    with training_precision("bf16_backward"):
        assert torch.equal(run_in_training_precision(lambda: weight @ weight, CPU), made)


@needs_bf16
@pytest.mark.parametrize("staleness", [0, 1], ids=["in turns", "in a thread"])
def test_a_run_collects_and_learns_in_bfloat16_and_evaluates_in_fp32(staleness):
    world = BanditWorld(16)
    config = replace(SMALL, chunk=1, prediction_steps=1)
    policy = _policy(config, world.spec.observation, world.spec.action.size)
    policy.prepare_finetuning(2)
    acted, scored, judged = set(), set(), set()
    act, score = DenoisingPolicy._act, DenoisingPolicy.log_prob

    class Watched(DenoisingPolicy):
        def _act(self, *inputs):
            acted.add(is_lowered())
            return act(self, *inputs)

        def log_prob(self, *inputs):
            scored.add(is_lowered())
            return score(self, *inputs)

    policy.__class__ = Watched

    def evaluate(candidate, deterministic):
        judged.add(is_lowered())
        return {"success": 0.0}

    settings = replace(TUNING, precision="bf16", staleness=staleness)
    finetune(policy, state_critic(FIELDS, 1, width=16), world, settings, evaluate=evaluate)
    assert (acted, scored, judged) == ({True}, {True}, {False})
    after = policy.trainable_parameters()
    assert {weight.dtype for weight in after} == {torch.float32}
    assert not is_lowered()


@needs_bf16
def test_regression_in_bfloat16_ends_where_fp32_does():
    def learned(precision) -> tuple[float, torch.Tensor]:
        policy = _policy()
        observation = _seen(128)
        actions = observation[next(iter(FIELDS))].mean((1, 2))[:, None, None].tanh().expand(128, 4, 3)
        batch = {"observation": observation, "actions": actions, "action_valid": torch.ones(128, 4, dtype=torch.bool)}

        def batches():
            while True:
                yield batch

        result = fit(policy, batches(), FitConfig(steps=40, warmup=1), Generators(0), precision=precision)
        return result.losses["denoising"], torch.cat([weight.detach().flatten() for weight in policy.parameters()])

    exact, weights = learned("fp32")
    for precision in ("bf16", "bf16_backward"):
        loss, learned_weights = learned(precision)
        assert loss == pytest.approx(exact, rel=0.02)
        assert learned_weights.dtype == torch.float32
        assert not torch.equal(learned_weights, weights)


def test_a_policy_that_cannot_be_lowered_is_refused_but_learns_backward():
    world, critic = BanditWorld(16), state_critic(FIELDS, 1, width=16)
    if MULTIPLIES:
        with pytest.raises(ConfigError, match="ChainPolicy computes actions and log-probabilities in fp32 only"):
            finetune(ChainPolicy(), critic, world, replace(TUNING, precision="bf16"))
        finetune(ChainPolicy(), critic, world, replace(TUNING, precision="bf16_backward", evaluate_every=0))


def test_a_processor_without_bfloat16_is_refused_and_one_that_imitates_it_named(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    with pytest.warns(RobopolicyWarning, match="only emulates"):
        require_precision("bf16", CPU)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    with pytest.raises(ConfigError, match="which this cpu does not support"):
        require_precision("bf16_backward", CPU)
    with pytest.raises(ConfigError, match="not on mps"):
        require_precision("bf16", torch.device("mps"))
    require_precision("fp32", torch.device("mps"))
