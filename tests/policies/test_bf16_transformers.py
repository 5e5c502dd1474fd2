"""LeRobot's policies and token policies learn in bfloat16: scored again as they acted, log-probabilities in fp32."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lerobot_models import FRONT, smolvla_config
from test_lerobot_policies import features, save
from test_lerobot_training import KINDS, folders, observed  # noqa: F401 the fixture is used by its name
from token_toys import TOKEN, disturb, generator, make_tokens, observe

from robopolicy.building.policies import load_trainable
from robopolicy.cli import main
from robopolicy.core.policy import SupportsMixedPrecision, is_condition
from robopolicy.nn.micro_batches import in_micro_batches, scores_of
from robopolicy.nn.precision import (
    ROUNDING,
    as_cached,
    backward_precision,
    cast_for_cache,
    tolerance_in,
    training_precision,
)
from robopolicy.policies.lerobot.configuration import LeRobotTuning, TrainableWeights
from robopolicy.policies.token.configuration import TokenDecoding
from robopolicy.rl.critic import state_critic
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.finetune import finetune
from robopolicy.training.memory import plan_memory
from sims.registry import make_world

CANNOT = not torch.ops.mkldnn._is_mkldnn_bf16_supported()
pytestmark = [pytest.mark.long, pytest.mark.skipif(CANNOT, reason="this CPU does not multiply bfloat16")]


def repeated(observation: dict, latents: dict, times: int) -> tuple[dict, dict]:
    rows = torch.arange(len(next(iter(latents.values())))).repeat(times)
    first_observation = {
        key: value[rows] if isinstance(value, torch.Tensor) else [value[row] for row in rows.tolist()]
        for key, value in observation.items()
    }
    return first_observation, {name: value[rows] for name, value in latents.items()}


def scored_again(policy: Any, observation: dict, times: int = 5) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Return a decision in bfloat16, how far its scores are from those of several copies of it, and from fp32's."""
    with training_precision("bf16"), torch.no_grad():
        decision = policy.act(observation, torch.Generator().manual_seed(3))
        again = policy.log_prob(*repeated(observation, decision.latents, times)).logp
    assert decision.logp.dtype == again.dtype == torch.float32
    with torch.no_grad():
        exact = policy.log_prob(observation, decision.latents).logp
    mask = decision.mask
    apart = torch.where(mask.repeat(times, 1), again - decision.logp.repeat(times, 1), 0.0).abs().max()
    return decision, apart, torch.where(mask, exact - decision.logp, 0.0).abs().max()


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "read again"])
@pytest.mark.parametrize("kind", KINDS)
def test_lerobots_policies_are_scored_as_they_acted(folders, kind, kept):  # noqa: F811
    policy = load_trainable(folders[kind], LeRobotTuning(cache_encoder_outputs=kept))
    policy.prepare_finetuning()
    assert isinstance(policy, SupportsMixedPrecision)
    decision, apart, moved = scored_again(policy, observed(policy))
    assert float(apart) <= tolerance_in("bf16", 1e-5)
    assert 0 < float(moved) < 2 * ROUNDING  # another rounding, not another policy
    condition = {name: value for name, value in decision.latents.items() if is_condition(name)}
    assert bool(condition) == kept
    dtypes = {value.dtype for value in condition.values()} - {torch.bool}
    assert dtypes == ({torch.bfloat16} if kept else set())


@pytest.mark.parametrize("decoding", list(TokenDecoding), ids=lambda each: each.value)
def test_token_policies_are_scored_as_they_acted(decoding):
    policy = disturb(make_tokens(replace(TOKEN, decoding=decoding)))
    policy.prepare_finetuning()
    _, apart, moved = scored_again(policy, observe(9))
    assert float(apart) <= tolerance_in("bf16", 1e-5)
    assert 0 < float(moved) < 2 * ROUNDING


def test_transformers_multiply_in_bfloat16_and_heads_in_fp32():
    policy, dtypes = make_tokens(TOKEN), {}
    policy.prepare_finetuning()

    def watch(name: str, module: torch.nn.Module) -> None:
        module.register_forward_hook(lambda module, inputs, made: dtypes.setdefault(name, set()).add(made.dtype))

    watch("attention", policy.language.backbone.layers[0].self_attn.k_proj)
    watch("hidden", policy.language.backbone.layers[1].mlp.down_proj)
    watch("head", policy.head)
    decision = policy.act(observe(), generator())
    assert set(map(frozenset, dtypes.values())) == {frozenset({torch.float32})} and len(dtypes) == 3
    dtypes.clear()
    with training_precision("bf16"):
        policy.log_prob(observe(), decision.latents).logp.sum().backward()
    assert dtypes == {"attention": {torch.bfloat16}, "hidden": {torch.bfloat16}, "head": {torch.float32}}
    assert {weight.grad.dtype for weight in policy.trainable_parameters() if weight.grad is not None} == {torch.float32}


