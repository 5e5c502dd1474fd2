"""`check_policy`: every promise of the `Policy` protocol that can be tested from outside, on any policy."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from robopolicy.core.errors import NonFiniteError, RobopolicyError, SpecError
from robopolicy.core.policy import Decision, Policy, TensorObservation
from robopolicy.core.spec import TASK, PolicySpec

TOLERANCE = 1e-5


def example_observation(
    spec: PolicySpec, batch: int, generator: torch.Generator, device: torch.device | str = "cpu"
) -> TensorObservation:
    """Return a random observation that fits `spec`: floats uniform in the field's range within [-1, 1]."""
    observation: TensorObservation = {TASK: [spec.instructions[row % len(spec.instructions)] for row in range(batch)]}
    for key, field in spec.observation.items():
        shape = (batch, spec.history, *field.shape)
        if field.dtype == "uint8":
            value = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        else:
            low = torch.tensor(field.low).expand(field.shape).clamp(-1, 1)
            high = torch.tensor(field.high).expand(field.shape).clamp(-1, 1)
            value = (low + (high - low) * torch.rand(shape, generator=generator)).float()
        observation[key] = value.to(device)
    return observation


def check_policy(
    policy: Policy,
    load: Callable[[Path], Policy] | None = None,
    *,
    batch: int = 6,
    device: torch.device | str = "cpu",
) -> None:
    """Raise AssertionError naming the first promise of `Policy` that `policy` breaks.

    Checked: shapes, types, ranges and finiteness of decisions; equal generators give equal decisions and nothing draws
    from global randomness; `evaluate` gives `act`'s log-probabilities to 1e-5, treats rows apart, and has gradients;
    train and eval mode agree; observations stay untouched; bad observations raise SpecError or NonFiniteError; and,
    given `load`, a saved policy decides bitwise alike.
    """
    assert isinstance(policy, Policy), f"{type(policy).__name__} lacks a method of the Policy protocol"
    observation = example_observation(policy.spec, batch, torch.Generator().manual_seed(0), device)
    for deterministic in (False, True):
        _check_decision(policy, observation, deterministic)
    _check_scores(policy, observation)
    _check_modes(policy, observation)
    _check_errors(policy, observation)
    if load is not None:
        _check_round_trip(policy, observation, load)


def _act(policy: Policy, observation: TensorObservation, seed: int = 1, deterministic: bool = False) -> Decision:
    return policy.act(observation, torch.Generator().manual_seed(seed), deterministic=deterministic)


def _equal(first: Decision, second: Decision) -> bool:
    return (
        torch.equal(first.actions, second.actions)
        and torch.equal(first.logp, second.logp)
        and set(first.latents) == set(second.latents)
        and all(torch.equal(value, second.latents[name]) for name, value in first.latents.items())
    )


def _copy(observation: TensorObservation) -> TensorObservation:
    return {key: value.clone() if isinstance(value, Tensor) else list(value) for key, value in observation.items()}


def _check_decision(policy: Policy, observation: TensorObservation, deterministic: bool) -> None:
    spec = policy.spec
    how = f"act(deterministic={deterministic})"
    assert 1 <= spec.chunk <= spec.prediction, f"spec: chunk {spec.chunk} does not fit prediction {spec.prediction}"
    batch = len(cast(list, observation[TASK]))
    before, random_state = _copy(observation), torch.get_rng_state()
    decision = _act(policy, observation, deterministic=deterministic)
    assert torch.equal(random_state, torch.get_rng_state()), f"{how} drew from torch's global generator"
    for key, value in before.items():
        after = observation[key]
        same = torch.equal(value, cast(Tensor, after)) if isinstance(value, Tensor) else value == after
        assert same, f"{how} changed '{key}' of its observation"
    expected = (batch, spec.chunk, *spec.action.shape)
    assert tuple(decision.actions.shape) == expected, f"{how}: actions {list(decision.actions.shape)}, not {expected}"
    assert bool(decision.actions.isfinite().all()), f"{how}: actions are not finite"
    low, high = torch.tensor(spec.action.low), torch.tensor(spec.action.high)
    actions = decision.actions.cpu()
    assert bool(((actions >= low - TOLERANCE) & (actions <= high + TOLERANCE)).all()), f"{how}: action out of range"
    for name, value, dtype in (("logp", decision.logp, torch.float32), ("mask", decision.mask, torch.bool)):
        assert tuple(value.shape) == (batch, spec.scored_steps), f"{how}: {name} is {list(value.shape)}, not [B, K]"
        assert value.dtype == dtype, f"{how}: {name} is {value.dtype}, not {dtype}"
    tensors = {"actions": decision.actions, "logp": decision.logp, **decision.latents}
    for name, value in tensors.items():
        assert not value.requires_grad, f"{how}: {name} carries gradient"
        assert len(value) == batch, f"{how}: {name} has {len(value)} rows, not {batch}"
    repeated = _act(policy, observation, deterministic=deterministic)
    assert _equal(decision, repeated), f"{how}: equal generators gave different decisions"
    with torch.inference_mode():
        assert _equal(decision, _act(policy, observation, deterministic=deterministic)), (
            f"{how}: inference_mode differs"
        )
    if not deterministic:
        assert bool(decision.mask.any()), f"{how}: no step has a density, so nothing can be scored"
        other = _act(policy, observation, seed=2)
        assert not torch.equal(decision.actions, other.actions), f"{how}: another generator gave the same actions"


