"""What a policy may offer beside its protocol, each one member: callers ask for the ability, and for no class by name.

`core/policy.py` has those that mechanisms ask for. These are for verbs, engines and whoever plans memory.
"""

from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from robopolicy.core.policy import BecomesTrainable, Policy, Trainable
from robopolicy.core.spec import WorldSpec
from robopolicy.nn.schedules import Schedule
from robopolicy.policies.lerobot.configuration import LeRobotTuning


@runtime_checkable
class Tunable(BecomesTrainable, Protocol):
    """A policy whose checkpoint leaves open how it explores and learns: the configuration's section `lerobot` says."""

    def tuned_by(self, tuning: LeRobotTuning) -> "Tunable":
        """Return this policy, weights shared, with these choices."""
        ...

    def to_trainable_by(self, tuning: LeRobotTuning) -> Trainable:
        """Return what learns over its weights under these choices; ConfigError where it does not read one of them."""
        ...


@runtime_checkable
class HoldsModule(Protocol):
    """A policy that is no nn.Module itself, and decides by means of one."""

    @property
    def module(self) -> nn.Module:
        """That module, with all weights."""
        ...


@runtime_checkable
class BeganElsewhere(Protocol):
    """A policy, or the settings of one, that says whether somebody else trained its weights: those may be large."""

    @property
    def began_elsewhere(self) -> bool:
        """Whether somebody else did."""
        ...


def began_elsewhere(policy: object) -> bool:
    """Whether a policy, or one of these settings, begins with weights that somebody else trained."""
    return isinstance(policy, BeganElsewhere) and policy.began_elsewhere


@runtime_checkable
class DescribesReading(Protocol):
    """A policy that says how it reads images.

    described: in words, "" where there is nothing to say.
    """

    described: str


@runtime_checkable
class LearnsPast(Protocol):
    """A policy whose chunks begin before the step that is executed first."""

    @property
    def past_steps(self) -> int:
        """How many steps before: `loss` finds them in a batch as "past" [N, steps, A] with "past_valid" [N, steps]."""
        ...


@runtime_checkable
class LeavesBase(Protocol):
    """A policy that was perhaps fine-tuned over a frozen base, and can do without."""

    @property
    def finetuning(self) -> dict[str, Any] | None:
        """The arguments of `prepare_finetuning`, None before it was called."""
        ...

    def without_base(self) -> Policy:
        """Return a policy of its network that takes all steps itself."""
        ...


@runtime_checkable
class MapsFeatures(Protocol):
    """A policy that reads a world under names that a file beside its checkpoint chooses."""

    def mapping_for(self, world: WorldSpec) -> str:
        """Return what to write there where names or sizes are others in `world`, "" where none are."""
        ...


@runtime_checkable
class Denoises(Policy, Protocol):
    """A policy that an engine can compute cheaper and not exactly: fewer steps, block caches, bf16."""

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        ...

    @property
    def own_schedule(self) -> Schedule | None:
        """The schedule of its steps; None for the chain of another library, of which block caches alone are known."""
        ...
