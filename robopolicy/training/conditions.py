"""What a frozen encoder makes of every recorded observation, computed once and kept while a policy imitates.

A vision-language model that does not learn reads a picture the same way in every training step. Reading it is most of
the work: of LeRobot's tiny policies two thirds of a step, of full-sized ones more.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError
from robopolicy.core.machine import free_memory, in_bytes
from robopolicy.core.policy import LearnsFromCondition, Trainable
from robopolicy.core.progress import progress
from robopolicy.nn.configuration import LearningPrecision
from robopolicy.nn.precision import learning_in

AT_ONCE = 64
"""Observations that are encoded at a time."""


@torch.no_grad()
def read_once(policy: Trainable, data: Episodes, precision: LearningPrecision = "fp32") -> dict[str, Tensor]:
    """Return the encoded observation of every step of `data`, name -> [N, ...], on the device of `data`.

    Raises ConfigError where the encoder learns, sees no images, or what it makes of them does not fit into memory.
    """
    spec, found = policy.spec, {}
    encoder = _resting(policy.eval())
    with progress("Reading", data.step_count) as advance, learning_in(precision):
        for steps in torch.arange(data.step_count, device=data.device).split(AT_ONCE):
            made = encoder.encode(data.windows(steps, spec.history, 1, spec.columns)["observation"])
            if not found:
                found = _room(made, data)
            for name, value in made.items():
                found[name][steps] = value
            advance(len(steps))
    return found


def _resting(policy: Trainable) -> LearnsFromCondition:
    """Return a policy whose encoder rests; raises ConfigError where it learns or sees no images."""
    if isinstance(policy, LearnsFromCondition) and policy.learns_from_condition and policy.caches_condition:
        return policy
    raise ConfigError(
        "keep_conditions=true keeps what a frozen encoder makes of images, and this policy has none: let its "
        "encoder rest (of LeRobot's policies policy.tuned=expert), or leave keep_conditions=false."
    )


def _room(made: Mapping[str, Tensor], data: Episodes) -> dict[str, Tensor]:
    """Return empty tensors for as many conditions as `data` has steps, made like the first ones; ConfigError."""
    _require_room(made, data.step_count, data.device)
    return {
        name: torch.empty((data.step_count, *value.shape[1:]), dtype=value.dtype, device=data.device)
        for name, value in made.items()
    }


def _require_room(made: Mapping[str, Tensor], steps: int, device: torch.device) -> int:
    """Return the bytes of so many conditions made like these; raises ConfigError where fewer are free."""
    each, available = sum(value[0].nbytes for value in made.values()), free_memory(device)
    if available is not None and each * steps > available:
        raise ConfigError(
            f"keep_conditions=true would keep {in_bytes(each)} of each of {steps} steps, {in_bytes(each * steps)}, and "
            f"{in_bytes(available)} are free: leave it false, or take fewer episodes."
        )
    return each * steps


@torch.no_grad()
def plan_conditions(policy: Trainable, data: Episodes, steps: int, precision: LearningPrecision = "fp32") -> str:
    """Return in one line what keeping the conditions of about so many steps like those of `data` will take.

    Raises ConfigError as `read_once`.
    """
    encoder, spec, device = _resting(policy), policy.spec, next(policy.parameters()).device
    first = torch.zeros(1, dtype=torch.int64, device=device)
    seen = data.to(device).windows(first, spec.history, 1, spec.columns)["observation"]
    with learning_in(precision):
        kept = _require_room(encoder.encode(seen), steps, device)
    return f"What its encoder makes of about {steps} steps is kept: {in_bytes(kept)}."


def with_conditions(
    batches: Iterator[dict[str, Any]], read: Sequence[Mapping[str, Tensor]]
) -> Iterator[dict[str, Any]]:
    """Yield `batches`, which need no observations, with what was made of those of their steps.

    read: of all steps, in parts [N, ...] by name that follow one another.
    """
    for batch in batches:
        yield {**batch, **{name: _taken([part[name] for part in read], batch["steps"]) for name in read[0]}}


def _taken(parts: Sequence[Tensor], steps: Tensor) -> Tensor:
    """Return the elements [S, ...] of parts [N, ...], which are not joined, for that would hold them twice."""
    if len(parts) == 1:
        return parts[0][steps]
    found, first = parts[0].new_empty((len(steps), *parts[0].shape[1:])), 0
    for part in parts:
        here = ((steps >= first) & (steps < first + len(part))).nonzero()[:, 0]
        found[here] = part[steps[here] - first]
        first += len(part)
    return found
