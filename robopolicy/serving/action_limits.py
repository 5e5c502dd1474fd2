"""What a robot is ready to do, and an action led there. Axes: A action dimension (any shape)."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from robopolicy.core.errors import ConfigError, NonFiniteError
from robopolicy.serving.described import DescribedPolicy


@dataclass(frozen=True)
class ActionLimits:
    """What a robot is ready to do, in the units of its actions, numbers or arrays that broadcast to [A].

    low, high: bounds of an action, within those of the policy; change: most by which it may differ from the one before
    (where actions are positions: velocity / fps; where they are velocities: acceleration / fps); workspace: an action
    [A] -> the nearest that keeps the robot where it may be.
    """

    low: np.ndarray | float | None = None
    high: np.ndarray | float | None = None
    change: np.ndarray | float | None = None
    workspace: Callable[[np.ndarray], np.ndarray] | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError for bounds that bind nothing (NaN, another shape, low above high) and changes below 0,
        which would drive a robot away.
        """
        said = f"low is {self.low}, high {self.high} and change {self.change}"
        try:
            given = [np.asarray(each, np.float64) for each in (self.low, self.high, self.change) if each is not None]
            np.broadcast_shapes(*(each.shape for each in given))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{said}: each is a number, or an array of an action's shape.") from error
        if any(np.isnan(each).any() for each in given):
            raise ConfigError(f"{said}: none may be NaN.")
        if self.change is not None and np.min(self.change) < 0:
            raise ConfigError(f"change is {self.change}: an action may differ from the last by 0 or more.")
        if self.low is not None and self.high is not None and np.greater(self.low, self.high).any():
            raise ConfigError(f"low is {self.low} and high {self.high}: low is at most high, in every element.")

    def require_fit(self, policy: DescribedPolicy) -> None:
        """Raise ConfigError where these are no limits of the policy's actions [A], or leave it none."""
        for name in ("low", "high", "change"):
            shape = np.shape(value) if (value := getattr(self, name)) is not None else ()
            if len(shape) > len(policy.shape) or not _broadcasts(shape, policy.shape):
                raise ConfigError(
                    f"{name} has shape {list(shape)}, and the policy's actions have {list(policy.shape)}: give a "
                    "number or an array of that shape."
                )
        low, high = self._bounds(policy)
        if (low > high).any():
            raise ConfigError(
                f"No action is within the robot's bounds and the policy's: at least {low.tolist()} and at most "
                f"{high.tolist()}. Are they in the policy's units?"
            )

    def limited(self, action: np.ndarray, last: np.ndarray | None, policy: DescribedPolicy) -> np.ndarray:
        """Return `action` [A] within the bounds of the policy and of the robot, whose `last` one was [A].

        Raises NonFiniteError where that is NaN or infinity, ConfigError on a workspace that returns another shape.
        """
        low, high = self._bounds(policy)
        if self.change is not None and last is not None:
            change = np.asarray(self.change)
            action = np.clip(action, last - change, last + change)
        action = np.clip(action, low, high)
        if self.workspace is not None:
            action = np.asarray(self.workspace(action), dtype=np.float64)
            if action.shape != policy.shape:
                raise ConfigError(
                    f"The workspace returned an action of shape {list(action.shape)}, not {list(policy.shape)}."
                )
        if not np.isfinite(action).all():  # of what holds the robot still, or of the workspace
            raise NonFiniteError(f"The robot would be sent {action.tolist()}; no action was executed.")
        return action

    def _bounds(self, policy: DescribedPolicy) -> tuple[np.ndarray, np.ndarray]:
        low = policy.low if self.low is None else np.maximum(policy.low, self.low)
        high = policy.high if self.high is None else np.minimum(policy.high, self.high)
        return low, high


def _broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether an array of `shape` fits one of `target` without making it larger."""
    try:
        return np.broadcast_shapes(shape, target) == target
    except ValueError:
        return False
