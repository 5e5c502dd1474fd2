"""Engines decide as the policy itself: over random configurations, with noise and without, before and after tuning."""

import copy
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from robopolicy.core.errors import ConfigError, NonFiniteError, SpecError
from robopolicy.core.spec import Field
from robopolicy.inference import lean
from robopolicy.inference.caching import CachePlan
from robopolicy.inference.configuration import InferenceConfig
from robopolicy.inference.engine import with_engine
from robopolicy.nn.configuration import DenoiserKind, FlowNoise, ImageEncoderConfig, Prediction, Spacing
from robopolicy.policies import DenoisingPolicy, DenoisingPolicyConfig
from robopolicy.policies.configuration import Likelihood, PolicyKind, TextEncoder
from robopolicy.policies.token.configuration import TokenConfig, TokenDecoding, TokenPolicyConfig
from robopolicy.policies.token.policy import TokenPolicy
from robopolicy.testing.policy import check_policy

STATE, GOAL, CAMERA = "observation.state", "observation.environment_state", "observation.images.front"
LEAN = InferenceConfig("lean")
TASKS = ("push the red cube", "push the blue cube")
ACTION = Field((2,), low=-1.0, high=1.0)


def _policy(config: DenoisingPolicyConfig, camera: bool = False) -> DenoisingPolicy:
    fields = {STATE: Field((3,)), GOAL: Field((2,))} | ({CAMERA: Field((16, 16, 3), dtype="uint8")} if camera else {})
    draws = torch.Generator().manual_seed(0)
    values = {key: torch.randn(50, *fields[key].shape, generator=draws) for key in (STATE, GOAL)}
    values["action"] = torch.rand(50, 2, generator=draws) * 2 - 1
    return DenoisingPolicy(config, fields, ACTION, fps=10, values=values, instructions=TASKS)


def _seen(policy: DenoisingPolicy, rows: int = 5) -> dict[str, Any]:
    draws = torch.Generator().manual_seed(3)
    observation: dict[str, Any] = {"task": [TASKS[place % 2] for place in range(rows)]}
    for key, field in policy.fields.items():
        shape = (rows, policy.config.history, *field.shape)
        image = key == CAMERA
        observation[key] = (
            torch.randint(256, shape, generator=draws).byte() if image else torch.randn(shape, generator=draws)
        )
    return observation


def _random(seed: int) -> tuple[DenoisingPolicyConfig, bool, int | None]:
    """A configuration, whether it sees images, and how many steps are fine-tuned (None: it is not)."""
    draw = random.Random(seed)
    kind = draw.choice(list(PolicyKind))
    steps = draw.randint(1, 6)
    config = DenoisingPolicyConfig(
        kind=kind,
        denoiser=draw.choice(list(DenoiserKind)),
        width=16,
        depth=2,
        heads=2,
        chunk=draw.choice([2, 4]),
        prediction_steps=4,
        history=draw.choice([1, 2]),
        denoising_steps=20,
        sampling_steps=steps,
        prediction=draw.choice(list(Prediction)),
        timestep_spacing=draw.choice(list(Spacing)),
        eta=draw.choice([0.0, 0.5, 1.0]),
        clip=draw.choice([None, 1.0]),
        noise_clip=draw.choice([None, 2.0]),
        flow_noise=draw.choice([FlowNoise.SDE, FlowNoise.CONSTANT, FlowNoise.LEARNED]),
        noisy_steps=draw.choice([None, None, 1]),
        text_encoder=draw.choice([TextEncoder.NONE, TextEncoder.WORDS]),
        image=ImageEncoderConfig(channels=(8,), features=4, frozen=draw.random() < 0.5),
        likelihood=draw.choice([Likelihood.CHAIN, Likelihood.CHAIN, Likelihood.MATCHING]),
    )
    tuned = draw.choice([None, steps, max(1, steps - 1)])
    return config, draw.random() < 0.4, tuned


def _tune(policy: DenoisingPolicy, steps: int | None) -> None:
    """Let the policy differ from its base, as fine-tuning does."""
    if steps is None:
        return
    try:
        policy.prepare_finetuning(steps)
    except ConfigError:  # no step of these has a density
        return
    draws = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in policy.trainable_parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=draws))


@pytest.mark.parametrize("seed", range(30))
def test_lean_decides_as_the_reference_over_random_configurations(seed: int):
    config, camera, tuned = _random(seed)
    policy = _policy(config, camera)
    _tune(policy, tuned)
    fast = with_engine(policy, LEAN)
    for rows, deterministic in ((5, True), (5, False), (1, True), (1, False)):
        observation = _seen(policy, rows)
        own = policy.act(observation, torch.Generator().manual_seed(7), deterministic=deterministic).actions
        fast_actions = fast.act(observation, torch.Generator().manual_seed(7), deterministic=deterministic).actions
        assert torch.allclose(fast_actions, own, atol=1e-5), (config, rows, deterministic)
    plans = [
        each.predict(_seen(policy), torch.Generator().manual_seed(7), deterministic=True) for each in (policy, fast)
    ]
    assert plans[0].shape[1] == config.prediction_steps and torch.allclose(*plans, atol=1e-5)


