"""Choosing how a checkpoint's policy decides fast."""

from dataclasses import dataclass
from pathlib import Path

from robopolicy.core.errors import ConfigError
from robopolicy.core.ranges import Count, Natural, NonNegative


@dataclass(frozen=True)
class OptimizeSection:
    """Ways of computing a policy's decisions, timed and compared with the reference; the fastest is kept beside it."""

    policy: Path | None = None
    """Checkpoint."""
    data: tuple[Path, ...] = ()
    """Datasets at whose observations it decides, [] for episodes that it plays itself."""
    episodes: Count = 20
    """Of those that it plays."""
    observations: Count = 256
    """At which errors are measured and block caches calibrated."""
    batch: Count = 1
    """Rows that decide at once when the policy is used: 1 for a robot, more for a server or a simulation."""
    rounds: Count = 30
    """Decisions that are timed, of all ways in turns."""
    engines: tuple[str, ...] = ("lean", "compiled")
    """Those to try; one that cannot run here is left out, and said."""
    error: NonNegative = 0.0
    """Largest error of actions that is allowed, the root mean square over the standard deviation of the policy's own
    actions; 0 for exact engines alone. Above 0 fewer steps, block caches and bf16 are tried as well: .05 is a start.
    """
    steps: tuple[Count, ...] = (1, 2, 3, 5, 10, 20)
    """Numbers of steps to try, where the policy takes more."""
    schedulers: tuple[str, ...] = ("uniform", "shared", "bac")
    """Block cache schedulers to try; [] for none."""
    budgets: tuple[Count, ...] = (5, 10, 20)
    """Evaluations of a block in a chain, where the policy takes more steps."""
    orders: tuple[Natural, ...] = (0, 1)
    """What a block cache answers in between: 0 what was computed last, 1 or 2 an extrapolation (TaylorSeer)."""
    evaluate_episodes: Natural = 0
    """Episodes that judge reference and choice on the same starts, 0 for none."""

    def __post_init__(self) -> None:
        if min(self.episodes, self.observations - 1, self.batch, self.rounds, *self.steps, *self.budgets) < 1:
            raise ConfigError(
                "optimize: episodes, batch, rounds, steps and budgets are at least 1, and observations at least 2."
            )
        if not self.orders or min(self.orders) < 0:
            raise ConfigError("optimize.orders names 0 or more, such as [0]; schedulers=[] is for no block caches.")
        if self.error < 0 or self.evaluate_episodes < 0 or not self.engines:
            raise ConfigError("optimize: error and evaluate_episodes are at least 0, and there is an engine to try.")
