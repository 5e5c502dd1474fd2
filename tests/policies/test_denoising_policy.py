"""The denoising policy: its chain, its scores, its base copy, its losses."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from robopolicy.core.errors import ConfigError, DataError, NonFiniteError, SpecError
from robopolicy.core.spec import Field
from robopolicy.nn.configuration import FlowNoise, ImageEncoderConfig
from robopolicy.policies import DenoisingPolicy, DenoisingPolicyConfig, load_policy
from robopolicy.policies.configuration import LogpReduction, PolicyKind

STATE, CAMERA = "observation.state", "observation.images.front"
FIELDS = {STATE: Field((3,))}
ACTION = Field((2,), low=-1.0, high=1.0)
CONFIG = DenoisingPolicyConfig(width=32, depth=2, sampling_steps=5, denoising_steps=20, chunk=2)


def _policy(config: DenoisingPolicyConfig = CONFIG, fields: Any = None, seed: int = 0) -> DenoisingPolicy:
    generator = torch.Generator().manual_seed(0)
    values = {"action": torch.rand(50, 2, generator=generator) * 2 - 1, STATE: torch.randn(50, 3, generator=generator)}
    return DenoisingPolicy(config, fields or FIELDS, ACTION, fps=10, values=values, seed=seed)


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _observation(batch: int = 6) -> dict[str, Any]:
    return {STATE: torch.randn(batch, 1, 3, generator=_generator())}


def _disturb(policy: DenoisingPolicy, size: float = 0.05) -> None:
    generator = _generator(5)
    with torch.no_grad():
        for weight in policy.trainable_parameters():
            weight.add_(size * torch.randn(weight.shape, generator=generator))


def test_the_chain_starts_at_the_base_and_ends_in_the_action():
    policy = _policy()
    whole = policy.act(_observation(), _generator())
    policy.prepare_finetuning(2)
    part = policy.act(_observation(), _generator())
    assert whole.latents["chain"].shape == (6, 6, 4, 2)
    assert part.latents["chain"].shape == (6, 3, 4, 2)
    assert torch.equal(part.latents["chain"], whole.latents["chain"][:, 3:])
    assert torch.equal(part.actions, whole.actions)
    assert torch.equal(part.logp, whole.logp[:, 3:])
    final = policy.action_normalizer.inverse(part.latents["chain"][:, -1, :2]).clamp(-1, 1)
    assert torch.equal(part.actions, final)


def test_logp_is_the_gaussian_of_the_recorded_step():
    """Against torch.distributions, one step at a time, for both reductions."""
    policy = _policy()
    policy.prepare_finetuning(3)
    observation = _observation()
    decision = policy.act(observation, _generator())
    chain = decision.latents["chain"]
    condition = policy.encode(observation)
    expected = []
    for index, unit in enumerate(range(2, 5)):
        time = policy.schedule.times[unit].expand(6)
        prediction = policy.network.denoise(chain[:, index], time, condition)
        normal = policy.schedule.transition(chain[:, index], prediction, unit)
        distribution = torch.distributions.Normal(normal.mean, normal.std.expand_as(normal.mean).clamp_min(0.1))
        expected.append(distribution.log_prob(chain[:, index + 1])[:, :2].clamp(-5, 2))
    elements = torch.stack(expected, 1)
    assert torch.allclose(decision.logp, elements.mean((-2, -1)), atol=1e-5)
    summed = _policy(replace(CONFIG, logp_reduction=LogpReduction.SUM))
    summed.prepare_finetuning(3)
    assert torch.allclose(summed.act(observation, _generator()).logp, elements.sum((-2, -1)), atol=1e-4)
    assert torch.allclose(
        summed.log_prob(observation, decision.latents).entropy,
        4 * policy.log_prob(observation, decision.latents).entropy,
    )


def test_only_executed_steps_carry_gradient():
    policy = _policy()
    decision = policy.act(_observation(), _generator())
    scores = policy.log_prob(_observation(), decision.latents)
    (gradient,) = torch.autograd.grad(scores.logp.sum(), scores.extras["mean"])
    assert gradient[:, :, :2].abs().sum() > 0
    assert not gradient[:, :, 2:].any()


def test_chosen_units_and_executed_steps_are_scored_alone():
    policy = _policy()
    policy.prepare_finetuning(4)
    observation = _observation()
    latents = policy.act(observation, _generator()).latents
    whole = policy.log_prob(observation, latents)
    chosen = torch.tensor([[3, 0], [1, 1], [2, 3], [0, 1], [3, 2], [0, 3]])
    part = policy.log_prob(observation, {**latents, "chosen": chosen})
    assert torch.allclose(part.logp, whole.logp.gather(1, chosen), atol=1e-5)
    assert torch.allclose(part.entropy, whole.entropy.gather(1, chosen), atol=1e-6)
    executed = torch.ones(6, 2, dtype=torch.bool)
    same = policy.log_prob(observation, {**latents, "executed": executed})
    assert torch.allclose(same.logp, whole.logp, atol=1e-6)
    executed[0, 1] = False
    cut = policy.log_prob(observation, {**latents, "executed": executed})
    short = _policy(replace(CONFIG, chunk=1))
    short.prepare_finetuning(4)
    assert torch.allclose(cut.logp[0], short.log_prob(observation, latents).logp[0], atol=1e-5)
    assert torch.allclose(cut.logp[1:], whole.logp[1:], atol=1e-6)


@pytest.mark.parametrize("kind", [PolicyKind.DIFFUSION, PolicyKind.FLOW])
def test_fine_tuning_changes_the_actions_and_leaves_the_base(kind: PolicyKind):
    config = replace(CONFIG, kind=kind)
    policy, observation = _policy(config), _observation()
    before = policy.act(observation, _generator(), deterministic=True)
    policy.prepare_finetuning(2)
    recorded, base = policy.act(observation, _generator()), copy.deepcopy(policy.base)
    _disturb(policy)
    tuned = policy.act(observation, _generator(), deterministic=True)
    assert (tuned.actions - before.actions).abs().max() > 1e-3
    for kept, now in zip(base.parameters(), policy.base.parameters(), strict=True):
        assert torch.equal(kept, now) and not now.requires_grad
    fresh = policy.act(observation, _generator())
    assert torch.equal(fresh.latents["chain"][:, 0], recorded.latents["chain"][:, 0])  # the base's part of the chain
    scores = policy.log_prob(observation, fresh.latents).logp
    assert torch.allclose(scores, fresh.logp, atol=1e-5)
    assert (policy.log_prob(observation, recorded.latents).logp - recorded.logp).abs().max() > 1e-3


def test_preparing_twice_goes_on_but_never_with_other_units():
    policy = _policy()
    policy.prepare_finetuning()
    assert policy.spec.scored_steps == 3
    base = policy.base
    policy.prepare_finetuning()
    policy.prepare_finetuning(3)
    assert policy.base is base
    with pytest.raises(ConfigError, match="last 3 steps, not 2"):
        policy.prepare_finetuning(2)
    assert _policy(replace(CONFIG, finetuned_steps=1)).finetuning is None


@pytest.mark.parametrize(
    ("config", "latents"),
    [
        (CONFIG, 0),
        (CONFIG, 6),
        (replace(CONFIG, kind=PolicyKind.FLOW, flow_noise=FlowNoise.ODE), 5),
        (replace(CONFIG, kind=PolicyKind.FLOW, flow_noise=FlowNoise.SDE), 1),
        (replace(CONFIG, eta=0.0, min_sampling_std=0.0), 5),
    ],
)
def test_fine_tuning_what_cannot_be_scored_is_refused(config: DenoisingPolicyConfig, latents: int):
    policy = _policy(config)
    with pytest.raises(ConfigError):
        policy.prepare_finetuning(latents)
    assert policy.base is None


def test_the_last_step_of_flow_sde_is_masked_out():
    policy = _policy(replace(CONFIG, kind=PolicyKind.FLOW, flow_noise=FlowNoise.SDE))
    policy.prepare_finetuning(3)
    decision = policy.act(_observation(), _generator())
    assert decision.mask.tolist() == [[True, True, False]] * 6
    _disturb(policy)
    logp = policy.log_prob(_observation(), decision.latents).logp
    assert not logp[:, 2].any()
    assert logp.isfinite().all()


def test_deterministic_decisions_have_no_noise_and_no_choice():
    policy = _policy()
    decision = policy.act(_observation(), _generator(), deterministic=True)
    assert not decision.mask.any() and not decision.logp.any()
    spread = policy.act(_observation(), _generator())
    assert torch.equal(decision.latents["chain"][:, 0], spread.latents["chain"][:, 0])
    assert not torch.equal(decision.actions, spread.actions)


def test_clamps_are_counted():
    policy = _policy(replace(CONFIG, logp_clamp=(-1.0, 0.0), clip=0.1))
    decision = policy.act(_observation(), _generator())
    extras = policy.log_prob(_observation(), decision.latents).extras
    assert 0 < extras["logp_clamped"].mean() < 1
    assert 0 < extras["clean_clipped"].mean() < 1
    assert extras["clean_clipped"].shape == decision.logp.shape
    free = _policy(replace(CONFIG, logp_clamp=None, clip=None))
    extras = free.log_prob(_observation(), free.act(_observation(), _generator()).latents).extras
    assert not extras["logp_clamped"].any() and not extras["clean_clipped"].any()


def test_padding_is_not_learned():
    policy = _policy()
    valid = torch.ones(6, 4, dtype=torch.bool)
    valid[:, 2:] = False
    actions = torch.rand(6, 4, 2, generator=_generator()) * 2 - 1
    batch = {"observation": _observation(), "actions": actions, "action_valid": valid}
    losses = policy.loss(batch, _generator())["denoising"]
    assert losses.shape == (6,)
    none = policy.loss({**batch, "action_valid": torch.zeros_like(valid)}, _generator())["denoising"]
    assert not none.any()
    whole = policy.loss({**batch, "action_valid": torch.ones_like(valid)}, _generator())["denoising"]
    tail = policy.loss({**batch, "action_valid": ~valid}, _generator())["denoising"]
    assert torch.allclose((losses + tail) / 2, whole, atol=1e-5)


def test_bad_batches_and_chains_are_refused():
    policy = _policy()
    batch = {
        "observation": _observation(),
        "actions": torch.zeros(6, 4, 2),
        "action_valid": torch.ones(6, 4, dtype=torch.bool),
    }
    with pytest.raises(SpecError, match="chunks"):
        policy.loss({**batch, "actions": torch.zeros(6, 3, 2)}, _generator())
    with pytest.raises(NonFiniteError, match="actions"):
        policy.loss({**batch, "actions": torch.full((6, 4, 2), float("nan"))}, _generator())
    with pytest.raises(SpecError, match="chain"):
        policy.log_prob(_observation(), {"chain": torch.zeros(6, 3, 4, 2)})
    with pytest.raises(ConfigError, match=r"observation\.state"):
        DenoisingPolicy(replace(CONFIG, observation_keys=("observation.stat",)), FIELDS, ACTION, fps=10)
    with pytest.raises(ConfigError, match="no data to normalise"):
        policy.fit_normalizers({STATE: torch.zeros(4, 3)})
    with pytest.raises(DataError):
        policy.fit_normalizers({STATE: torch.zeros(4, 3), "action": torch.zeros(4, 3)})
    policy.prepare_finetuning(2)
    with pytest.raises(ConfigError, match="fixed after"):
        policy.fit_normalizers({STATE: torch.zeros(4, 3), "action": torch.zeros(4, 2)})


def test_a_policy_with_broken_weights_never_returns_an_action():
    policy = _policy()
    with torch.no_grad():
        policy.network.denoiser.head.bias.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="actions"):
        policy.act(_observation(), _generator())


@pytest.mark.parametrize(
    "change",
    [
        {"chunk": 5},
        {"chunk": 0},
        {"history": 0},
        {"clip": 0.0},
        {"noise_clip": -1.0},
        {"min_sampling_std": -0.1},
        {"logp_clamp": (2.0, -5.0)},
        {"finetuned_steps": 6},
    ],
)
def test_contradictory_configurations_are_refused(change: dict[str, Any]):
    with pytest.raises(ConfigError):
        replace(CONFIG, **change)


IMAGES = replace(CONFIG, image=ImageEncoderConfig(features=8, channels=(8, 8, 8)))


def _seeing(config: DenoisingPolicyConfig = IMAGES) -> tuple[DenoisingPolicy, dict[str, Any]]:
    """Return a policy with a camera, and what it sees."""
    observation = _observation()
    observation[CAMERA] = torch.randint(0, 256, (6, 1, 32, 32, 3), generator=_generator(), dtype=torch.uint8)
    return _policy(config, {**FIELDS, CAMERA: Field((32, 32, 3), "uint8", 0, 255)}), observation


def _encodings(policy: DenoisingPolicy, observation: dict[str, Any]) -> list[str]:
    """Return which of the policy's encoders a decision uses, in order."""
    used: list[str] = []
    hooks = [
        network.encoder.register_forward_hook(lambda *_, name=name: used.append(name))
        for name, network in (("network", policy.network), ("base", policy.base))
    ]
    policy.act(observation, _generator())
    for hook in hooks:
        hook.remove()
    return used


