"""Optional abilities of a policy, one member each; callers check for the ability instead of a class.

`core/policy.py` has the abilities required by training mechanisms; these are for commands, engines and memory planning.
"""

from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from robopolicy.core.former_names import keep_former_names
from robopolicy.core.policy import ConvertibleToTrainable, Policy, Trainable
from robopolicy.core.spec import WorldSpec
from robopolicy.nn.schedules import Schedule
from robopolicy.policies.lerobot.configuration import LeRobotTuning


@runtime_checkable
class Tunable(ConvertibleToTrainable, Protocol):
    """A policy whose exploration and training settings are not fixed by its checkpoint but by the configuration section
    `lerobot`.
    """

    def tuned_by(self, tuning: LeRobotTuning) -> "Tunable":
        """Return this policy with these settings; weights are shared."""
        ...

    def to_trainable_by(self, tuning: LeRobotTuning) -> Trainable:
        """Return a trainable policy over this policy's weights with these settings; ConfigError if a setting does not
        apply.
        """
        ...


@runtime_checkable
class WrapsModule(Protocol):
    """A policy that wraps an nn.Module instead of being one."""

    @property
    def module(self) -> nn.Module:
        """The wrapped module, with all weights."""
        ...


@runtime_checkable
class IsPretrained(Protocol):
    """A policy, or its settings, that declares whether its weights were pretrained elsewhere; such weights may be
    large.
    """

    @property
    def is_pretrained(self) -> bool:
        """Whether the weights were pretrained elsewhere."""
        ...


def is_pretrained(policy: object) -> bool:
    """Whether a policy, or its settings, starts from weights that were pretrained elsewhere."""
    former = getattr(policy, "began_elsewhere", False)  # the member's name before version 0.2
    return bool(policy.is_pretrained if isinstance(policy, IsPretrained) else former)


@runtime_checkable
class DescribesReading(Protocol):
    """A policy that describes how it preprocesses images.

    described: description, "" if there is nothing to report.
    """

    described: str


@runtime_checkable
class PredictsFromPast(Protocol):
    """A policy whose predicted chunk starts before the first executed step."""

    @property
    def past_steps(self) -> int:
        """Number of predicted steps before the first executed one; `loss` reads them from the batch as "past" [N,
        steps, A] with "past_valid" [N, steps].
        """
        ...


@runtime_checkable
class SeparatesBase(Protocol):
    """A policy that may have been fine-tuned over a frozen base, and can be converted to one without."""

    @property
    def finetuning(self) -> dict[str, Any] | None:
        """Arguments of the last `prepare_finetuning`, None before it was called."""
        ...

    def without_base(self) -> Policy:
        """Return a policy whose network takes all denoising steps itself."""
        ...


@runtime_checkable
class MapsFeatures(Protocol):
    """A policy that maps a world's fields to its features through a file next to its checkpoint."""

    def mapping_for(self, world: WorldSpec) -> str:
        """Return the mapping to write there if names or sizes differ in `world`, "" if none do."""
        ...


@runtime_checkable
class Denoises(Policy, Protocol):
    """A policy that an inference engine can approximate at lower cost: fewer steps, block caches, bf16."""

    @property
    def device(self) -> torch.device:
        """Device of the policy's weights."""
        ...

    @property
    def own_schedule(self) -> Schedule | None:
        """Schedule of the policy's denoising steps; None for another library's chain, where only block caches are
        supported.
        """
        ...


keep_former_names(
    __name__,
    {
        "BeganElsewhere": "IsPretrained",
        "began_elsewhere": "is_pretrained",
        "HoldsModule": "WrapsModule",
        "LearnsPast": "PredictsFromPast",
        "LeavesBase": "SeparatesBase",
    },
)
