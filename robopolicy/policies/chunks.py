"""Action chunks as policies learn and return them: what a batch must hold, and the range that a world takes."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from robopolicy.core.errors import SpecError
from robopolicy.core.spec import Field, check_finite


def check_chunks(batch: Mapping[str, Any], steps: int, size: int) -> tuple[Tensor, Tensor]:
    """Return "actions" [N, P, A] and "action_valid" [N, P] of a batch of `Trainable.loss`, P = `steps`, A = `size`.

    Raises SpecError on other shapes, NonFiniteError on NaN or infinity.
    """
    actions, valid = batch["actions"], batch["action_valid"]
    if tuple(actions.shape[1:]) != (steps, size) or tuple(valid.shape) != tuple(actions.shape[:2]):
        raise SpecError(
            f"Actions {list(actions.shape)} with action_valid {list(valid.shape)}: the policy learns chunks "
            f"[N, {steps}, {size}] with action_valid [N, {steps}]."
        )
    check_finite("actions", actions)
    return actions, valid


def check_predicted(batch: Mapping[str, Any], steps: int, first: int, size: int) -> tuple[Tensor, Tensor]:
    """Return actions [N, P, A] and which of them are valid [N, P], of which the first `first` lie before the decision.

    Those are the batch's "past" [N, first, A] with "past_valid" [N, first], as `Episodes.before` returns them; where it
    has none they are zero and not valid. P: `steps`, A: `size`. Raises as `check_chunks`.
    """
    actions, valid = check_chunks(batch, steps - first, size)
    if not first:
        return actions, valid
    past, known = actions.new_zeros(len(actions), first, size), valid.new_zeros(len(actions), first)
    if "past" in batch:
        past, known = check_chunks({"actions": batch["past"], "action_valid": batch["past_valid"]}, first, size)
    return torch.cat([past, actions], 1), torch.cat([known, valid], 1)


def register_range(policy: nn.Module, action: Field) -> None:
    """Keep the least and greatest actions [A] in buffers of `policy`, `action_low` and `action_high`, unsaved."""
    for name, bound in (("action_low", action.low), ("action_high", action.high)):
        limit = torch.tensor(bound, dtype=torch.float32).expand(action.shape).clone()
        policy.register_buffer(name, limit, persistent=False)


def in_range(actions: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return `actions` [N, C, A], each at least `low` [A] and at most `high` [A]; raises NonFiniteError."""
    actions = actions.clamp(low, high)
    check_finite("actions", actions)
    return actions
