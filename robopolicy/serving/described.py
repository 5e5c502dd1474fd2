"""A served policy, as its server describes it. Axes: H history, A action dimension (any shape)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from robopolicy.core.arrays import is_mapping
from robopolicy.core.errors import NonFiniteError, ServingError, SpecError
from robopolicy.core.holding import Kind, kind_of, kinds_of
from robopolicy.core.spec import IMAGE_PREFIX, QUEUE, Field
from robopolicy.core.turns import Turns, turns_of
from robopolicy.serving.inputs import accepted_names

LONGEST_HISTORY = 1000
"""Frames; a server that asks for more describes no policy."""

MOST_NUMBERS = 10_000
"""Elements of an action, or of a vector that is read."""

MOST = 2**28
"""Elements of one frame of a camera, and of all that is remembered for a policy."""

Range = tuple[np.ndarray, np.ndarray]
"""Least and greatest of the elements of a vector, [N]."""

NO_TURNS = Turns(np.zeros(()), np.zeros(()), np.zeros(()), np.zeros((), dtype=bool))


@dataclass(frozen=True)
class DescribedPolicy:
    """A served policy, as its server describes it.

    fields: what it reads of the robot -> shape of a frame; ahead: steps after which its decisions are executed, 0 for
    at once; overlap: steps by which its plans reach beyond a chunk where the server offers a chunking that follows on
    from the plan underway, else 0; shape, low, high: of an action [A]; names, unit: of its elements, () and "" where it
    does not say; elements: field -> names of its elements; turns: how they go round; known: field -> least and greatest
    [N] of the vectors that the policy was trained on.
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
    elements: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])

    turns: Turns = NO_TURNS
    known: Mapping[str, Range] = field(default_factory=dict[str, Range])

    def with_turns(self, turns: Mapping[str, float], switches: Sequence[str]) -> "DescribedPolicy":
        """Return the same with what settings say of elements that go round or switch; see `turns_of`."""
        low, high = (tuple(map(float, bound.ravel())) for bound in (self.low, self.high))
        action = Field(self.shape, low=low, high=high, unit=self.unit, names=self.names)
        return replace(self, turns=turns_of(action, turns, switches))

    @property
    def kinds(self) -> list[Kind]:
        """What the elements of an action are by their names and unit, [A] in order."""
        size = int(np.prod(self.shape))
        return kinds_of(self.names, self.unit) if self.names else [kind_of("", self.unit)] * size

    def called(self, chosen: np.ndarray) -> str:
        """Return the names of the elements of an action that are chosen [A] bool, their places where they have none."""
        places = np.flatnonzero(chosen)
        return ", ".join(self.names[place] if self.names else f"element {place}" for place in places)

    def frames(self, shown: Mapping[str, Any], before: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return what a robot shows of the fields, one frame each [*shape]; images may have any size.

        before: field -> the frames so far [1, H, *shape], none as an episode begins. Raises ServingError where a field
        is missing, SpecError where a frame is no array of numbers, or of another shape than the field or its frames
        before, NonFiniteError on NaN or infinity.
        """
        missing = [key for key in self.fields if key not in shown]
        if missing:
            raise ServingError(f"The policy reads {', '.join(missing)}, and the robot does not show it.")
        return {key: self._frame(key, shown[key], before.get(key)) for key in self.fields}

    def _frame(self, key: str, shown: Any, before: np.ndarray | None) -> np.ndarray:
        try:
            frame = np.asarray(shown)
        except ValueError as error:  # lists of different lengths
            raise SpecError(f"What the robot shows as '{key}' is no array ({error}).") from error
        if frame.dtype.kind not in "biuf":
            raise SpecError(f"What the robot shows as '{key}' has dtype {frame.dtype}: frames are arrays of numbers.")
        wanted = None if key.startswith(IMAGE_PREFIX) else self.fields[key]
        if wanted is not None and frame.shape != wanted:
            raise SpecError(
                f"The robot shows '{key}' as {list(frame.shape)}, and the policy reads it as {list(wanted)}."
            )
        if frame.dtype.kind == "f" and not np.isfinite(frame).all():
            raise NonFiniteError(f"The robot shows NaN or infinity as '{key}': no action was asked for.")
        if before is not None and frame.shape != before.shape[2:]:
            raise SpecError(
                f"The robot shows '{key}' as {list(frame.shape)} now and as {list(before.shape[2:])} before: within an "
                "episode a field keeps its shape."
            )
        return frame


def described_policy(metadata: Mapping[str, Any]) -> DescribedPolicy:
    """Return what a server's metadata says of its policy.

    Raises ServingError where that cannot be: what is missing or of another type, bounds that bind nothing or nobody can
    keep, sizes that no robot has (a server may lie, and nothing of that size is made here).
    """
    missing = {"observation", "history", "chunk", "action"} - set(metadata)
    if missing:
        raise ServingError(f"The server does not describe its policy ({', '.join(sorted(missing))}): not one of ours?")
    try:
        history, chunk, fps = _whole(metadata["history"]), _whole(metadata["chunk"]), _rate(metadata.get("fps", 10.0))
        overlap = _whole(metadata["prediction"]) - chunk if metadata.get("chunking") else 0
        shape, low, high = _field("action", metadata["action"])
        fields = {key: _field(key, read)[0] for key, read in _mapping(metadata["observation"]).items()}
        known = {key: _range(key, said, fields) for key, said in _mapping(metadata.get("known") or {}).items()}
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        raise ServingError(f"The server describes its policy in a form that makes no sense ({error}).") from error
    queue = math.prod(fields.pop(QUEUE, (0,)))
    sizes = 1 <= history <= LONGEST_HISTORY and 1 <= chunk <= LONGEST_HISTORY and 0 <= overlap <= LONGEST_HISTORY
    if sizes and fps == 0:
        raise ServingError('The served policy does not say its control rate: write "fps": N into its robopolicy.json.')
    if (
        not (sizes and 1e-3 < fps < 1e4)
        or queue % math.prod(shape)
        or history * sum(map(math.prod, fields.values())) > MOST
    ):
        raise ServingError(
            f"The server describes no policy: history {history}, chunk {chunk}, {fps} steps a second, "
            f"{len(fields)} fields, {queue} numbers in its queue."
        )
    ahead, unit = queue // math.prod(shape), metadata["action"].get("unit") or ""
    names, elements = _names(metadata["action"]), {key: _names(read) for key, read in metadata["observation"].items()}
    policy = DescribedPolicy(fields, ahead, history, chunk, overlap, fps, shape, low, high, names, unit, elements)
    return replace(policy, known=known).with_turns({}, ())


def _whole(value: Any) -> int:
    """Return a whole number as it was sent; int() would take 2.7, "2" and True for one. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ValueError(f"{value!r:.40} is no whole number")
    return int(value)


def _rate(value: Any) -> float:
    """Return a number of steps a second. Raises ValueError on what is none."""
    if isinstance(value, bool):
        raise ValueError(f"{value} steps a second")
    return float(value)


def _mapping(value: Any) -> Mapping[Any, Any]:
    if not is_mapping(value):
        raise ValueError(f"{value!r:.40} is no mapping")
    return value


def _range(key: Any, said: Any, fields: Mapping[str, tuple[int, ...]]) -> Range:
    """Return between which values the elements of a vector lay in training [N]. Raises ValueError on what is none."""
    low, high = (np.asarray(_mapping(said)[name], np.float64) for name in ("low", "high"))
    if (
        key not in fields
        or not low.shape == high.shape == (math.prod(fields[key]),)
        or not np.isfinite([low, high]).all()
        or (low > high).any()
    ):
        raise ValueError(f"what is known of {key!r:.40} is no range of it")
    return low, high


def _field(key: Any, described: Any) -> tuple[tuple[int, ...], np.ndarray, np.ndarray]:
    """Return shape and bounds [*shape] of a field, or of the action. Raises ValueError where it cannot be one."""
    described, image = _mapping(described), isinstance(key, str) and key.startswith(IMAGE_PREFIX)
    if not isinstance(key, str) or not isinstance(described["shape"], list | tuple):
        raise ValueError(f"{key!r:.40} is no field: its shape is {described['shape']!r:.40}")
    shape = tuple(_whole(size) for size in described["shape"][:9])
    if len(shape) > 8 or min(shape, default=1) < 1 or math.prod(shape) > (MOST if image else MOST_NUMBERS):
        raise ValueError(f"{key!r:.40} has shape {described['shape']!r:.80}")
    names, unit = described.get("names"), described.get("unit") or ""
    if not isinstance(names or (), list | tuple) or not isinstance(unit, str):
        raise ValueError(f"{key!r:.40} has names {names!r:.40} and unit {unit!r:.40}")
    low, high = (
        np.asarray(default if described.get(name) is None else described[name], np.float64)
        for name, default in (("low", -np.inf), ("high", np.inf))
    )
    nothing = (image and low.size * high.size != 1) or not (low <= high).all()  # nothing is as large as NaN
    if nothing or (low == np.inf).any() or (high == -np.inf).any():
        raise ValueError(f"{key!r:.40} lies between {described.get('low')!r:.80} and {described.get('high')!r:.80}")
    low, high = np.broadcast_to(low, shape), np.broadcast_to(high, shape)
    return shape, low, high


def _names(described: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of a vector's elements, () where they are not one of its own for each."""
    names = tuple(map(str, described.get("names") or ()))
    return names if len(set(names)) == int(np.prod([int(size) for size in described["shape"]])) == len(names) else ()


def camera_shapes(metadata: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return what a client may call the policy's cameras -> shape in which it reads them, [height, width, 3].

    Nothing of a server that does not say so, and no name that may be either of two cameras of different sizes.
    """
    fields, rename = metadata.get("observation"), metadata.get("rename")
    try:
        read = {key: _field(key, each)[0] for key, each in _mapping(fields).items()}
        names = accepted_names(read, _mapping(rename or {}))
    except (ServingError, SpecError, TypeError, ValueError, KeyError, AttributeError, OverflowError):
        return {}  # `described_policy` says what is wrong with it
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for key, shape in read.items():
        if key.startswith(IMAGE_PREFIX) and len(shape) == 3 and shape[-1] == 3:
            for name in names[key]:
                shapes.setdefault(name, set()).add(shape)
    return {name: next(iter(each)) for name, each in shapes.items() if len(each) == 1}
