"""A served policy, as its server describes it. Axes: H history, A action dimension (any shape)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from robopolicy.core.errors import ServingError, SpecError
from robopolicy.core.holding import Kind, kind_of, kinds_of
from robopolicy.core.spec import IMAGE_PREFIX, QUEUE

LONGEST_HISTORY = 1000
"""Frames; a server that asks for more describes no policy."""


@dataclass(frozen=True)
class DescribedPolicy:
    """A served policy, as its server describes it.

    fields: what it reads of the robot -> shape of a frame; ahead: steps after which its decisions are executed, 0 for
    at once; overlap: steps by which its plans reach beyond a chunk where the server offers a chunking that follows on
    from the plan underway, else 0; shape, low, high: of an action [A]; names, unit: of its elements, () and "" where it
    does not say; elements: field -> names of its elements.
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
        before.
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
        if before is not None and frame.shape != before.shape[2:]:
            raise SpecError(
                f"The robot shows '{key}' as {list(frame.shape)} now and as {list(before.shape[2:])} before: within an "
                "episode a field keeps its shape."
            )
        return frame


def described_policy(metadata: Mapping[str, Any]) -> DescribedPolicy:
    """Return what a server's metadata says of its policy. Raises ServingError where that cannot be."""
    missing = {"observation", "history", "chunk", "action"} - set(metadata)
    if missing:
        raise ServingError(f"The server does not describe its policy ({', '.join(sorted(missing))}): not one of ours?")
    try:
        action = metadata["action"]
        shape = tuple(int(size) for size in action["shape"])
        bounds = [
            np.broadcast_to(np.asarray(default if action.get(name) is None else action[name], np.float64), shape)
            for name, default in (("low", -np.inf), ("high", np.inf))
        ]
        history, chunk, fps = int(metadata["history"]), int(metadata["chunk"]), float(metadata.get("fps", 10.0))
        overlap = int(metadata["prediction"]) - chunk if metadata.get("chunking") else 0
        shapes = {key: tuple(int(size) for size in read["shape"]) for key, read in metadata["observation"].items()}
        queue = shapes.pop(QUEUE, None)
        ahead = 0 if queue is None else int(np.prod(queue)) // max(int(np.prod(shape)), 1)
        names = _names(action)
        elements = {key: _names(read) for key, read in metadata["observation"].items()}
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ServingError(f"The server describes its policy in a form that makes no sense ({error}).") from error
    sizes = 1 <= history <= LONGEST_HISTORY and 1 <= chunk <= LONGEST_HISTORY and 0 <= overlap <= LONGEST_HISTORY
    if sizes and fps == 0:
        raise ServingError('The served policy does not say its control rate: write "fps": N into its robopolicy.json.')
    if not (sizes and 0 < fps < 1e4):
        raise ServingError(f"The server describes no policy: history {history}, chunk {chunk}, {fps} steps a second.")
    unit = str(action.get("unit") or "")
    return DescribedPolicy(
        shapes, ahead, history, chunk, overlap, fps, shape, bounds[0], bounds[1], names, unit, elements
    )


def _names(described: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of a vector's elements, () where they are not one for each."""
    names = tuple(map(str, described.get("names") or ()))
    return names if len(names) == int(np.prod([int(size) for size in described["shape"]])) else ()
