"""What policies of ours read and return: fields of a world, instructions, action chunks within the world's range.

Axes: N row, P predicted step, C executed step, A action dimension.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from robopolicy.core.errors import ConfigError, SpecError, did_you_mean
from robopolicy.core.finite_values import listed
from robopolicy.core.policy import TensorObservation
from robopolicy.core.spec import TASK, Field, check_finite

_NAMED = 8
"""Instructions that an error lists at most."""


def select_fields(keys: tuple[str, ...], observation: Mapping[str, Field]) -> dict[str, Field]:
    """Return the fields that `keys` name, all but the instruction for (); raises ConfigError for unknown ones."""
    known = {key: spec for key, spec in observation.items() if key != TASK}
    for key in keys:
        if key not in known:
            raise ConfigError(
                f"observation_keys names '{key}', which is no field of the world.{did_you_mean(key, known)}"
            )
    return {key: known[key] for key in (keys or known)}


def given_instructions(observation: TensorObservation, rows: int, known: Sequence[str]) -> list[str]:
    """Return the instruction of each of `rows` observations; what is missing or empty is the only one of `known`.

    Raises SpecError where one is missing and several are known, or where there is another number of them than of rows.
    """
    given = observation.get(TASK)
    texts = [""] * rows if given is None else [str(text) for text in given]
    if len(texts) != rows:
        raise SpecError(f"'{TASK}' has {len(texts)} texts for {rows} rows.")
    if all(texts):
        return texts
    if len(known) != 1 and "" not in known:
        names = listed([f"'{text}'" for text in known], _NAMED)
        state = f"has no '{TASK}'" if given is None else f"has an empty '{TASK}' in row {texts.index('')}"
        raise SpecError(
            f"The observation {state}, and the policy was trained on {len(known)} instructions: {names}. Say which."
        )
    return [text or ("" if "" in known else known[0]) for text in texts]


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
    # The check comes after: a clamp brings infinities back into a finite range, and lets NaN through.
    actions = actions.clamp(low, high)
    check_finite("actions", actions)
    return actions
