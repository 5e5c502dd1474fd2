"""Input and output checks of built-in policies: observation fields, instructions, action chunks within the world's
range.

Axes: N row, P predicted step, C executed step, A action dimension.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from robopolicy.core.errors import ConfigError, SpecError, did_you_mean
from robopolicy.core.finite_values import join_names
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.policy import TensorObservation
from robopolicy.core.spec import TASK, Field, check_finite

_NAMED = 8
"""Maximum number of instructions listed in an error."""


def select_fields(keys: tuple[str, ...], observation: Mapping[str, Field]) -> dict[str, Field]:
    """Return the fields that `keys` name, all except the instruction for (); raises ConfigError for unknown ones."""
    fields = {key: spec for key, spec in observation.items() if key != TASK}
    for key in keys:
        if key not in fields:
            raise ConfigError(
                f"observation_keys contains '{key}', which is not a field of the world.{did_you_mean(key, fields)}"
            )
    return {key: fields[key] for key in (keys or fields)}


def instructions_or_default(observation: TensorObservation, rows: int, known: Sequence[str]) -> list[str]:
    """Return the instruction of each of `rows` observations; a missing or empty one defaults to the single one in
    `known`.

    Raises SpecError when one is missing while several are known, or when their number differs from the rows.
    """
    instructions = observation.get(TASK)
    texts = [""] * rows if instructions is None else [str(text) for text in instructions]
    if len(texts) != rows:
        raise SpecError(f"'{TASK}' has {len(texts)} texts, but there are {rows} rows.")
    if all(texts):
        return texts
    if len(known) != 1 and "" not in known:
        names = join_names([f"'{text}'" for text in known], _NAMED)
        state = f"has no '{TASK}'" if instructions is None else f"has an empty '{TASK}' in row {texts.index('')}"
        raise SpecError(
            f"The observation {state}, but the policy was trained on {len(known)} instructions: {names}. Pass "
            "one of them."
        )
    return [text or ("" if "" in known else known[0]) for text in texts]


def check_chunks(batch: Mapping[str, Any], steps: int, size: int) -> tuple[Tensor, Tensor]:
    """Return "actions" [N, P, A] and "action_valid" [N, P] of a batch for `Trainable.loss`, P = `steps`, A = `size`.

    Raises SpecError on other shapes, NonFiniteError on NaN or infinity.
    """
    actions, valid = batch["actions"], batch["action_valid"]
    if tuple(actions.shape[1:]) != (steps, size) or tuple(valid.shape) != tuple(actions.shape[:2]):
        raise SpecError(
            f"Actions have shape {list(actions.shape)} and action_valid {list(valid.shape)}: the policy is trained "
            f"on chunks [N, {steps}, {size}] with action_valid [N, {steps}]."
        )
    check_finite("actions", actions)
    return actions, valid


def check_predicted(batch: Mapping[str, Any], steps: int, first: int, size: int) -> tuple[Tensor, Tensor]:
    """Return actions [N, P, A] and their validity mask [N, P]; the first `first` steps precede the policy call.

    Those come from the batch's "past" [N, first, A] with "past_valid" [N, first], as returned by `Episodes.before`;
    without them they are zero and invalid. P: `steps`, A: `size`. Raises as `check_chunks`.
    """
    actions, valid = check_chunks(batch, steps - first, size)
    if not first:
        return actions, valid
    past, past_valid = actions.new_zeros(len(actions), first, size), valid.new_zeros(len(actions), first)
    if "past" in batch:
        past, past_valid = check_chunks({"actions": batch["past"], "action_valid": batch["past_valid"]}, first, size)
    return torch.cat([past, actions], 1), torch.cat([past_valid, valid], 1)


def register_range(policy: nn.Module, action: Field) -> None:
    """Store the action bounds [A] in unsaved buffers `action_low` and `action_high` of `policy`."""
    for name, bound in (("action_low", action.low), ("action_high", action.high)):
        limit = torch.tensor(bound, dtype=torch.float32).expand(action.shape).clone()
        policy.register_buffer(name, limit, persistent=False)


def in_range(actions: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Clip `actions` [N, C, A] to `low` [A] and `high` [A]; raises NonFiniteError."""
    # The check comes after: a clamp brings infinities back into a finite range, and lets NaN through.
    actions = actions.clamp(low, high)
    check_finite("actions", actions)
    return actions


keep_former_names(__name__, {"given_instructions": "instructions_or_default"})
