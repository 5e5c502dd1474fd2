"""`Physics`: advances the state of a `MujocoWorld`; observations, rewards and episodes are the world's.

world.options.physics selects one: "native" (MuJoCo on CPU threads), "warp" (mujoco-warp, on a GPU), the entry point of
another package, or the import path of a class. Axes: R running row, B all rows, C control step.
"""
# pyright: reportAttributeAccessIssue=false
# (MuJoCo's compiled classes have no type stubs.)

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import mujoco
import numpy as np

from robopolicy.core.errors import ConfigError, RobopolicyError, did_you_mean
from robopolicy.core.registry import Registry, named_arguments, require_types

PHYSICS = Registry(
    "physics engine",
    "robopolicy.physics",
    {"native": "sims.physics.native:NativePhysics", "warp": "sims.physics.warp:WarpPhysics"},
)
"""Registry for world.options.physics: a class or function, called as make(model, batch_size, threads=N, **options)."""
OPTIONS = "world.options.physics_options."
"""Prefix of an engine's own options on the command line."""


@dataclass(frozen=True)
class StateLayout:
    """Offsets of time, qpos, qvel and activation in MuJoCo's full physics state of `size` numbers."""

    size: int
    qpos: slice
    qvel: slice
    activation: slice


def state_layout(model: mujoco.MjModel) -> StateLayout:
    """Return the layout of `model`'s full physics state: time, qpos, qvel, activation.

    Raises ConfigError when the state contains more than these four (plugins, actuator delays).
    """
    size = mujoco.mj_stateSize(model, mujoco.mjtState.mjSTATE_FULLPHYSICS.value)
    qvel, activation = 1 + model.nq, 1 + model.nq + model.nv
    if size != activation + model.na:
        raise ConfigError(
            "The model has plugin state or actuator delays, which the engine does not support: remove them."
        )
    return StateLayout(size, slice(1, qvel), slice(qvel, activation), slice(activation, size))


class Physics(Protocol):
    """Physics of up to B rows of one model. It stores nothing between calls: a state is complete (see
    `engine.load_model`), and equal states and controls give equal results, in any row and in any number of calls.
    """

    def advance(self, state: np.ndarray, control: np.ndarray, every: int) -> tuple[np.ndarray, np.ndarray]:
        """Simulate C control steps of `every` physics steps each, with constant control within each of them.

        state: [R, nstate] float64, R <= B, in the order of `StateLayout`; control: [R, C, nu]. Returns the state after
        each control step [R, C, nstate] and MuJoCo's sensors [R, C, nsensordata], which are evaluated at the start of
        the last physics step; both float64, contiguous. A row that diverges contains NaN or infinity, or its time
        stands still. Raises ConfigError when a preallocated size is exceeded.
        """
        ...

    def close(self) -> None:
        """Release threads and memory; closing twice is harmless."""
        ...


@runtime_checkable
class PhysicsOfModels(Protocol):
    """A physics engine whose rows may have models of their own, of equal sizes; see `sims.variations`."""

    def advance_each(
        self, models: Sequence[mujoco.MjModel], state: np.ndarray, control: np.ndarray, every: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Simulate as `Physics.advance` does, row r with models[r]: state [R, nstate], control [R, C, nu] -> [R, C,
        nstate], [R, C, nsensordata].
        """
        ...


def make_physics(
    name: str, model: mujoco.MjModel, batch_size: int, threads: int, options: Mapping[str, Any]
) -> Physics:
    """Build the physics engine `name` (registered, or an import path) for `batch_size` rows of `model`.

    threads: number of CPU threads; options: the engine's own. Raises ConfigError on an unknown name or option, and when
    the engine cannot be created.
    """
    make = PHYSICS.load(name)
    known = [each for each in named_arguments(make) if each not in ("model", "batch_size", "threads")]
    for option in options:
        if option not in known:
            listing = f"It has {', '.join(known)}." if known else "It has none."
            raise ConfigError(
                f"world.options.physics={name} has no option '{option}'.{did_you_mean(option, known)} {listing}"
            )
    require_types(make, options, OPTIONS)
    try:
        return cast(Physics, make(model, batch_size, threads=threads, **options))
    except RobopolicyError:
        raise
    except Exception as error:
        raise ConfigError(
            f"world.options.physics={name} could not be created: {type(error).__name__}: {error}. It is called as "
            f"{getattr(make, '__name__', 'make')}(model, {batch_size}, threads={threads})."
        ) from error
