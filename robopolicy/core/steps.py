"""Compatibility of generation steps: log-probabilities of another policy's actions need steps with the same meaning.

A denoising chain consists of actions normalised by one policy and follows its noise schedule; a token is an index into
one policy's vocabulary. For another policy the same numbers denote other actions.
"""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from robopolicy.core.errors import DataError
from robopolicy.core.policy import DecidesFromNoise, Policy

RELATIVE, ABSOLUTE = 1e-5, 1e-6
"""Tolerances for numbers computed from the same inputs, e.g. on two devices."""
ACTIONS_COMPARED, SAME_ACTION = 16, 1e-2
"""Number of stored action chunks to compare, and tolerance: files may store fewer digits."""


@runtime_checkable
class DescribesSteps(Protocol):
    """Optional interface: a policy that describes its generation steps, so that an incompatible teacher is detected."""

    def describe_steps(self) -> Mapping[str, Any]:
        """Return the properties that must be equal in both policies, by readable name: strings, numbers, None, or
        tensors [...].

        "kind" is a short description. The other entries define the meaning of latents: noise levels, transitions,
        vocabulary, and action normalisation. Weights and observations are not included. Empty if a wrapped policy does
        not describe its steps.
        """
        ...


def difference_of_steps(policy: Policy, other: Policy) -> str:
    """Return the difference between the generation steps of `other` and `policy`, "" if they are compatible.

    If neither policy describes its steps, as custom policies need not, only their number and kind are compared.
    """
    own_steps, its = _described(policy), _described(other)
    if (len(own_steps) > 2) != (len(its) > 2):
        silent = policy if len(its) > 2 else other
        return f"{type(silent).__name__} does not describe its denoising or token steps (method describe_steps)"
    for name in dict.fromkeys((*own_steps, *its)):
        own_value, another = own_steps.get(name), its.get(name)
        if not _same(own_value, another):
            return f"its {name}: {_shown(another, own_value)}, the policy's: {_shown(own_value, another)}"
    return ""


def require_own_actions(policy: Policy, ends: Tensor, actions: Tensor, valid: Tensor) -> None:
    """Raise DataError if stored actions differ from those that `policy` computes from the ends of their denoising
    chains.

    ends: clean latents [D, P, A] of stored decisions; actions: stored actions [D, C, A]; valid: [D, C] mask of executed
    steps. Policies without `DecidesFromNoise` are not checked.
    """
    if not isinstance(policy, DecidesFromNoise) or not len(ends):
        return
    off = float(((policy.to_actions(ends) - actions).abs() * valid[..., None]).amax())
    if off > SAME_ACTION * (1 + float(actions.abs().amax())):
        raise DataError(
            f"The stored denoising chains decode to actions that differ by {off:.3g} from the stored actions: they "
            "were recorded by a policy with another action normaliser. Record chains with this policy, or with one "
            "that has the same normaliser."
        )


def _described(policy: Policy) -> dict[str, Any]:
    spec = policy.spec
    description: Mapping[str, Any] = policy.describe_steps() if isinstance(policy, DescribesSteps) else {}
    kind = "tokens" if spec.categorical else "no tokens"
    return {"kind": kind, "number of steps with log-probabilities": spec.scored_steps, **description}


def _same(one: Any, another: Any) -> bool:
    if not (isinstance(one, Tensor) and isinstance(another, Tensor)):
        return type(one) is type(another) and one == another
    if one.shape != another.shape:
        return False
    return torch.allclose(one.double().cpu(), another.double().cpu(), rtol=RELATIVE, atol=ABSOLUTE)


def _shown(value: Any, beside: Any) -> str:
    """Return the printed form of a value; of a tensor, the element that differs most from the other value."""
    if not isinstance(value, Tensor):
        return "none" if value is None else str(value)
    if not isinstance(beside, Tensor) or value.shape != beside.shape:
        return f"{list(value.shape)} numbers"
    first_values, another = (each.double().cpu().flatten() for each in (value, beside))
    return f"{float(first_values[(first_values - another).abs().argmax()]):.6g}"
