"""What a robot is ready to do, and an action led there. Axes: A action dimension (any shape)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from robopolicy.core.errors import ConfigError, NonFiniteError, did_you_mean
from robopolicy.serving.configuration import RobotSettings
from robopolicy.serving.described import DescribedPolicy


@dataclass(frozen=True)
class ActionLimits:
    """What a robot is ready to do, in the units of its actions, numbers or arrays that broadcast to [A].

    low, high: bounds of an action, within those of the policy; change: most by which it may differ from the one before,
    an episode's first from where the robot is (where actions are positions: velocity / fps; where they are velocities:
    acceleration / fps); workspace: an action [A] -> the nearest that keeps the robot where it may be; unbounded: that
    any action may be sent where neither the policy nor these say a bound.
    """

    low: np.ndarray | float | None = None
    high: np.ndarray | float | None = None
    change: np.ndarray | float | None = None
    workspace: Callable[[np.ndarray], np.ndarray] | None = None
    unbounded: bool = False

    def __post_init__(self) -> None:
        """Raise ConfigError for bounds that bind nothing (NaN, infinite, another shape, low above high) and for changes
        below 0, which would drive a robot away.
        """
        said = f"low is {self.low}, high {self.high} and change {self.change}"
        try:
            given = [np.asarray(each, np.float64) for each in (self.low, self.high, self.change) if each is not None]
            np.broadcast_shapes(*(each.shape for each in given))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{said}: each is a number, or an array of an action's shape.") from error
        if any(np.isnan(each).any() for each in given):
            raise ConfigError(f"{said}: none may be NaN.")
        if any(isinstance(each, bool) for each in (self.low, self.high, self.change)):
            raise ConfigError(f"{said}: each is a number, not true or false.")
        if not self.unbounded and any(np.isinf(each).any() for each in given):
            raise ConfigError(f"{said}: infinity bounds nothing. Leave it out, or say unbounded=True.")
        if self.change is not None and np.min(self.change) < 0:
            raise ConfigError(f"change is {self.change}: an action may differ from the last by 0 or more.")
        if self.low is not None and self.high is not None and np.greater(self.low, self.high).any():
            raise ConfigError(f"low is {self.low} and high {self.high}: low is at most high, in every element.")

    def require_fit(self, policy: DescribedPolicy) -> None:
        """Raise ConfigError where these are no limits of the policy's actions [A], leave it none, or leave open what
        the policy leaves open.
        """
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
        open_ended = ~np.isfinite(low) | ~np.isfinite(high)
        if open_ended.any() and self.change is None and self.workspace is None and not self.unbounded:
            raise ConfigError(nothing_bounds(policy, open_ended))

    def limited(
        self, action: np.ndarray, last: np.ndarray | None, policy: DescribedPolicy, *, held: bool = False
    ) -> np.ndarray:
        """Return `action` [A] within the bounds of the policy and of the robot, and within `change` of its last one.

        last: the last action [A], before an episode's first where the robot is; NaN or None where nobody knows; held:
        whether the action only holds the robot still, which is no reason to move it between bounds. A robot outside of
        the bounds is led back by `change` a step. Raises NonFiniteError where the result is NaN or infinity,
        ConfigError on a workspace that returns another shape.
        """
        low, high = self._bounds(policy)
        if not held:
            action = np.clip(action, low, high)
        change = np.asarray(0.0 if self.change is None else self.change, dtype=np.float64)
        if self.change is not None and last is not None:
            known = np.isfinite(last)
            ahead = policy.turns.shortest(action - np.where(known, last, action))
            action = np.where(known & (np.abs(ahead) > self.change), last + np.clip(ahead, -change, change), action)
            action = policy.turns.within(action)
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


def nothing_bounds(policy: DescribedPolicy, open_ended: np.ndarray) -> str:
    """Return what to give where neither policy nor robot bounds the `open_ended` elements of an action, [A] bool."""
    example = policy.names[int(np.flatnonzero(open_ended)[0])] if policy.names else "NAME"
    return (
        f"Nothing bounds {policy.called(open_ended)}: the policy has no bounds of its own, whatever it answers would "
        "be sent. Say how far an action may differ from the last, ActionLimits(change=0.05) (of robopolicy drive: "
        f"drive.change=0.05), or how large it may be, ActionLimits(low=-1, high=1) (drive.bounds={{{example}: [-1, 1]}}"
        "), in the policy's units; or that any action may be sent: ActionLimits(unbounded=True) (drive.unbounded=true)."
    )


def limits_of(
    settings: RobotSettings, policy: DescribedPolicy, names: Sequence[str], limits_itself: np.ndarray | None = None
) -> ActionLimits:
    """Return the limits that settings say of a robot whose actions have elements of these names.

    names: the robot's, () where they have none; the policy's are understood too. limits_itself: elements [A] bool that
    the robot itself keeps from jumping. Raises ConfigError where bounds name no element, and where nothing bounds one.
    """
    low, high = (np.array(bound, dtype=np.float64) for bound in (policy.low, policy.high))
    for name, (least, most) in settings.bounds.items():
        place = next((list(each).index(name) for each in (names, policy.names) if name in each), None)
        if place is None:
            known = did_you_mean(name, names) or " Its elements have no names, so none can be named here."
            raise ConfigError(f"bounds names '{name}', which is no element of the action.{known}")
        low.flat[place], high.flat[place] = max(low.flat[place], least), min(high.flat[place], most)
    open_ended = ~np.isfinite(low) | ~np.isfinite(high)
    if limits_itself is not None:
        open_ended &= ~limits_itself
    if open_ended.any() and settings.change is None and not settings.unbounded:
        raise ConfigError(nothing_bounds(policy, open_ended))
    return ActionLimits(low=low, high=high, change=settings.change, unbounded=True)


def _broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether an array of `shape` fits one of `target` without making it larger."""
    try:
        return np.broadcast_shapes(shape, target) == target
    except ValueError:
        return False