def gradient(policy: Any, observation: dict, latents: dict, precision: Any) -> torch.Tensor:
    policy.zero_grad(set_to_none=True)
    with training_precision(precision):
        logp = scores_of(policy, observation, latents).logp
    with backward_precision(precision):
        (logp * torch.linspace(-1, 1, logp.numel()).view_as(logp)).sum().backward()
    grads = [weight.grad for weight in policy.trainable_parameters() if weight.grad is not None]
    assert {grad.dtype for grad in grads} == {torch.float32}
    return torch.cat([grad.flatten() for grad in grads])


def test_gradients_are_nearly_those_of_fp32_and_the_same_where_steps_are_computed_again(folders):  # noqa: F811
    gradients = {}
    for checkpointing in (False, True):
        policy = load_trainable(
            folders["smolvla"], LeRobotTuning(gradient_checkpointing=checkpointing, trainable=TrainableWeights.ALL)
        )
        policy.prepare_finetuning()
        observation = observed(policy)
        latents = policy.act(observation, torch.Generator().manual_seed(3)).latents
        for precision in ("fp32", "bf16", "bf16_backward"):
            gradients[checkpointing, precision] = gradient(policy, observation, latents, precision)
            with in_micro_batches(2):
                pieces = gradient(policy, observation, latents, precision)
            torch.testing.assert_close(pieces, gradients[checkpointing, precision], rtol=0.05, atol=0.02)
    exact = gradients[False, "fp32"]
    for precision in ("bf16", "bf16_backward"):
        assert not torch.equal(gradients[False, precision], exact)
        assert float(torch.cosine_similarity(gradients[False, precision], exact, 0)) > 0.99
        torch.testing.assert_close(gradients[True, precision], gradients[False, precision], rtol=0.05, atol=0.02)


def test_what_was_kept_in_bfloat16_is_read_in_fp32_too(folders):  # noqa: F811
    policy = load_trainable(folders["pi0"], LeRobotTuning())
    policy.prepare_finetuning()
    observation = observed(policy)
    with training_precision("bf16"):
        decision = policy.act(observation, torch.Generator().manual_seed(3))
        made = {"condition": torch.ones(2), "condition.mask": torch.ones(2, dtype=torch.bool)}
        kept = cast_for_cache(made)
        assert [value.dtype for value in kept.values()] == [torch.bfloat16, torch.bool]
    assert cast_for_cache(made) is made
    again = policy.log_prob(observation, decision.latents).logp.detach()
    assert float((again - decision.logp)[decision.mask].abs().max()) < 2 * ROUNDING
    assert as_cached(kept, policy)["condition"].dtype is torch.float32
    assert as_cached(kept, torch.nn.Linear(1, 1, dtype=torch.bfloat16)) is kept, "it was in bfloat16 by itself"


def test_kept_prefixes_take_half_in_the_budget(folders):  # noqa: F811
    policy = load_trainable(folders["smolvla"], LeRobotTuning())
    policy.prepare_finetuning()
    plain = plan_memory(policy, 8, 8, images=False)
    with training_precision("bf16"):
        lowered = plan_memory(policy, 8, 8, images=False)
    prefix = 2 * 4 * (4 + 8 + 1) * 16 * 2  # keys and values, layers, tokens, size, bytes saved of each number
    assert plain.kept - lowered.kept == 2 * 8 * prefix
    assert lowered.activations < plain.activations


def test_an_iteration_in_bfloat16_leaves_weights_in_fp32(folders, tmp_path):  # noqa: F811
    inputs, outputs = features(state=6, environment=None, cameras=(FRONT,))
    vlm = json.loads((folders["smolvla"] / "config.json").read_text())["vlm_model_name"]
    folder = save(smolvla_config(Path(vlm), inputs, outputs), tmp_path / "smolvla")
    policy = load_trainable(folder, LeRobotTuning())
    policy.prepare_finetuning()
    world = make_world("push_cube", 2, cameras=("front",), image_size=32)
    before = torch.cat([weight.detach().flatten() for weight in policy.trainable_parameters()])
    config = FinetuneConfig(
        iterations=1, rollout_length=2, epochs=1, critic_warmup=0, precision="bf16", minibatch=4, micro_batch=3
    )
    finetune(policy, state_critic(world.spec.observation, 1, 8, 1, world.spec.instructions), world, config)
    world.close()
    after = torch.cat([weight.detach().flatten() for weight in policy.trainable_parameters()])
    assert after.dtype == torch.float32 and not torch.equal(after, before)
    command = ["finetune", f"finetune.policy={folder}", "world=push_cube", "world.cameras=[front]"]
    command += ["world.image_size=32", "finetune.dry_run=true", "finetune.num_envs=2"]
    assert main([*command, "finetune.precision=bf16", f"run.root={tmp_path}"]) == 0
