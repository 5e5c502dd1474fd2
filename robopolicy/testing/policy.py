"""Conformance test for policies: `check_policy` verifies every testable requirement of the policy interfaces, level by
level.

A policy that acts can be evaluated, served and ranked; one with log-probabilities can be compared with another on
recorded decisions; one with a loss can be trained and fine-tuned (see `robopolicy.core.policy`).
"""

import copy
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from robopolicy.core.candidates import rows_of_observation
from robopolicy.core.errors import NonFiniteError, RobopolicyError, RobopolicyWarning, SpecError
from robopolicy.core.examples import example_batch, example_observation
from robopolicy.core.policy import Decision, Policy, ScoredPolicy, TensorObservation, Trainable, missing_members
from robopolicy.core.randomness import EpisodeGenerator
from robopolicy.core.spec import TASK

TOLERANCE = 1e-5


class Level(IntEnum):
    """Interface level that a policy fulfils; a higher level includes the lower ones."""

    ACTS = 1
    SCORES = 2
    TRAINS = 3


PROTOCOLS: dict[Level, type] = {Level.ACTS: Policy, Level.SCORES: ScoredPolicy, Level.TRAINS: Trainable}
ACTS_WITHOUT_RATE = "evaluate, record, collect, serve and rank it; imitate it as a teacher"
ALLOWS: dict[Level, str] = {
    Level.ACTS: "evaluate, record, collect, serve, drive and rank it; imitate it as a teacher",
    Level.SCORES: "compare log-probabilities of recorded decisions with it: a teacher or base of the same steps",
    Level.TRAINS: "train it on demonstrations; fine-tune it in simulators, world models and on recorded data",
}
"""Uses enabled by a level, in addition to those of lower levels."""


@dataclass(frozen=True)
class PolicyReport:
    """Result of `check_policy`: the fulfilled level, and what is missing for the next one.

    has_rate: False if it does not declare its control rate, so it cannot drive a robot.
    """

    level: Level
    lacks: tuple[str, ...] = ()
    has_rate: bool = True

    def lines(self) -> list[str]:
        """Return one line per level: whether it is fulfilled, and what it allows or what is missing."""
        texts: list[str] = []
        for level in Level:
            if level <= self.level:
                permission = ALLOWS[level] if self.has_rate or level is not Level.ACTS else ACTS_WITHOUT_RATE
                texts.append(f"{level.name.lower()}: yes. You can {permission}.")
            elif level == self.level + 1:
                texts.append(f"{level.name.lower()}: no, it lacks {', '.join(self.lacks)}.")
            else:
                texts.append(f"{level.name.lower()}: no.")
        return texts


def check_policy(
    policy: Policy,
    load: Callable[[Path], Policy] | None = None,
    *,
    level: Level | None = None,
    batch: int = 6,
    device: torch.device | str = "cpu",
) -> PolicyReport:
    """Check `policy` up to `level` (None: as far as it has the methods); return the level that it fulfils.

    acts: shapes, types, ranges and finiteness of decisions; equal generators give equal decisions after a reset, and
    global randomness is not used; a row's decision and noise do not depend on other rows; observations are not
    modified; invalid ones raise SpecError or NonFiniteError. scores: `log_prob` reproduces `act`'s log-probabilities to
    1e-5 and treats rows independently; other generators give other decisions. trains: log-probabilities have gradients;
    train and eval mode act identically; `loss` is finite, per sample, reproducible and changes the weights; a copy
    prepared for fine-tuning conforms, is changed by an optimiser step, leaves the original policy unchanged, and can be
    restored through `state_dict`. Given `load`, a saved policy decides bitwise identically. The policy itself is not
    changed. Raises AssertionError naming the first violated requirement, or what `level` requires and the policy lacks.
    """
    name = type(policy).__name__
    missing_names = missing_members(policy, Policy)
    assert not missing_names, f"{name} lacks a method of the Policy protocol: {', '.join(missing_names)}"
    highest = max(item for item in Level if not missing_members(policy, PROTOCOLS[item]))
    lacks = () if highest is Level.TRAINS else missing_members(policy, PROTOCOLS[Level(highest + 1)])
    if level is not None and level > highest:
        missing_list = ", ".join(missing_members(policy, PROTOCOLS[level]))
        raise AssertionError(
            f"{name} {highest.name.lower()}; for the level {level.name.lower()} it lacks {missing_list}"
        )
    highest = highest if level is None else level
    observation = example_observation(policy.spec, batch, torch.Generator().manual_seed(0), device)
    scored_policy = cast(ScoredPolicy, policy) if highest >= Level.SCORES else None
    _check_acting(policy, scored_policy, observation)
    if highest >= Level.TRAINS:
        _check_training(cast(Trainable, policy), observation)
    if load is not None:
        assert hasattr(policy, "save"), f"{name} has no save method, so it cannot be saved and loaded"
        _check_round_trip(cast(Trainable, policy), observation, load)
    return PolicyReport(highest, lacks, bool(policy.spec.fps))


