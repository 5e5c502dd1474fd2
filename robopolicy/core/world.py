"""World interface (`World`): a batch of B episodes, simulated or imagined, in which a policy acts.

Worlds use numpy arrays. Callers do not distinguish a simulator from a world model. Axes: B row, C chunk step, A action
dimension, H history frame, R selected rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from robopolicy.core.arrays import Array
from robopolicy.core.errors import ConfigError
from robopolicy.core.spec import Observation, WorldSpec

if TYPE_CHECKING:
    from typing_extensions import TypeIs

Rows = Array | Sequence[int] | None
"""Row indices [R]; None means every row."""


@dataclass(frozen=True)
class Step:
    """Result of one action chunk, before any reset.

    observation: at the end of the chunk, or at the step where the row ended (so a time limit can bootstrap from it);
    trace: the non-image observation fields after every control step, key -> [B, C, *shape] (no history axis); rewards:
    name -> [B, C], zero where not valid; valid: [B, C], False after a row has ended; terminated: [B] the task ended (no
    bootstrap); truncated: [B] a time limit (bootstrap); success: [B] the episode has succeeded so far. A row that ended
    before the call keeps its flags and observation, with no valid step. World models add horizon_end [B] (the imagined
    rollout was cut off: bootstrap, never a real end) and uncertainty [B, C]. Where a classifier supplies success,
    own_success [B] is the world's own, if it reports one. benchmark_score [B]: the published score of the episode so
    far, for a benchmark whose score is not the success rate.
    """

    observation: Observation
    trace: Observation
    rewards: Mapping[str, Array]
    valid: Array
    terminated: Array
    truncated: Array
    success: Array
    horizon_end: Array | None = None
    uncertainty: Array | None = None
    own_success: Array | None = None
    benchmark_score: Array | None = None

    @property
    def ended(self) -> Array:
        """Rows [B] that need a reset before they can continue."""
        end_mask = self.terminated | self.truncated
        return end_mask if self.horizon_end is None else end_mask | self.horizon_end

    @property
    def reward(self) -> Array:
        """Sum of the reward terms, [B, C]."""
        return np.sum(list(self.rewards.values()), axis=0)


@runtime_checkable
class World(Protocol):
    """A batch of episodes. `step` never resets automatically; `reset(rows)` affects only those rows."""

    @property
    def spec(self) -> WorldSpec:
        """Fields, ranges, rates and texts; constant for the lifetime of the world."""
        ...

    @property
    def batch_size(self) -> int:
        """Number of rows B."""
        ...

    def reset(
        self, rows: Rows = None, seeds: Sequence[int] | Array | None = None, options: Mapping[str, Any] | None = None
    ) -> Observation:
        """Start new episodes in `rows` and return the observation of ALL rows, [B, H, ...].

        seeds: one per row, [R]; the initial state depends only on the episode's seed, not on its row or batch. None:
        the world draws new seeds from its own generator. options: world-specific initial conditions, documented by the
        world.
        """
        ...

    def step(self, actions: Array) -> Step:
        """Execute a chunk [B, C, A] in the spec's units (values outside the range are clipped if spec.clips_actions).

        Raises SpecError on a wrong shape and NonFiniteError on NaN or infinity.
        """
        ...

    def close(self) -> None:
        """Release threads, processes and render contexts."""
        ...


@dataclass(frozen=True)
class Snapshot:
    """Complete state of R rows: arrays [R, ...] by name. Restoring it and repeating the actions reproduces the future
    bitwise.
    """

    arrays: Mapping[str, Array]

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def take(self, index: Sequence[int] | Array) -> "Snapshot":
        """Select or repeat rows; `snapshot.take([0, 0, 0])` branches a tree."""
        return Snapshot({name: array[np.asarray(index)] for name, array in self.arrays.items()})


@runtime_checkable
class Snapshots(Protocol):
    """A world whose rows can be saved and restored, into the same or other rows."""

    def snapshot(self, rows: Rows = None) -> Snapshot:
        """Copy the state of `rows` [R] (None: all): arrays [R, ...]."""
        ...

    def restore(self, snapshot: Snapshot, rows: Rows = None) -> Observation:
        """Overwrite `rows` [R] with `snapshot` (equal length) and return the observation of all rows, [B, H, ...]."""
        ...


def task_names(world: object, seeds: Array) -> tuple[str, ...]:
    """Return the names of the tasks that episodes with these seeds [E] play; () if the world has only one.

    A world of several tasks has a method `task_names(seeds)`; a wrapper has the world as its attribute `world`.
    """
    inner = _innermost_with(world, "task_names")
    names = () if inner is None else tuple(str(name) for name in inner.task_names(seeds))
    return names if len(set(names)) > 1 else ()


def episode_notes(world: object, seeds: Array) -> tuple[str, ...]:
    """Return notes for readers of a success rate over episodes with these seeds [E], such as repeated initial
    states; a world says it in a method `episode_notes(seeds)`.
    """
    inner = _innermost_with(world, "episode_notes")
    return () if inner is None else tuple(inner.episode_notes(seeds))


def _innermost_with(world: object, method: str) -> Any:
    """Return the world inside wrappers, which have it as their attribute `world`, that has a method; None for none."""
    inner: Any = world
    while not hasattr(inner, method):
        if not hasattr(inner, "world"):
            return None
        inner = inner.world
    return inner


def plain_snapshot(world: World, rows: Rows = None) -> Snapshot | None:
    """Return the state of `rows` [R] (None: all) as arrays of numbers and text, which other processes can restore.

    None if the world cannot save its state, or only as Python objects.
    """
    if not isinstance(world, Snapshots):
        return None
    try:
        snapshot = world.snapshot(rows)
    except ConfigError:  # an environment of a suite that cannot be saved
        return None
    return None if any(array.dtype.hasobject for array in snapshot.arrays.values()) else snapshot


@runtime_checkable
class Renders(Protocol):
    """A world that can be rendered."""

    def render(self, rows: Rows = None, camera: str | None = None, height: int = 240, width: int = 240) -> Array:
        """Return uint8 images [R, height, width, 3]; camera None is the world's default view."""
        ...


def can_render(world: object) -> "TypeIs[Renders]":
    """Whether `world` can be rendered: it is a `Renders` and does not declare `draws = False`."""
    return isinstance(world, Renders) and getattr(world, "draws", True)


@runtime_checkable
class ClassifiesSuccess(Protocol):
    """A world whose success is decided by a classifier."""

    @property
    def success_classifier(self) -> Mapping[str, Any]:
        """JSON-ready description: checkpoint, hold, false_accepts (its measured rate), max_false_accepts, and whether
        the world itself reports success.
        """
        ...


@runtime_checkable
class Controller(Protocol):
    """A scripted expert or any other hand-written policy, vectorised over rows."""

    def reset(self, rows: Rows = None) -> None:
        """Clear the memory of `rows` [R]; None clears all rows."""
        ...

    def act(self, observation: Observation) -> Array:
        """Return one control step for every row, [B, A], in world units."""
        ...


@runtime_checkable
class BeginsEpisodes(Protocol):
    """A controller or other actor that draws random numbers from the seeds of its episodes."""

    def begin(self, seeds: Array, rows: Rows = None) -> None:
        """Start new episodes with `seeds` [R] in `rows` [R] (None: all); called after `reset`."""
        ...


def begin_episodes(actor: object, seeds: Array, rows: Rows = None) -> None:
    """Pass the seeds [R] of new episodes in `rows` [R] to `actor` if it implements `BeginsEpisodes`."""
    if isinstance(actor, BeginsEpisodes):
        actor.begin(seeds, rows)
