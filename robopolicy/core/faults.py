"""Faults of robots and scenes, for testing failure detectors and recovery: what each of them does to an episode.

A fault begins at a control step that follows from the episode's seed (see `robopolicy.core.faulty`). Most act at the
border of a world, on actions and observations; `slip` and `moved_goal` need a world that can be disturbed. A custom
fault derives from `Fault` and is named by import path, or by the entry point robopolicy.faults. Axes: B row, R selected
rows, C control step, T frame, A action dimension.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from robopolicy.client.element_kinds import POSITIONS, keeps_value
from robopolicy.core.arrays import Array
from robopolicy.core.errors import ConfigError
from robopolicy.core.randomness import uniforms
from robopolicy.core.registry import Registry
from robopolicy.core.spec import ENVIRONMENT_STATE, IMAGE_PREFIX, STATE
from robopolicy.core.world import World

FAULTS = Registry(
    "fault",
    "robopolicy.faults",
    {
        name: f"robopolicy.core.faults:{kind}"
        for name, kind in (
            ("slip", "Slip"),
            ("moved_goal", "MovedGoal"),
            ("blackout", "Blackout"),
            ("frozen_joint", "FrozenJoint"),
            ("protective_stop", "ProtectiveStop"),
            ("latency", "Latency"),
            ("sensor_offset", "SensorOffset"),
        )
    },
)
"""Registry for world.options.faults: a class, called as make(world, **options)."""

SLIP, MOVED_GOAL = "slip", "moved_goal"
"""Disturbances of `Disturbable` worlds."""


@runtime_checkable
class Disturbable(Protocol):
    """A world whose state can be disturbed between two control steps. disturbances: names of what it can do."""

    @property
    def disturbances(self) -> tuple[str, ...]:
        """Names of the disturbances; empty if there are none."""
        ...

    def disturb(self, name: str, rows: Array, keys: Array) -> None:
        """Change the state of the rows [R]; keys [R] int64 determine how, so that it depends on the episode alone."""
        ...


@runtime_checkable
class HasGripper(Protocol):
    """A world with a gripper. open_gripper: action element -> its value that opens the gripper; empty without one."""

    @property
    def open_gripper(self) -> dict[int, float]:
        """Action element -> value that opens the gripper."""
        ...


@dataclass(frozen=True)
class Onset:
    """When and how a fault acts.

    since: [B, T] int64, control steps since the fault began; below 0 before, and in rows with another fault or none;
    keys: [B] int64, seeds of the fault's random numbers (for `uniforms`), one per episode.
    """

    since: Array
    keys: Array


class Fault:
    """Base class of faults, which does nothing. Results depend on a row's episode alone, never on the batch.

    world: without faults; arrays: the fault's memory [B, ...] by name, part of snapshots. The methods are called in
    this order: `act` and `disturb` before control steps, `see` with the frames after them, `show` for what is returned.
    Frame f is what follows f control steps, so since is 0 in the frame that the first faulty action is decided from.
    """

    def __init__(self, world: World):
        self.world = world
        self.arrays: dict[str, Array] = {}

    def act(self, actions: Array, onset: Onset) -> Array:
        """Return the executed actions [B, C, A] for the chosen ones; called for every control step of every row."""
        return actions

    def disturbs(self, since: Array) -> Array:
        """Return the control steps [B, C] bool before which `disturb` is to be called; since: see `Onset`."""
        return np.zeros(since.shape, dtype=bool)

    def disturb(self, rows: Array, keys: Array) -> None:
        """Change the world's state in the rows [R], before a control step; keys: [R], see `Onset`."""

    def see(self, key: str, frames: Array, onset: Onset) -> None:
        """Read new frames [B, T, *shape] of a vector field, once each."""

    def show(self, key: str, frames: Array, onset: Onset) -> Array:
        """Return the observed frames [B, T, *shape] of a field for the true ones, which must not be modified."""
        return frames