def _act(policy: Policy, observation: TensorObservation, seed: int = 1, deterministic: bool = False) -> Decision:
    policy.reset()
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


def _check_acting(policy: Policy, scored: ScoredPolicy | None, observation: TensorObservation) -> None:
    """Check acting and, given `scored`, the log-probabilities of the same policy."""
    for deterministic in (False, True):
        _check_decision(policy, observation, deterministic)
        if scored is not None:
            _check_choices(scored, observation, deterministic)
        _check_rows(policy, observation, deterministic)
    if scored is not None:
        _check_scores(scored, observation)
    _check_errors(policy, observation)


def _check_decision(policy: Policy, observation: TensorObservation, deterministic: bool) -> None:
    spec = policy.spec
    call = f"act(deterministic={deterministic})"
    assert 1 <= spec.chunk <= spec.prediction, (
        f"spec: chunk {spec.chunk} exceeds or does not fit prediction {spec.prediction}"
    )
    batch = len(cast(list[str], observation[TASK]))
    before, random_state = _copy(observation), torch.get_rng_state()
    decision = _act(policy, observation, deterministic=deterministic)
    assert torch.equal(random_state, torch.get_rng_state()), (
        f"{call}: random numbers were drawn from torch's global generator"
    )
    _check_untouched(before, observation, call)
    expected = (batch, spec.chunk, *spec.action.shape)
    assert tuple(decision.actions.shape) == expected, f"{call}: actions {list(decision.actions.shape)}, not {expected}"
    assert bool(decision.actions.isfinite().all()), f"{call}: actions are not finite"
    low, high = torch.tensor(spec.action.low), torch.tensor(spec.action.high)
    actions = decision.actions.cpu()
    assert bool(((actions >= low - TOLERANCE) & (actions <= high + TOLERANCE)).all()), f"{call}: action out of range"
    tensors = {"actions": decision.actions, "logp": decision.logp, "mask": decision.mask, **decision.latents}
    for name, value in tensors.items():
        assert not value.requires_grad, f"{call}: {name} requires gradients"
        assert len(value) == batch, f"{call}: {name} has {len(value)} rows, not {batch}"
    second_decision = _act(policy, observation, deterministic=deterministic)
    assert _equal(decision, second_decision), f"{call}: equal generators gave different actions after a reset"
    with torch.inference_mode():
        assert _equal(decision, _act(policy, observation, deterministic=deterministic)), (
            f"{call}: the result differs under inference_mode"
        )


def _check_rows(policy: Policy, observation: TensorObservation, deterministic: bool) -> None:
    """Check that rows decide identically in another order and in smaller batches: an outcome depends only on its
    episode.
    """
    batch = len(cast(list[str], observation[TASK]))
    order = list(range(batch - 1, -1, -2))

    def decided(rows: list[int]) -> Tensor:
        policy.reset()
        generator = EpisodeGenerator(1)
        generator.begin(rows)
        with warnings.catch_warnings(), generator.decision():
            warnings.simplefilter("ignore", RobopolicyWarning)
            return policy.act(
                rows_of_observation(observation, rows), generator, deterministic=deterministic
            ).actions.cpu()

    together, fewer = decided(list(range(batch)))[order], decided(order)
    is_near = ((together - fewer).abs().flatten(1) <= 1e-3 * together.abs().max().clamp_min(1.0)).all(1)
    # Most rows and not all: fewer rows round otherwise, which may now and then make another token the likeliest.
    assert float(is_near.float().mean()) > 0.5, (
        f"act(deterministic={deterministic}): a row's actions depend on the other rows, so results would depend on "
        "world.batch_size. Draw noise [rows, ...] with normal, uniform or integers of robopolicy.core.randomness."
    )


def _check_untouched(before: TensorObservation, observation: TensorObservation, how: str) -> None:
    for key, value in before.items():
        after = observation[key]
        is_same = torch.equal(value, cast(Tensor, after)) if isinstance(value, Tensor) else value == after
        assert is_same, f"{how} modified '{key}' of its observation"


