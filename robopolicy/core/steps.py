"""What a policy's scored steps speak of: only policies that speak of the same can score each other's decisions.

A denoising chain lives in the normalised actions and under the noise schedule of the policy that drew it, and a token
is a place in that policy's vocabulary. Another policy takes the same numbers for other actions.
"""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from robopolicy.core.errors import DataError
from robopolicy.core.policy import DecidesFromNoise, Policy

RELATIVE, ABSOLUTE = 1e-5, 1e-6
"""How far numbers may differ that were computed from the same ones, on two devices say."""
ACTIONS_COMPARED, SAME_ACTION = 16, 1e-2
"""Of stored decisions, and by how much they may be off: files may hold fewer digits."""


@runtime_checkable
class DescribesSteps(Protocol):
    """Optional: a policy that says what its scored steps speak of, so that a teacher of other steps is told from it."""

    def describe_steps(self) -> Mapping[str, Any]:
        """Return what must be equal in both, by a name to be read: texts, numbers, None, or tensors [...].

        Under "kind" what they are in a few words. The rest is all that latents mean: how noisy each is and how the next
        follows from it, the vocabulary, which actions they stand for. Weights and what is observed are no part of it.
        Empty where a policy inside does not say it.
        """
        ...


def difference_of_steps(policy: Policy, other: Policy) -> str:
    """Return in which way the scored steps of `other` are not those of `policy`, "" where they are the same.

    Of two that do not describe them, as policies of your own need not, number and kind alone are compared.
    """
    own, its = _described(policy), _described(other)
    if (len(own) > 2) != (len(its) > 2):
        silent = policy if len(its) > 2 else other
        return f"{type(silent).__name__} does not say what its steps speak of (describe_steps)"
    for name in dict.fromkeys((*own, *its)):
        one, another = own.get(name), its.get(name)
        if not _same(one, another):
            return f"its {name}: {_shown(another, one)}, the policy's: {_shown(one, another)}"
    return ""


def require_own_actions(policy: Policy, ends: Tensor, actions: Tensor, valid: Tensor) -> None:
    """Raise DataError where stored actions are not what `policy` makes of the ends of their denoising chains.

    ends: clean latents [D, P, A] of stored decisions; actions: [D, C, A] as they were stored, and which of them were
    executed: valid [D, C]. Of policies that do not decide from noise nothing is known.
    """
    if not isinstance(policy, DecidesFromNoise) or not len(ends):
        return
    off = float(((policy.to_actions(ends) - actions).abs() * valid[..., None]).amax())
    if off > SAME_ACTION * (1 + float(actions.abs().amax())):
        raise DataError(
            f"What the policy makes of stored decisions differs by {off:.3g} from the actions that were stored with "
            "them: they are of a policy that normalises actions otherwise, whose chains mean nothing to this one. "
            "Store decisions of this policy, or of one that began with the same normaliser."
        )


def _described(policy: Policy) -> dict[str, Any]:
    spec = policy.spec
    said: Mapping[str, Any] = policy.describe_steps() if isinstance(policy, DescribesSteps) else {}
    kind = "tokens" if spec.categorical else "no tokens"
    return {"kind": kind, "number of scored steps": spec.scored_steps, **said}


def _same(one: Any, another: Any) -> bool:
    if not (isinstance(one, Tensor) and isinstance(another, Tensor)):
        return type(one) is type(another) and one == another
    if one.shape != another.shape:
        return False
    return torch.allclose(one.double().cpu(), another.double().cpu(), rtol=RELATIVE, atol=ABSOLUTE)


def _shown(value: Any, beside: Any) -> str:
    """Return what to print of a value: of a tensor the element that differs most from that of the one beside it."""
    if not isinstance(value, Tensor):
        return "none" if value is None else str(value)
    if not isinstance(beside, Tensor) or value.shape != beside.shape:
        return f"{list(value.shape)} numbers"
    one, another = (each.double().cpu().flatten() for each in (value, beside))
    return f"{float(one[(one - another).abs().argmax()]):.6g}"