class Slip(Fault):
    """The grasp is lost: the gripper opens for `steps` control steps; without a gripper, the object is pushed."""

    def __init__(self, world: World, steps: int = 5):
        super().__init__(world)
        self._steps = _positive("slip.steps", steps)
        self._open = world.open_gripper if isinstance(world, HasGripper) else {}
        self._target = None if self._open else _disturbable(world, SLIP)

    def act(self, actions: Array, onset: Onset) -> Array:
        """Implement `Fault.act`: actions [B, C, A]."""
        active = (onset.since >= 0) & (onset.since < self._steps)
        if not self._open or not active.any():
            return actions
        actions = actions.copy()
        for element, value in self._open.items():
            actions[..., element] = np.where(active, value, actions[..., element])
        return actions

    def disturbs(self, since: Array) -> Array:
        """Implement `Fault.disturbs`: since [B, C] -> [B, C] bool."""
        return (since >= 0) & (since < self._steps) & (self._target is not None)

    def disturb(self, rows: Array, keys: Array) -> None:
        """Implement `Fault.disturb`: rows [R], keys [R]."""
        assert self._target is not None
        self._target.disturb(SLIP, rows, keys)


class MovedGoal(Fault):
    """The goal, or the object that is the goal, jumps once."""

    def __init__(self, world: World):
        super().__init__(world)
        self._target = _disturbable(world, MOVED_GOAL)

    def disturbs(self, since: Array) -> Array:
        """Implement `Fault.disturbs`: since [B, C] -> [B, C] bool."""
        return since == 0

    def disturb(self, rows: Array, keys: Array) -> None:
        """Implement `Fault.disturb`: rows [R], keys [R]."""
        self._target.disturb(MOVED_GOAL, rows, keys)


class Blackout(Fault):
    """Every camera is black; without cameras, the vector of the scene (observation.environment_state) stands still."""

    def __init__(self, world: World):
        super().__init__(world)
        fields = world.spec.observation
        self._cameras = [key for key in fields if key.startswith(IMAGE_PREFIX)]
        if not self._cameras and ENVIRONMENT_STATE not in fields:
            raise _impossible("blackout", world, f"it shows neither a camera nor {ENVIRONMENT_STATE}")
        if not self._cameras:
            field = fields[ENVIRONMENT_STATE]
            self.arrays = {"held": np.zeros((world.batch_size, *field.shape), dtype=field.dtype)}

    def see(self, key: str, frames: Array, onset: Onset) -> None:
        """Implement `Fault.see`: keep the last frame before the fault, of frames [B, T, *shape]."""
        if self.arrays and key == ENVIRONMENT_STATE:
            row, place = np.nonzero(onset.since == -1)
            self.arrays["held"][row] = frames[row, place]

    def show(self, key: str, frames: Array, onset: Onset) -> Array:
        """Implement `Fault.show`: frames [B, T, *shape]."""
        is_hidden = key in self._cameras or (bool(self.arrays) and key == ENVIRONMENT_STATE)
        faulty = onset.since >= 0
        if not is_hidden or not faulty.any():
            return frames
        frames = frames.copy()
        row, place = np.nonzero(faulty)
        frames[row, place] = self.arrays["held"][row] if self.arrays else 0
        return frames


class _Held(Fault):
    """Elements of the action have no effect from a step on: a position stays, a velocity or difference is 0."""

    name = ""

    def __init__(self, world: World):
        super().__init__(world)
        action = world.spec.action
        if len(action.shape) != 1:
            raise _impossible(self.name, world, f"its actions have shape {list(action.shape)}, not [A]")
        self._keeps = np.array(keeps_value("zero", POSITIONS, action.names, action.size, action.unit))
        self._still = np.clip(np.zeros(action.size), action.low, action.high)
        self.arrays = {"kept": np.zeros((world.batch_size, action.size))}

    def held(self, onset: Onset, size: int) -> Array:
        """Return a mask [B, C, A] of the elements without effect, size A, or one that broadcasts."""
        raise NotImplementedError

    def act(self, actions: Array, onset: Onset) -> Array:
        """Implement `Fault.act`: actions [B, C, A]."""
        kept_values = self.arrays["kept"]
        row, place = np.nonzero(onset.since == -1)
        kept_values[row] = actions[row, place]
        still = np.where(self._keeps, kept_values, self._still)[:, None]
        return np.where(self.held(onset, actions.shape[-1]), still, actions)