def _check_choices(policy: ScoredPolicy, observation: TensorObservation, deterministic: bool) -> None:
    """Check the log-probabilities stored in a `Decision`."""
    call = f"act(deterministic={deterministic})"
    decision, expected = _act(policy, observation, deterministic=deterministic), policy.spec.scored_steps
    assert expected >= 1, f"spec: scored_steps is {expected}, so there are no log-probabilities"
    for name, value, dtype in (("logp", decision.logp, torch.float32), ("mask", decision.mask, torch.bool)):
        shape = (len(decision.actions), expected)
        assert tuple(value.shape) == shape, f"{call}: {name} is {list(value.shape)}, not [B, K] = {list(shape)}"
        assert value.dtype == dtype, f"{call}: {name} is {value.dtype}, not {dtype}"
    if not deterministic:
        assert bool(decision.mask.any()), f"{call}: no step has a density, so there are no log-probabilities"
        other = _act(policy, observation, seed=2)
        assert not torch.equal(decision.actions, other.actions), f"{call}: another generator gave the same actions"


def _check_scores(policy: ScoredPolicy, observation: TensorObservation) -> None:
    decision = _act(policy, observation)
    scores = policy.log_prob(observation, decision.latents)
    assert scores.logp.shape == decision.logp.shape, f"log_prob: logp is {list(scores.logp.shape)}, not [N, K]"
    assert scores.entropy.shape == decision.logp.shape, "log_prob: entropy is not [N, K]"
    for name, value in scores.extras.items():
        rows = list(value.shape[:1])
        assert rows in ([1], [len(scores.logp)]), f"log_prob: extra '{name}' has {rows} rows instead of N, or 1 for all"
    error = (scores.logp - decision.logp)[decision.mask].abs().max().item()
    assert error <= TOLERANCE, f"log_prob: logp differs from act's by {error:.2e}, more than {TOLERANCE:.0e}"
    order = torch.arange(len(decision.logp) - 1, -1, -1, device=decision.logp.device)
    reversed_rows = {
        key: value[order] if isinstance(value, Tensor) else value[::-1] for key, value in observation.items()
    }
    swapped_logp = policy.log_prob(
        reversed_rows, {name: value[order] for name, value in decision.latents.items()}
    ).logp[order]
    error = (swapped_logp - scores.logp)[decision.mask].abs().max().item()
    assert error <= TOLERANCE, f"log_prob: a row's logp depends on the other rows ({error:.2e})"


def _check_errors(policy: Policy, observation: TensorObservation) -> None:
    fields = policy.spec.observation
    for key, field in fields.items():
        value = cast(Tensor, observation[key])
        incomplete = {name: item for name, item in observation.items() if name != key}
        _expect(policy, incomplete, SpecError, f"without '{key}'")
        long = torch.cat([value, value], 2)
        _expect(policy, {**observation, key: long}, SpecError, f"with '{key}' twice as long")
        _expect(policy, {**observation, key: value[:, 0]}, SpecError, f"with '{key}' without history")
        if not field.dtype.startswith(("uint", "int", "bool")):
            with_nan = value.clone()
            with_nan[0] = float("nan")
            _expect(policy, {**observation, key: with_nan}, NonFiniteError, f"with NaN in '{key}'")


def _expect(policy: Policy, observation: TensorObservation, error: type[RobopolicyError], what: str) -> None:
    try:
        _act(policy, observation)
    except error:
        return
    except Exception as other:
        raise AssertionError(f"act {what} raised {type(other).__name__}, not {error.__name__}: {other}") from other
    raise AssertionError(f"act {what} did not raise {error.__name__}")


def _check_training(policy: Trainable, observation: TensorObservation) -> None:
    """Check pre-training and fine-tuning on copies of the policy."""
    assert isinstance(policy, nn.Module), f"{type(policy).__name__} is not a torch.nn.Module"
    parameters = list(policy.trainable_parameters())
    parameter_ids = {id(parameter) for parameter in policy.parameters()}
    assert parameters, "trainable_parameters() is empty"
    assert all(id(item) in parameter_ids for item in parameters), (
        "trainable_parameters() contains a tensor that is not among parameters()"
    )
    assert all(item.requires_grad for item in parameters), (
        "trainable_parameters() contains a tensor that does not require gradients"
    )
    _check_modes(policy, observation)
    _check_loss(policy, observation)
    _check_finetuning(policy, observation)