@pytest.mark.parametrize("denoiser", [DenoiserKind.MLP, DenoiserKind.TRANSFORMER])
@pytest.mark.parametrize("steps", [1, 4])
def test_a_table_that_would_be_too_large_is_not_filled(
    denoiser: DenoiserKind, steps: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(lean, "CONTEXTS", 0)
    policy = _policy(DenoisingPolicyConfig(denoiser=denoiser, width=16, depth=2, heads=2, sampling_steps=steps))
    own, actions = (
        each.act(_seen(policy), torch.Generator().manual_seed(7), deterministic=True).actions
        for each in (policy, with_engine(policy, LEAN))
    )
    assert torch.allclose(actions, own, atol=1e-5)


def test_tables_follow_the_weights():
    """A policy that is trained on behind an engine's back is not answered for by old tables."""
    policy = _policy(DenoisingPolicyConfig(width=16, depth=2, sampling_steps=3, denoising_steps=20, chunk=2))
    fast, before = with_engine(policy, LEAN), copy.deepcopy(policy)
    fast.act(_seen(policy), torch.Generator())
    _tune(policy, 3)
    with torch.no_grad():
        policy.network.encoder.normalizer(STATE).offset.add_(1.0)  # type: ignore[attr-defined]
    draws = [torch.Generator().manual_seed(7) for _ in range(3)]
    own, actions, old = (
        each.act(_seen(policy), draw, deterministic=True).actions
        for each, draw in zip((policy, fast, before), draws, strict=True)
    )
    assert torch.allclose(actions, own, atol=1e-5) and not torch.allclose(actions, old, atol=1e-3)


def test_an_engine_keeps_the_promises_of_a_policy_and_refuses_what_the_policy_refuses():
    policy = _policy(DenoisingPolicyConfig(width=16, depth=2, sampling_steps=3, denoising_steps=20, chunk=2))
    fast, observation = with_engine(policy, LEAN), _seen(policy)
    check_policy(fast)
    bad: list[tuple[dict[str, Any], type[Exception]]] = [
        ({STATE: observation[STATE] * float("nan")}, NonFiniteError),
        ({STATE: observation[STATE][..., :2]}, SpecError),
        ({GOAL: observation[GOAL][:2]}, SpecError),
    ]
    for change, kind in bad:
        with pytest.raises(kind, match="observation"):
            fast.act({**observation, **change}, torch.Generator())
    with pytest.raises(SpecError, match="no field"):
        fast.act({STATE: observation[STATE]}, torch.Generator())


def test_bfloat16_is_near_and_is_not_the_same():
    policy = _policy(DenoisingPolicyConfig(width=64, depth=3, sampling_steps=5, denoising_steps=20, chunk=2))
    fast = with_engine(policy, replace(LEAN, precision="bf16"))
    own, actions = (
        each.act(_seen(policy), torch.Generator().manual_seed(7), deterministic=True).actions for each in (policy, fast)
    )
    assert 0 < float((own - actions).abs().max()) < 0.05
    assert policy.network.denoiser.head.weight.dtype is torch.float32  # type: ignore[attr-defined]


@pytest.mark.parametrize("denoiser", list(DenoiserKind))
def test_a_plan_that_computes_everything_changes_nothing(denoiser: DenoiserKind):
    config = DenoisingPolicyConfig(denoiser=denoiser, width=16, depth=2, heads=2, sampling_steps=5, denoising_steps=20)
    policy = _policy(config)
    _tune(policy, 3)
    names = policy.network.denoiser.block_names  # type: ignore[attr-defined]
    whole = CachePlan.of(names, torch.ones(len(names), 5, dtype=torch.bool))
    cached = CachePlan.of(names, torch.tensor([[True, False, True, False, True]] * len(names)))
    own, same, other = (
        each.act(_seen(policy), torch.Generator().manual_seed(7), deterministic=True).actions
        for each in (policy, with_engine(policy, LEAN, whole), with_engine(policy, LEAN, cached))
    )
    assert torch.allclose(own, same, atol=1e-5) and not torch.allclose(own, other, atol=1e-4)
    with pytest.raises(ConfigError, match="another network"):
        with_engine(policy, LEAN, CachePlan.of(("nowhere",), torch.ones(1, 5, dtype=torch.bool))).act(
            _seen(policy), torch.Generator()
        )


def test_what_cannot_be_is_refused_with_a_way_out():
    policy = _policy(DenoisingPolicyConfig(width=16, depth=2, sampling_steps=3, denoising_steps=20))
    with pytest.raises(ConfigError, match=r"There is no engine 'leen'.*lean"):
        with_engine(policy, InferenceConfig("leen"))
    with pytest.raises(ConfigError, match="engine=lean"):
        InferenceConfig("reference", sampler="ddim")
    with pytest.raises(ConfigError, match="is a sampler for flow policies"):
        with_engine(policy, replace(LEAN, sampler="euler"))
    with pytest.raises(ConfigError, match="denoising policies"):
        with_engine(_Still(policy), LEAN)


class _Still:
    """A policy of another kind."""

    def __init__(self, policy: DenoisingPolicy):
        self.spec, self.act, self.reset = policy.spec, policy.act, policy.reset


def test_without_a_compiler_the_compiled_engine_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"C\+\+ compiler.*engine=lean"):
        with_engine(_policy(DenoisingPolicyConfig(width=16, depth=2, chunk=2)), InferenceConfig("compiled"))


