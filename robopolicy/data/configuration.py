"""What can be set about recording; nothing heavy is imported here."""

from dataclasses import dataclass

from robopolicy.core.errors import ConfigError
from robopolicy.core.ranges import Natural


@dataclass(frozen=True)
class CorrectConfig:
    """When an operator takes over from a policy, and what is done first."""

    patience: Natural = 0
    """Control steps without a new best sum of rewards after which the expert takes over; 0 for never."""
    budget: Natural = 0
    """Control steps of an episode after which it takes over in any case; 0 for never."""
    rewind: Natural = 0
    """Control steps of the policy that are undone first (RaC's recovery), the last one first: the actions' elements
    mirrored in the middle of their range, grippers as they were. Right where actions are velocities or steps; 0
    corrects at once, which taught more on push_cube (rl/offline/README.md).
    """

    def __post_init__(self) -> None:
        if min(self.patience, self.budget, self.rewind) < 0:
            raise ConfigError("patience, budget and rewind of corrections are at least 0.")

    @property
    def wanted(self) -> bool:
        """Whether anybody ever takes over."""
        return bool(self.patience or self.budget)
