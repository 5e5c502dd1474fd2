"""Client-side description of a served policy, from the server's metadata, and the action limits of a robot.

Axes: H history, A action dimension (any shape).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Tuple

import numpy as np

from .element_kinds import Kind, kind_of, kinds_of
from .errors import ConfigError, NonFiniteError, ServingError, SpecError, did_you_mean
from .keys import IMAGE_PREFIX, QUEUE, accepted_names
from .periodicity import Periodicity, periodicity_of
from .settings import RobotSettings

LONGEST_HISTORY = 1000
"""Maximum observation history in frames; metadata with a longer one is rejected."""

MOST_NUMBERS = 10_000
"""Maximum number of elements of an action, or of a vector field."""

MOST = 2**28
"""Maximum number of elements of one camera frame, and of a policy's complete history."""

Range = Tuple[np.ndarray, np.ndarray]
"""Lowest and highest values of a vector's elements, [N]."""

NO_TURNS = Periodicity(np.zeros(()), np.zeros(()), np.zeros(()), np.zeros((), dtype=bool))


@dataclass(frozen=True)
class DescribedPolicy:
    """A served policy, as described by its server.

    fields: fields that it reads from the robot -> shape of a frame; ahead: latency in control steps that the policy was
    trained for, 0 for none; overlap: number of predicted steps beyond the chunk, for servers whose chunking continues
    the robot's remaining actions, else 0; shape, low, high: of an action [A]; names, unit: of its elements, () and ""
    if unknown; elements: field -> names of its elements; turns: their periods; known: field -> lowest and highest
    values [N] of the vectors in the training data.
    """

    fields: Mapping[str, tuple[int, ...]]
    ahead: int
    history: int
    chunk: int
    overlap: int
    fps: float
    shape: tuple[int, ...]
    low: np.ndarray
    high: np.ndarray
    names: tuple[str, ...] = ()
    unit: str = ""
    elements: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    turns: Periodicity = NO_TURNS
    known: Mapping[str, Range] = field(default_factory=dict)

    def with_turns(self, turns: Mapping[str, float], switches: Sequence[str]) -> DescribedPolicy:
        """Return a copy with the periodic and switching elements from the settings; see `periodicity_of`."""
        return replace(self, turns=periodicity_of(self, turns, switches))

    @property
    def kinds(self) -> list[Kind]:
        """Kinds of the action elements according to their names and unit, [A] in order."""
        size = int(np.prod(self.shape))
        return kinds_of(self.names, self.unit) if self.names else [kind_of("", self.unit)] * size

    def called(self, chosen: np.ndarray) -> str:
        """Return the names of the action elements selected by `chosen` [A] bool, or their indices if they have no
        names.
        """
        places = np.flatnonzero(chosen)
        return ", ".join(self.names[place] if self.names else f"element {place}" for place in places)

    def frames(self, shown: Mapping[str, Any], before: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the policy's fields from a robot's observation, one frame each [*shape]; images may have any size.

        before: field -> previous frames [1, H, *shape], empty at the start of an episode. Raises ServingError when a
        field is missing, SpecError when a frame is not a numeric array or its shape differs from the field or the
        previous frames, NonFiniteError on NaN or infinity.
        """
        missing_fields = [key for key in self.fields if key not in shown]
        if missing_fields:
            raise ServingError(f"The policy reads {', '.join(missing_fields)}, which the robot does not provide.")
        return {key: self._frame(key, shown[key], before.get(key)) for key in self.fields}

    def _frame(self, key: str, shown: Any, before: np.ndarray | None) -> np.ndarray:
        try:
            frame = np.asarray(shown)
        except ValueError as error:  # lists of different lengths
            raise SpecError(f"The robot's '{key}' is not an array ({error}).") from error
        if frame.dtype.kind not in "biuf":
            raise SpecError(f"The robot's '{key}' has dtype {frame.dtype}, but must be a numeric array.")
        expected_shape = None if key.startswith(IMAGE_PREFIX) else self.fields[key]
        if expected_shape is not None and frame.shape != expected_shape:
            raise SpecError(
                f"The robot's '{key}' has shape {list(frame.shape)}, but the policy reads shape {list(expected_shape)}."
            )
        if frame.dtype.kind == "f" and not np.isfinite(frame).all():
            raise NonFiniteError(f"The robot's '{key}' contains NaN or infinity: no action was requested.")
        if before is not None and frame.shape != before.shape[2:]:
            raise SpecError(
                f"The robot's '{key}' has shape {list(frame.shape)} now but had {list(before.shape[2:])} before: the "
                "shape must not change within an episode."
            )
        return frame


def described_policy(metadata: Mapping[str, Any]) -> DescribedPolicy:
    """Return the policy description from a server's metadata.

    Raises ServingError when it is invalid: missing or wrongly typed entries, bounds that exclude nothing or everything,
    or implausible sizes (metadata is untrusted, and nothing of that size is allocated here).
    """
    missing_keys = {"observation", "history", "chunk", "action"} - set(metadata)
    if missing_keys:
        raise ServingError(
            f"The server does not describe its policy ({', '.join(sorted(missing_keys))} missing): was it "
            "started with `robopolicy serve`?"
        )
    try:
        history = _whole(metadata["history"])
        chunk = _whole(metadata["chunk"])
        fps = _rate(metadata.get("fps", 10.0))
        overlap = _whole(metadata["prediction"]) - chunk if metadata.get("chunking") else 0
        shape, low, high = _field("action", metadata["action"])
        fields = {key: _field(key, entry)[0] for key, entry in _mapping(metadata["observation"]).items()}
        ranges = {key: _range(key, bounds, fields) for key, bounds in _mapping(metadata.get("known") or {}).items()}
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        raise ServingError(f"The server's description of its policy is invalid ({error}).") from error
    queue = math.prod(fields.pop(QUEUE, (0,)))
    sizes = 1 <= history <= LONGEST_HISTORY and 1 <= chunk <= LONGEST_HISTORY and 0 <= overlap <= LONGEST_HISTORY
    if sizes and fps == 0:
        raise ServingError('The served policy\'s control rate is unknown: add "fps": N to its robopolicy.json.')
    if (
        not (sizes and 1e-3 < fps < 1e4)
        or queue % math.prod(shape)
        or history * sum(map(math.prod, fields.values())) > MOST
    ):
        raise ServingError(
            f"The server's description of its policy is invalid: history {history}, chunk {chunk}, {fps} steps per "
            f"second, {len(fields)} fields, {queue} numbers in the action queue."
        )
    latency, unit = queue // math.prod(shape), metadata["action"].get("unit") or ""
    names, elements = _names(metadata["action"]), {key: _names(entry) for key, entry in metadata["observation"].items()}
    policy = DescribedPolicy(fields, latency, history, chunk, overlap, fps, shape, low, high, names, unit, elements)
    return replace(policy, known=ranges).with_turns({}, ())


def _whole(value: Any) -> int:
    """Return an integer as it was sent; int() would also accept 2.7, "2" and True. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise ValueError(f"{value!r:.40} is not an integer")
    return int(value)


def _rate(value: Any) -> float:
    """Return a number of steps per second. Raises ValueError if it is not a number."""
    if isinstance(value, bool):
        raise ValueError(f"{value} steps per second")
    return float(value)


def _mapping(value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{value!r:.40} is not a mapping")
    return value


def _range(key: Any, said: Any, fields: Mapping[str, tuple[int, ...]]) -> Range:
    """Return the lowest and highest values of a vector in the training data [N]. Raises ValueError if they are not a
    valid range.
    """
    low, high = (np.asarray(_mapping(said)[name], np.float64) for name in ("low", "high"))
    if (
        key not in fields
        or not low.shape == high.shape == (math.prod(fields[key]),)
        or not np.isfinite([low, high]).all()
        or (low > high).any()
    ):
        raise ValueError(f"the training range of {key!r:.40} is invalid")
    return low, high


def _field(key: Any, described: Any) -> tuple[tuple[int, ...], np.ndarray, np.ndarray]:
    """Return shape and bounds [*shape] of a field or of the action. Raises ValueError if the description is invalid."""
    described, image = _mapping(described), isinstance(key, str) and key.startswith(IMAGE_PREFIX)
    if not isinstance(key, str) or not isinstance(described["shape"], (list, tuple)):
        raise ValueError(f"{key!r:.40} is not a field: its shape is {described['shape']!r:.40}")
    shape = tuple(_whole(size) for size in described["shape"][:9])
    if len(shape) > 8 or min(shape, default=1) < 1 or math.prod(shape) > (MOST if image else MOST_NUMBERS):
        raise ValueError(f"{key!r:.40} has shape {described['shape']!r:.80}")
    names, unit = described.get("names"), described.get("unit") or ""
    if not isinstance(names or (), (list, tuple)) or not isinstance(unit, str):
        raise ValueError(f"{key!r:.40} has names {names!r:.40} and unit {unit!r:.40}")
    low, high = (
        np.asarray(default if described.get(name) is None else described[name], np.float64)
        for name, default in (("low", -np.inf), ("high", np.inf))
    )
    is_empty = (image and low.size * high.size != 1) or not (low <= high).all()  # nothing is as large as NaN
    if is_empty or (low == np.inf).any() or (high == -np.inf).any():
        raise ValueError(f"{key!r:.40} lies between {described.get('low')!r:.80} and {described.get('high')!r:.80}")
    low, high = np.broadcast_to(low, shape), np.broadcast_to(high, shape)
    return shape, low, high


def _names(described: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of a vector's elements, () unless there is a unique one for each."""
    names = tuple(map(str, described.get("names") or ()))
    return names if len(set(names)) == int(np.prod([int(size) for size in described["shape"]])) == len(names) else ()


def camera_shapes(metadata: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the names that a client may use for the policy's cameras -> shape that the policy reads, [height, width,
    3].

    Returns {} if the server does not report it; omits names that could mean two cameras of different sizes.
    """
    fields, rename = metadata.get("observation"), metadata.get("rename")
    try:
        shape_of_key = {key: _field(key, each)[0] for key, each in _mapping(fields).items()}
        names = accepted_names(shape_of_key, _mapping(rename or {}))
    except (ServingError, SpecError, TypeError, ValueError, KeyError, AttributeError, OverflowError):
        return {}  # `described_policy` says what is wrong with it
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for key, shape in shape_of_key.items():
        if key.startswith(IMAGE_PREFIX) and len(shape) == 3 and shape[-1] == 3:
            for name in names[key]:
                shapes.setdefault(name, set()).add(shape)
    return {name: next(iter(each)) for name, each in shapes.items() if len(each) == 1}


@dataclass(frozen=True)
class ActionLimits:
    """Limits of a robot's actions, in action units, as numbers or arrays that broadcast to [A].

    low, high: bounds of an action, within the policy's; change: maximum difference to the previous action, for an
    episode's first action to the robot's position (for position actions: velocity / fps; for velocity actions:
    acceleration / fps); workspace: an action [A] -> the closest action within the permitted workspace; unbounded: allow
    any action where neither the policy nor these limits give a bound.
    """

    low: np.ndarray | float | None = None
    high: np.ndarray | float | None = None
    change: np.ndarray | float | None = None
    workspace: Callable[[np.ndarray], np.ndarray] | None = None
    unbounded: bool = False

    def __post_init__(self) -> None:
        """Raise ConfigError for invalid bounds (NaN, infinite, another shape, low above high) and for a negative
        change, which would drive a robot away.
        """
        prefix = f"low is {self.low}, high {self.high} and change {self.change}"
        try:
            arrays = [np.asarray(each, np.float64) for each in (self.low, self.high, self.change) if each is not None]
            np.broadcast_shapes(*(each.shape for each in arrays))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{prefix}: each must be a number, or an array with the shape of an action.") from error
        if any(np.isnan(each).any() for each in arrays):
            raise ConfigError(f"{prefix}: none may be NaN.")
        if any(isinstance(each, bool) for each in (self.low, self.high, self.change)):
            raise ConfigError(f"{prefix}: each must be a number, not true or false.")
        if not self.unbounded and any(np.isinf(each).any() for each in arrays):
            raise ConfigError(f"{prefix}: infinity is not a limit. Remove it, or set unbounded=True.")
        if self.change is not None and np.min(self.change) < 0:
            raise ConfigError(
                f"change={self.change} must be at least 0 (the largest change between consecutive actions)."
            )
        if self.low is not None and self.high is not None and np.greater(self.low, self.high).any():
            raise ConfigError(f"low={self.low} must not exceed high={self.high} in any element.")

    def require_fit(self, policy: DescribedPolicy) -> None:
        """Raise ConfigError when the limits do not fit the policy's actions [A], exclude all actions, or leave elements
        unbounded that the policy leaves unbounded.
        """
        for name in ("low", "high", "change"):
            shape = np.shape(value) if (value := getattr(self, name)) is not None else ()
            if len(shape) > len(policy.shape) or not _broadcasts(shape, policy.shape):
                raise ConfigError(
                    f"{name} has shape {list(shape)}, but the policy's actions have {list(policy.shape)}: pass a "
                    "number or an array of that shape."
                )
        low, high = self._bounds(policy)
        if (low > high).any():
            raise ConfigError(
                "No action is within both the robot's bounds and the policy's: it would have to be at least "
                f"{low.tolist()} and at most {high.tolist()}. Are the bounds in the policy's units?"
            )
        open_ended = ~np.isfinite(low) | ~np.isfinite(high)
        if open_ended.any() and self.change is None and self.workspace is None and not self.unbounded:
            raise ConfigError(unbounded_message(policy, open_ended))

    def limited(
        self, action: np.ndarray, last: np.ndarray | None, policy: DescribedPolicy, *, held: bool = False
    ) -> np.ndarray:
        """Return `action` [A] clipped to the bounds of the policy and the robot, and to `change` from the last one.

        last: the last action [A], or the robot's position before an episode's first action; NaN or None if unknown;
        held: whether the action only holds the robot still, in which case it is not moved into the bounds. A robot
        outside the bounds is led back by `change` per step. Raises NonFiniteError when the result is NaN or infinity,
        ConfigError when the workspace returns another shape.
        """
        low, high = self._bounds(policy)
        if not held:
            action = np.clip(action, low, high)
        change = np.asarray(0.0 if self.change is None else self.change, dtype=np.float64)
        if self.change is not None and last is not None:
            is_finite = np.isfinite(last)
            difference = policy.turns.shortest(action - np.where(is_finite, last, action))
            action = np.where(
                is_finite & (np.abs(difference) > self.change), last + np.clip(difference, -change, change), action
            )
            action = policy.turns.within(action)
        if self.workspace is not None:
            action = np.asarray(self.workspace(action), dtype=np.float64)
            if action.shape != policy.shape:
                raise ConfigError(
                    f"The workspace returned an action of shape {list(action.shape)}, not {list(policy.shape)}."
                )
        if not np.isfinite(action).all():  # of what holds the robot still, or of the workspace
            raise NonFiniteError(f"The action {action.tolist()} is not finite; no action was executed.")
        return action

    def _bounds(self, policy: DescribedPolicy) -> tuple[np.ndarray, np.ndarray]:
        low = policy.low if self.low is None else np.maximum(policy.low, self.low)
        high = policy.high if self.high is None else np.minimum(policy.high, self.high)
        return low, high


def unbounded_message(policy: DescribedPolicy, open_ended: np.ndarray) -> str:
    """Return the error message for the `open_ended` action elements, [A] bool, that neither policy nor robot bounds."""
    example = policy.names[int(np.flatnonzero(open_ended)[0])] if policy.names else "NAME"
    return (
        f"No limit applies to {policy.called(open_ended)}: the policy has no bounds, so any action that it outputs "
        "would be sent. Limit the difference between consecutive actions, ActionLimits(change=0.05) (for robopolicy "
        f"drive: drive.max_action_change=0.05), or the range, ActionLimits(low=-1, high=1) "
        f"(drive.bounds={{{example}: [-1, "
        "1]}), in the policy's units; or allow any action: ActionLimits(unbounded=True) (drive.unbounded=true)."
    )


def limits_of(
    settings: RobotSettings, policy: DescribedPolicy, names: Sequence[str], limits_itself: np.ndarray | None = None
) -> ActionLimits:
    """Return the limits configured for a robot whose action elements have these names.

    names: the robot's names, () if it has none; the policy's names are accepted too. limits_itself: elements [A] bool
    whose jumps the robot limits itself. Raises ConfigError when bounds name an unknown element, and when an element has
    no bound.
    """
    low, high = (np.array(bound, dtype=np.float64) for bound in (policy.low, policy.high))
    for name, (lowest, highest) in settings.bounds.items():
        place = next((list(each).index(name) for each in (names, policy.names) if name in each), None)
        if place is None:
            hint = did_you_mean(name, names) or " The action's elements have no names, so none can be selected here."
            raise ConfigError(f"bounds contains '{name}', which is not an element of the action.{hint}")
        if lowest > high.flat[place] or highest < low.flat[place]:
            raise ConfigError(
                f"The bounds of '{name}' are {lowest:g} to {highest:g}, but the policy's are {low.flat[place]:g} to "
                f"{high.flat[place]:g}: no action is within both. Are they in the policy's units?"
            )
        low.flat[place], high.flat[place] = max(low.flat[place], lowest), min(high.flat[place], highest)
    open_ended = ~np.isfinite(low) | ~np.isfinite(high)
    if limits_itself is not None:
        open_ended &= ~limits_itself
    if open_ended.any() and settings.max_action_change is None and not settings.unbounded:
        raise ConfigError(unbounded_message(policy, open_ended))
    return ActionLimits(low=low, high=high, change=settings.max_action_change, unbounded=True)


def _broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether an array of `shape` broadcasts to `target` without enlarging it."""
    try:
        return np.broadcast_shapes(shape, target) == target
    except ValueError:
        return False
