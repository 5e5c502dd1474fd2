"""The `World` protocol: a batch of B episodes, physical or imagined, that a policy acts in.

A world speaks numpy. The caller cannot tell a simulator from a learned model. Axes: B row, C chunk step, A action
dimension, H history frame, R selected rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from robopolicy.core.arrays import Array
from robopolicy.core.spec import Observation, WorldSpec

if TYPE_CHECKING:
    from typing_extensions import TypeIs

Rows = Array | Sequence[int] | None
"""Row indices [R]; None means every row."""


@dataclass(frozen=True)
class Step:
    """What one action chunk led to, before any reset.

    observation: at the end of the chunk, or at the step where the row ended (so a time limit can bootstrap from it);
    trace: the non-image observation fields after every control step, key -> [B, C, *shape] (no history axis);
    rewards: name -> [B, C], zero where not valid; valid: [B, C], False after a row has ended;
    terminated: [B] the task ended (no bootstrap); truncated: [B] a time limit (bootstrap); success: [B] the episode
    has succeeded so far. A row that had ended before the call keeps its flags and its observation, with no valid step.
    Imagination adds horizon_end [B] (the model's rollout was cut: bootstrap, never a real end) and uncertainty [B, C].
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

    @property
    def ended(self) -> Array:
        """Rows [B] that need a reset before they can go on."""
        ended = self.terminated | self.truncated
        return ended if self.horizon_end is None else ended | self.horizon_end

    @property
    def reward(self) -> Array:
        """Sum of the reward terms, [B, C]."""
        return np.sum(list(self.rewards.values()), axis=0)


@runtime_checkable
class World(Protocol):
    """A batch of episodes. `step` never resets; `reset(rows)` touches only those rows."""

    @property
    def spec(self) -> WorldSpec:
        """Fields, ranges, rates and texts; constant for the life of the world."""
        ...

    @property
    def batch_size(self) -> int:
        """Number of rows B."""
        ...

    def reset(
        self, rows: Rows = None, seeds: Sequence[int] | Array | None = None, options: Mapping[str, Any] | None = None
    ) -> Observation:
        """Start new episodes in `rows` and return the observation of ALL rows, [B, H, ...].

        seeds: one per row, [R]; an episode's start depends on its seed alone, not on its row or batch. None: the world
        draws fresh ones from its own generator. options: world-specific start conditions, documented by the world.
        """
        ...

    def step(self, actions: Array) -> Step:
        """Run a chunk [B, C, A] in the spec's units (values outside the range are clipped where spec.clips_actions).

        Raises SpecError on a wrong shape and NonFiniteError on NaN or infinity.
        """
        ...

    def close(self) -> None:
        """Free threads, processes and render contexts."""
        ...


@dataclass(frozen=True)
class Snapshot:
    """The full state of R rows: arrays [R, ...] by name. Restoring it and acting alike repeats the future bitwise."""

    arrays: Mapping[str, Array]

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def take(self, index: Sequence[int] | Array) -> "Snapshot":
        """Select or repeat rows; branching a tree is `snapshot.take([0, 0, 0])`."""
        return Snapshot({name: array[np.asarray(index)] for name, array in self.arrays.items()})


@runtime_checkable
class Snapshots(Protocol):
    """A world whose rows can be saved and restored, into the same or other rows."""

    def snapshot(self, rows: Rows = None) -> Snapshot:
        """Copy the state of `rows` [R], all of them for None: arrays [R, ...]."""
        ...

    def restore(self, snapshot: Snapshot, rows: Rows = None) -> Observation:
        """Overwrite `rows` [R] with `snapshot` (equal length) and return the observation of all rows, [B, H, ...]."""
        ...


@runtime_checkable
class Renders(Protocol):
    """A world that can be looked at."""

    def render(self, rows: Rows = None, camera: str | None = None, height: int = 240, width: int = 240) -> Array:
        """Return uint8 images [R, height, width, 3]; camera None is the world's default view."""
        ...


def can_render(world: object) -> "TypeIs[Renders]":
    """Whether `world` can be looked at: it is a `Renders`, and does not say `draws = False` of itself."""
    return isinstance(world, Renders) and getattr(world, "draws", True)


@runtime_checkable
class Controller(Protocol):
    """A scripted expert or any other hand-written policy, vectorised over rows."""

    def reset(self, rows: Rows = None) -> None:
        """Forget what was remembered about `rows` [R], all of them for None."""
        ...

    def act(self, observation: Observation) -> Array:
        """Return one control step for every row, [B, A], in the world's units."""
        ...


@runtime_checkable
class BeginsEpisodes(Protocol):
    """A controller or another actor that draws random numbers, which belong to the episodes whose seeds it is given."""

    def begin(self, seeds: Array, rows: Rows = None) -> None:
        """Act in new episodes with `seeds` [R] in `rows` [R], all of them for None; called after `reset`."""
        ...


def begin_episodes(actor: object, seeds: Array, rows: Rows = None) -> None:
    """Give `actor` the seeds [R] of the episodes that begin in `rows` [R], if it wants them: it `BeginsEpisodes`."""
    if isinstance(actor, BeginsEpisodes):
        actor.begin(seeds, rows)