def test_a_frozen_image_encoder_lets_evaluation_skip_the_images():
    policy, observation = _seeing()
    policy.prepare_finetuning(3)
    assert set(policy.act(observation, _generator()).latents) == {"chain"}
    policy, observation = _seeing()
    policy.prepare_finetuning(3, train_encoder=False)
    decision = policy.act(observation, _generator())
    assert torch.equal(decision.latents["condition"], policy.encode(observation)["condition"])
    scores = policy.log_prob({}, decision.latents).logp
    assert torch.allclose(scores, decision.logp, atol=1e-5)
    names = {name for name, weight in policy.network.named_parameters() if weight.requires_grad}
    assert names and not any(name.startswith("encoder") for name in names)


def test_an_encoder_that_has_learned_can_be_frozen_when_tuning_goes_on(tmp_path):
    policy, observation = _seeing()
    policy.prepare_finetuning(3)
    _disturb(policy)
    policy.save(tmp_path)
    again: Any = load_policy(tmp_path)
    again.prepare_finetuning(None, train_encoder=False)
    assert not any(weight.requires_grad for weight in again.network.encoder_parameters())
    assert again.trainable_parameters() and _encodings(again, observation) == ["network", "base"]


def test_a_frozen_encoder_encodes_once_in_a_decision():
    policy, observation = _seeing()
    policy.prepare_finetuning(3, train_encoder=False)
    _disturb(policy)
    assert _encodings(policy, observation) == ["network"]
    once = policy.act(observation, _generator())
    policy._train_encoder = True  # as if it could have learned: the base then looks for itself, and sees the same
    policy.network.requires_grad_(True)
    assert _encodings(policy, observation) == ["network", "base"]
    twice = policy.act(observation, _generator())
    assert torch.equal(once.actions, twice.actions) and torch.equal(once.logp, twice.logp)
    fixed, observation = _seeing(replace(IMAGES, image=replace(IMAGES.image, frozen=True)))
    fixed.prepare_finetuning(3)
    assert _encodings(fixed, observation) == ["network"]