def _check_modes(policy: Trainable, observation: TensorObservation) -> None:
    other = copy.deepcopy(policy)
    training = _act(other.train(), observation)
    assert _equal(training, _act(other.eval(), observation)), (
        "train and eval mode act differently (dropout, batch norm)"
    )


def _check_loss(policy: Trainable, observation: TensorObservation) -> None:
    batch = example_batch(policy.spec, observation, next(policy.parameters()).device)
    before, random_state = _copy(observation), torch.get_rng_state()
    losses, second_losses = (policy.loss(batch, torch.Generator().manual_seed(4)) for _ in range(2))
    assert torch.equal(random_state, torch.get_rng_state()), "loss drew random numbers from torch's global generator"
    _check_untouched(before, observation, "loss")
    assert isinstance(losses, Mapping) and len(losses), "loss returns no named parts"
    count = len(batch["actions"])
    for name, value in losses.items():
        assert tuple(value.shape) == (count,), f"loss: '{name}' is {list(value.shape)}, not [N] = [{count}]"
        assert bool(value.isfinite().all()), f"loss: '{name}' is not finite"
        assert torch.equal(value, second_losses[name]), f"loss: equal generators gave a different '{name}'"
    _check_gradient(policy, torch.stack([value.mean() for value in losses.values()]).sum(), "loss")


def _check_gradient(policy: Trainable, value: Tensor, what: str) -> list[Tensor | None]:
    """Return the gradient of a scalar at each trainable parameter."""
    assert value.requires_grad, f"{what} has no gradient"
    gradients: list[Tensor | None] = [
        *torch.autograd.grad(value, list(policy.trainable_parameters()), allow_unused=True)
    ]
    existing = [gradient for gradient in gradients if gradient is not None]
    assert all(bool(gradient.isfinite().all()) for gradient in existing), f"{what}: a gradient is not finite"
    assert any(bool(gradient.abs().sum() > 0) for gradient in existing), f"{what}: every gradient is zero"
    return gradients


def _check_finetuning(policy: Trainable, observation: TensorObservation) -> None:
    """Prepare a copy, take a step, and check that log-probabilities change, weights can be restored and the original is
    unchanged.
    """
    original = _act(policy, observation)
    for train_encoder in (True, False):
        policy_copy = copy.deepcopy(policy).eval()
        policy_copy.prepare_finetuning(train_encoder=train_encoder)
        when = f"after prepare_finetuning(train_encoder={train_encoder})"
        try:
            _check_acting(policy_copy, policy_copy, observation)
        except AssertionError as error:
            raise AssertionError(f"{when}: {error}") from error
        decision = _act(policy_copy, observation)
        logp = policy_copy.log_prob(observation, decision.latents).logp[decision.mask]
        gradients = _check_gradient(policy_copy, logp.mean(), f"log_prob, {when}")
        weights = {name: value.detach().clone() for name, value in policy_copy.state_dict().items()}
        _step(policy_copy, gradients)
        new_logp = policy_copy.log_prob(observation, decision.latents).logp[decision.mask]
        assert not torch.equal(new_logp, logp), (
            f"{when}, an optimiser step on trainable_parameters() does not change log_prob"
        )
        assert _equal(original, _act(policy, observation)), (
            f"{when}, changing a copy changes the policy that it was copied from"
        )
        policy_copy.load_state_dict(weights)
        assert _equal(decision, _act(policy_copy, observation)), f"{when}, load_state_dict does not restore the actions"


@torch.no_grad()
def _step(policy: Trainable, gradients: Sequence[Tensor | None]) -> None:
    """Take a small gradient ascent step."""
    for parameter, gradient in zip(policy.trainable_parameters(), gradients, strict=True):
        if gradient is not None:
            length = cast(Tensor, gradient.norm())  # pyright: ignore[reportUnknownMemberType]
            parameter.add_(1e-2 * gradient / length.clamp(min=1e-8))


def _check_round_trip(policy: Trainable, observation: TensorObservation, load: Callable[[Path], Policy]) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "checkpoint"
        policy.save(folder)
        restored = load(folder)
    assert restored.spec == policy.spec, "save and load changed the spec"
    for deterministic in (False, True):
        first, second = (_act(item, observation, deterministic=deterministic) for item in (policy, restored))
        assert _equal(first, second), "a loaded policy acts differently from the saved one"
