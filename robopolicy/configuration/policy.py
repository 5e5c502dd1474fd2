"""Which policy is built."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from robopolicy.core.structured import Tagged
from robopolicy.policies.configuration import DenoisingPolicyConfig
from robopolicy.policies.registry import POLICIES


@dataclass(frozen=True)
class PolicySection(Tagged):
    """What `train` builds."""

    kinds: ClassVar = POLICIES
    beside: ClassVar = True

    kind: str = "diffusion"
    """diffusion, flow, token (a language model over action tokens), joint (it plans with itself), lerobot (a checkpoint
    of LeRobot's), or your own.
    """
    config: Any = field(default_factory=DenoisingPolicyConfig)