def test_an_encoder_that_learns_leaves_the_base_its_own_also_in_a_frozen_copy():
    """Collecting beside the learner acts with a copy that requires no gradients, whose encoder has learned."""
    policy, observation = _seeing()
    policy.prepare_finetuning(3)
    _disturb(policy)
    frozen = copy.deepcopy(policy).requires_grad_(False)
    assert _encodings(frozen, observation) == ["network", "base"]
    first, second = policy.act(observation, _generator()), frozen.act(observation, _generator())
    assert torch.equal(first.actions, second.actions) and torch.equal(first.logp, second.logp)
    assert set(second.latents) == {"chain"}  # nothing that another copy could take for its own encoding


def test_building_is_seeded_and_leaves_global_randomness_alone():
    state = torch.get_rng_state()
    first, second, other = _policy(), _policy(), _policy(seed=1)
    assert torch.equal(state, torch.get_rng_state())
    for left, right in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(left, right)
    assert not all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


@pytest.mark.long
@pytest.mark.parametrize("kind", [PolicyKind.DIFFUSION, PolicyKind.FLOW])
def test_imitation_learns_both_modes(kind: PolicyKind):
    """Actions are +-0.7 at random: a regression would learn 0; which mode comes out depends on the noise alone."""
    generator = _generator()
    config = replace(CONFIG, kind=kind, width=64, depth=3, sampling_steps=10, denoising_steps=50, chunk=4)
    policy = _policy(config)
    optimizer = torch.optim.AdamW(policy.trainable_parameters(), lr=2e-3)
    for _ in range(400):
        sign = torch.randint(0, 2, (128, 1, 1), generator=generator) * 2.0 - 1
        batch = {
            "observation": {STATE: torch.randn(128, 1, 3, generator=generator)},
            "actions": (0.7 * sign).expand(128, 4, 2),
            "action_valid": torch.ones(128, 4, dtype=torch.bool),
        }
        loss = policy.loss(batch, generator)["denoising"].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    actions = policy.act(_observation(256), generator, deterministic=True).actions
    assert ((actions.abs() - 0.7).abs() < 0.15).float().mean() > 0.9
    assert 0.3 < (actions[:, 0, 0] > 0).float().mean() < 0.7


