"""A world around another one: a subclass changes what it must and passes on the rest. Axes: B row, R selected rows."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, cast

import numpy as np

from robopolicy.core.arrays import Array
from robopolicy.core.errors import ConfigError, SpecError
from robopolicy.core.spec import Observation, WorldSpec, validate_actions
from robopolicy.core.stages import Stage
from robopolicy.core.world import Renders, Rows, Snapshot, Snapshots, Step, World, can_render


class WrappedWorld:
    """Base class of worlds around `world`, without `reset` and `step`; spec: of the result."""

    def __init__(self, world: World, spec: WorldSpec):
        self.world, self._spec = world, spec

    @property
    def spec(self) -> WorldSpec:
        """Spec of the wrapped world, with the changes of the wrapper."""
        return self._spec

    @property
    def batch_size(self) -> int:
        """Number of rows B."""
        return self.world.batch_size

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Stages of the wrapped world; empty if it declares none."""
        return getattr(self.world, "stages", ())

    @property
    def draws(self) -> bool:
        """Whether the world can be rendered."""
        return can_render(self.world)

    def render(self, rows: Rows = None, camera: str | None = None, height: int = 240, width: int = 240) -> Array:
        """Return uint8 images [R, height, width, 3]; raises ConfigError if the world cannot be rendered."""
        if not isinstance(self.world, Renders):
            raise ConfigError(f"'{self.spec.name}' cannot be rendered: it has no render() method.")
        return self.world.render(rows, camera, height, width)

    def close(self) -> None:
        """Close the world."""
        self.world.close()


class WrappedSnapshots(WrappedWorld, ABC):
    """Adds `Snapshots`: those of the wrapped world, with the arrays of the wrapper.

    prefix: of the names of the wrapper's arrays in a snapshot; origin: description of the worlds whose snapshots fit.
    """

    prefix: ClassVar[str]

    @property
    @abstractmethod
    def origin(self) -> str:
        """Description for errors, such as "a world with latency_steps=2"."""

    @property
    @abstractmethod
    def own_arrays(self) -> Mapping[str, Array]:
        """Arrays [B, ...] of the wrapper's state, by name."""

    @abstractmethod
    def restored(self, observation: Observation, rows: Array) -> Observation:
        """Return the observation of all rows, [B, H, ...], after `rows` [R] were restored; observation: the wrapped
        world's.
        """

    def snapshot(self, rows: Rows = None) -> Snapshot:
        """Copy the state of `rows` [R], including the wrapper's arrays [R, ...]; see `Snapshots`."""
        assert isinstance(self.world, Snapshots)
        index = slice(None) if rows is None else np.asarray(rows)
        added_arrays = {self.prefix + name: array[index].copy() for name, array in self.own_arrays.items()}
        return Snapshot({**self.world.snapshot(rows).arrays, **added_arrays})

    def restore(self, snapshot: Snapshot, rows: Rows = None) -> Observation:
        """Overwrite `rows` [R] with `snapshot`; return the observation of all rows, [B, H, ...].

        Raises SpecError for a snapshot of a world with another wrapper, and as the world does.
        """
        assert isinstance(self.world, Snapshots)
        arrays, own_arrays = dict(snapshot.arrays), self.own_arrays
        saved_arrays = {name: arrays.pop(self.prefix + name, None) for name in own_arrays}
        if any(array is None or array.shape[1:] != own_arrays[name].shape[1:] for name, array in saved_arrays.items()):
            raise SpecError(f"This snapshot is not from {self.origin}.")
        observation = self.world.restore(Snapshot(arrays), rows)
        index = np.arange(self.batch_size) if rows is None else np.asarray(rows)
        for name, array in saved_arrays.items():
            own_arrays[name][index] = array
        return self.restored(observation, index)


def step_by_step(world: World, actions: Array, control: Callable[[Array], Step]) -> Step:
    """Execute a chunk [B, C, A] of `world` in control steps; control: [B, 1, A] -> its step. Raises SpecError if the
    chunk does not fit.
    """
    actions = np.asarray(actions, np.float64)
    validate_actions(actions, world.spec.action, world.batch_size)
    return join_steps([control(actions[:, place : place + 1]) for place in range(actions.shape[1])])


def join_steps(steps: Sequence[Step]) -> Step:
    """Return consecutive steps [B, c, ...] as one [B, C, ...]."""
    last = steps[-1]
    if len(steps) == 1:
        return last
    uncertainty = [cast(Array, each.uncertainty) for each in steps]
    return replace(
        last,
        trace={key: np.concatenate([each.trace[key] for each in steps], axis=1) for key in last.trace},
        rewards={name: np.concatenate([each.rewards[name] for each in steps], axis=1) for name in last.rewards},
        valid=np.concatenate([each.valid for each in steps], axis=1),
        uncertainty=None if last.uncertainty is None else np.concatenate(uncertainty, axis=1),
    )