def _check_scores(policy: Policy, observation: TensorObservation) -> None:
    decision = _act(policy, observation)
    scores = policy.log_prob(observation, decision.latents)
    assert scores.logp.shape == decision.logp.shape, f"evaluate: logp is {list(scores.logp.shape)}, not [N, K]"
    assert scores.entropy.shape == decision.logp.shape, "evaluate: entropy is not [N, K]"
    error = (scores.logp - decision.logp)[decision.mask].abs().max().item()
    assert error <= TOLERANCE, f"evaluate: logp differs from act's by {error:.2e}, more than {TOLERANCE:.0e}"
    order = torch.arange(len(decision.logp) - 1, -1, -1, device=decision.logp.device)
    turned = {key: value[order] if isinstance(value, Tensor) else value[::-1] for key, value in observation.items()}
    swapped = policy.log_prob(turned, {name: value[order] for name, value in decision.latents.items()}).logp[order]
    error = (swapped - scores.logp)[decision.mask].abs().max().item()
    assert error <= TOLERANCE, f"evaluate: a row's logp depends on the other rows ({error:.2e})"
    if isinstance(policy, nn.Module):
        assert scores.logp.requires_grad, "evaluate: logp has no gradient"
        weights = [weight for weight in policy.parameters() if weight.requires_grad]
        gradients = torch.autograd.grad(scores.logp[decision.mask].sum(), weights, allow_unused=True)
        found = [gradient for gradient in gradients if gradient is not None]
        assert all(bool(gradient.isfinite().all()) for gradient in found), "evaluate: a gradient is not finite"
        assert any(bool(gradient.abs().sum() > 0) for gradient in found), "evaluate: every gradient is zero"


def _check_modes(policy: Policy, observation: TensorObservation) -> None:
    if not isinstance(policy, nn.Module):
        return
    was_training = policy.training
    try:
        policy.train()
        training = _act(policy, observation)
        policy.eval()
        assert _equal(training, _act(policy, observation)), "train and eval mode act differently (dropout, batch norm)"
    finally:
        policy.train(was_training)


def _check_errors(policy: Policy, observation: TensorObservation) -> None:
    fields = policy.spec.observation
    for key, field in fields.items():
        value = cast(Tensor, observation[key])
        missing = {name: item for name, item in observation.items() if name != key}
        _expect(policy, missing, SpecError, f"without '{key}'")
        long = torch.cat([value, value], 2)
        _expect(policy, {**observation, key: long}, SpecError, f"with a twice too long '{key}'")
        _expect(policy, {**observation, key: value[:, 0]}, SpecError, f"with '{key}' without history")
        if not field.dtype.startswith(("uint", "int", "bool")):
            spoiled = value.clone()
            spoiled[0] = float("nan")
            _expect(policy, {**observation, key: spoiled}, NonFiniteError, f"with NaN in '{key}'")


def _expect(policy: Policy, observation: TensorObservation, error: type[RobopolicyError], what: str) -> None:
    try:
        _act(policy, observation)
    except error:
        return
    except Exception as other:
        raise AssertionError(f"act {what} raised {type(other).__name__}, not {error.__name__}: {other}") from other
    raise AssertionError(f"act {what} raised no {error.__name__}")


def _check_round_trip(policy: Policy, observation: TensorObservation, load: Callable[[Path], Policy]) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "checkpoint"
        policy.save(folder)
        restored = load(folder)
    assert restored.spec == policy.spec, "save and load changed the spec"
    for deterministic in (False, True):
        first, second = (_act(item, observation, deterministic=deterministic) for item in (policy, restored))
        assert _equal(first, second), "a loaded policy decides differently from the saved one"
