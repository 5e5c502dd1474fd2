"""Settings of shared control, for rows of a world and for robots; imports nothing heavy."""

from dataclasses import dataclass, field
from typing import Any, Literal

from robopolicy.core.errors import ConfigError
from robopolicy.core.ranges import Natural, NonNegative
from robopolicy.core.structured import REGISTRY, FormerNames


@dataclass(frozen=True)
class AssistConfig(FormerNames):
    """When operators take over from a policy, and who they are."""

    no_progress_steps: Natural = 0
    """Control steps without a new maximum of the cumulative reward after which an operator takes over, 0 for never."""
    max_policy_steps: Natural = 0
    """Control steps of the policy after which an operator takes over in any case, 0 for never."""
    random_rate: NonNegative = 0.0
    """Probability per control step that an operator takes over, as a baseline for detectors."""
    operator: str = field(default="expert", metadata={REGISTRY: "robopolicy.operators:OPERATORS"})
    """Who takes over: expert (the world's, or collect.controller), lerobot (a teleoperator), or a custom one."""
    operator_options: dict[str, Any] = field(default_factory=dict)
    """Options of the operator, such as {teleoperator: so101_leader, options: {port: /dev/ttyACM0}}."""
    operators: Natural = 0
    """Number of operators; 0 for one per row. With fewer than rows, these wait in a queue and depend on each other."""
    operator_steps: Natural = 0
    """Control steps after which an operator hands back to the policy, 0 for never (RaC)."""
    rewind: Natural | Literal["adaptive"] = 0
    """Number of the policy's control steps that are undone first, the last one first; adaptive: all that a detector's
    index considers unusual (FLOAT). Positions are repeated backwards, other actions mirrored, grippers stay. 0 corrects
    at once, which gave better policies on push_cube.
    """

    def __post_init__(self) -> None:
        counts = (self.no_progress_steps, self.max_policy_steps, self.operators, self.operator_steps)
        if min(*counts, 0 if self.rewind == "adaptive" else self.rewind) < 0:
            raise ConfigError("Numbers of steps and operators must be at least 0.")
        if not 0 <= self.random_rate < 1:
            raise ConfigError(f"random_rate={self.random_rate} must be at least 0 and less than 1.")

    @property
    def wanted(self) -> bool:
        """Whether an operator can take over at all."""
        return bool(self.no_progress_steps or self.max_policy_steps or self.random_rate)