class FrozenJoint(_Held):
    """One element of the action, drawn per episode, has no effect: a position stays, a velocity or difference is 0."""

    name = "frozen_joint"

    def held(self, onset: Onset, size: int) -> Array:
        """Implement `_Held.held`: bool [B, C, A]."""
        element = np.floor(uniforms(onset.keys, 1)[:, 0] * size).astype(np.int64)
        return (np.arange(size) == element[:, None])[:, None] & (onset.since >= 0)[..., None]


class ProtectiveStop(_Held):
    """The robot stands still for `steps` control steps: positions stay, velocities and differences are 0."""

    name = "protective_stop"

    def __init__(self, world: World, steps: int = 20):
        super().__init__(world)
        self._steps = _positive("protective_stop.steps", steps)

    def held(self, onset: Onset, size: int) -> Array:
        """Implement `_Held.held`: bool [B, C, 1]."""
        return ((onset.since >= 0) & (onset.since < self._steps))[..., None]


class Latency(Fault):
    """Actions arrive `steps` control steps late; until the first late one, the last action before goes on."""

    def __init__(self, world: World, steps: int = 5):
        super().__init__(world)
        self._steps = _positive("latency.steps", steps)
        self.arrays = {"past": np.zeros((world.batch_size, steps, *world.spec.action.shape))}

    def act(self, actions: Array, onset: Onset) -> Array:
        """Implement `Fault.act`: actions [B, C, A]."""
        all_actions = np.concatenate([self.arrays["past"], actions], axis=1)  # [B, steps + C, A]
        self.arrays["past"][:] = all_actions[:, actions.shape[1] :]
        late = np.clip(onset.since + 1, 0, self._steps)
        place = self._steps + np.arange(actions.shape[1]) - late
        return all_actions[np.arange(len(all_actions))[:, None], place]


class SensorOffset(Fault):
    """One element of observation.state, drawn per episode, is off by `offset`, in the element's unit, either way."""

    def __init__(self, world: World, offset: float = 0.1):
        super().__init__(world)
        if STATE not in world.spec.observation:
            raise _impossible("sensor_offset", world, f"it shows no {STATE}")
        self._offset = float(offset)

    def show(self, key: str, frames: Array, onset: Onset) -> Array:
        """Implement `Fault.show`: frames [B, T, *shape]."""
        faulty = onset.since >= 0
        if key != STATE or not faulty.any():
            return frames
        flat = frames.reshape(*frames.shape[:2], -1).copy()
        draws = uniforms(onset.keys, 2)
        element = np.floor(draws[:, 0] * flat.shape[-1]).astype(np.int64)
        sign = np.where(draws[:, 1] < 0.5, -1.0, 1.0)
        row, place = np.nonzero(faulty)
        flat[row, place, element[row]] += (sign * self._offset)[row]
        return flat.reshape(frames.shape)


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise ConfigError(f"world.options.faults: {name}={value} must be at least 1 control step.")
    return value


def _disturbable(world: World, name: str) -> Disturbable:
    """Return `world`, if its state can be disturbed in this way; raises ConfigError if not."""
    if isinstance(world, Disturbable) and name in world.disturbances:
        return world
    raise _impossible(name, world, "nothing in its state can be changed in this way")


def _impossible(name: str, world: World, reason: str) -> ConfigError:
    return ConfigError(
        f"'{world.spec.name}' cannot have the fault {name}: {reason}. Leave {name} out of world.options.faults."
    )