def test_a_sample_at_several_noise_levels_is_the_mean_of_as_many_samples(monkeypatch):
    """Of the same draws, in value and gradient; and what is seen is encoded once a sample."""
    single, several = _policy(), _policy(replace(CONFIG, levels_per_sample=3))
    actions = torch.rand(6, 4, 2, generator=_generator(2)) * 2 - 1
    valid = torch.rand(6, 4, generator=_generator(3)) < 0.7
    batch = {"observation": _observation(), "actions": actions, "action_valid": valid}
    repeated = {
        "observation": {STATE: batch["observation"][STATE].repeat_interleave(3, 0)},
        "actions": actions.repeat_interleave(3, 0),
        "action_valid": valid.repeat_interleave(3, 0),
    }
    rows, encode = [], several.network.encode
    monkeypatch.setattr(
        several.network, "encode", lambda seen, *rest: (rows.append(len(seen[STATE])), encode(seen, *rest))[1]
    )
    expected = single.loss(repeated, _generator(4))["denoising"].view(6, 3).mean(1)
    loss = several.loss(batch, _generator(4))["denoising"]
    torch.testing.assert_close(loss, expected)
    assert rows == [6]
    expected.sum().backward()
    loss.sum().backward()
    for one, other in zip(single.network.parameters(), several.network.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, atol=1e-5, rtol=1e-4)
    with pytest.raises(ConfigError, match="must be at least 1"):
        replace(CONFIG, levels_per_sample=0)