@pytest.mark.slow
@pytest.mark.parametrize("denoiser", [DenoiserKind.MLP, DenoiserKind.TRANSFORMER])
def test_compiled_decides_as_the_reference_for_any_number_of_rows(denoiser: DenoiserKind, tmp_path: Path):
    config = DenoisingPolicyConfig(denoiser=denoiser, width=16, depth=2, heads=2, sampling_steps=3, denoising_steps=20)
    policy = _policy(config)
    _tune(policy, 2)
    fast = with_engine(policy, InferenceConfig("compiled"))
    for rows, deterministic in ((1, True), (3, True), (4, True), (3, False)):
        observation = _seen(policy, rows)
        own = policy.act(observation, torch.Generator().manual_seed(7), deterministic=deterministic).actions
        fast_actions = fast.act(observation, torch.Generator().manual_seed(7), deterministic=deterministic).actions
        assert torch.allclose(fast_actions, own, atol=1e-5), (rows, deterministic)


@pytest.mark.parametrize("decoding", list(TokenDecoding))
def test_token_policies_read_an_instruction_once(decoding: TokenDecoding, monkeypatch: pytest.MonkeyPatch):
    """The tokens are the policy's own, whatever was read before; other weights are read anew."""
    fields = {STATE: Field((3,)), GOAL: Field((2,))}
    token = TokenConfig(width=16, depth=1, heads=2, feed_forward=32, bins=5, decoding=decoding)
    policy = TokenPolicy(TokenPolicyConfig(chunk=2, token=token), fields, ACTION, fps=10, instructions=TASKS)
    fast, observation = (
        with_engine(policy, LEAN),
        {key: torch.randn(5, 1, *field.shape) for key, field in fields.items()},
    )
    reads: list[int] = []
    read = policy.language.read
    monkeypatch.setattr(policy.language, "read", lambda *given: (reads.append(1), read(*given))[1])
    for texts in (TASKS[:1] * 5, [TASKS[place % 2] for place in range(5)], TASKS[:1] * 5):
        both = [
            each.act({**observation, "task": list(texts)}, torch.Generator().manual_seed(7)).actions
            for each in (policy, fast)
        ]
        assert torch.equal(*both)
    assert len(reads) == 3 + 2
    with torch.no_grad():
        policy.head.weight.mul_(-1)
    both = [
        each.act({**observation, "task": list(TASKS[:1] * 5)}, torch.Generator()).actions for each in (policy, fast)
    ]
    assert torch.equal(*both) and len(reads) == 5 + 2


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_stream_of_decisions_scored_by_matching_is_that_of_the_reference(deterministic: bool):
    policy = _policy(DenoisingPolicyConfig(width=16, depth=2, sampling_steps=3, likelihood=Likelihood.MATCHING))
    streams = [torch.Generator().manual_seed(7) for _ in range(2)]
    for _ in range(3):
        own, actions = (
            each.act(_seen(policy), stream, deterministic=deterministic).actions
            for each, stream in zip((policy, with_engine(policy, LEAN)), streams, strict=True)
        )
        assert torch.allclose(actions, own, atol=1e-5)


@pytest.mark.parametrize("cached", [True, False])
def test_what_explores_takes_the_policys_own_chain(cached: bool):
    """Another sampler or remembered blocks would take away its noise, or cost what nobody has measured."""
    policy = _policy(DenoisingPolicyConfig(width=16, depth=2, sampling_steps=6))
    steps = 6 if cached else 2
    updates = torch.zeros(len(policy.network.denoiser.block_names), steps, dtype=torch.bool)
    updates[:, 0] = True
    plan = CachePlan.of(policy.network.denoiser.block_names, updates) if cached else None
    fast = with_engine(policy, LEAN if cached else replace(LEAN, sampler="ddim", steps=steps), plan)
    errors = {
        quiet: (
            fast.act(_seen(policy), torch.Generator().manual_seed(7), deterministic=quiet).actions
            - policy.act(_seen(policy), torch.Generator().manual_seed(7), deterministic=quiet).actions
        )
        for quiet in (True, False)
    }
    assert errors[False].abs().max() < 1e-5 < 1e-3 < errors[True].abs().max()


@pytest.mark.parametrize("denoiser", list(DenoiserKind))
def test_nobody_may_decide(denoiser: DenoiserKind):
    policy = _policy(DenoisingPolicyConfig(denoiser=denoiser, width=16, depth=2, heads=2, sampling_steps=2))
    actions = with_engine(policy, LEAN).act(_seen(policy, rows=0), torch.Generator(), deterministic=True).actions
    assert actions.shape == (0, policy.spec.chunk, 2)
