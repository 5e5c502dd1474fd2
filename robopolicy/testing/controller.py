"""Conformance test for controllers: `check_controller` verifies the `Controller` contract in a world.

A failure is an `AssertionError` whose text names the violated requirement.
"""

from collections.abc import Callable

import numpy as np

from robopolicy.core.errors import RobopolicyError
from robopolicy.core.spec import Observation
from robopolicy.core.world import Controller, World
from robopolicy.testing.world import copy


def check_controller(make: Callable[[], Controller], world: World) -> None:
    """Check that a controller returns actions of the world's shape for every row, also after a reset of a single row.

    make: creates a controller; world: with at least 2 rows. Raises AssertionError naming the violated requirement.
    """
    observation = world.reset(seeds=np.arange(world.batch_size))
    observation_copy, controller = copy(observation), make()
    controller.reset()
    _act(controller, observation, world)
    _promise(
        all(np.array_equal(observation[key], observation_copy[key]) for key in observation_copy),
        "act wrote into the observation that it was given",
    )
    controller.reset(np.array([1]))
    _act(controller, observation_copy, world)


def _act(controller: Controller, observation: Observation, world: World) -> None:
    """Let the controller act and check the result; an exception also counts as a violation, reported with the
    observation.
    """
    try:
        actions = np.asarray(controller.act(observation))
    except Exception as error:
        fields = ", ".join(f"{key} {list(value.shape)}" for key, value in observation.items())
        message = str(error) if isinstance(error, RobopolicyError) else f"act raised {type(error).__name__}: {error}."
        raise AssertionError(f"{message} It was given {fields}.") from error
    rows, size = world.batch_size, tuple(world.spec.action.shape)
    _promise(
        actions.shape == (rows, *size),
        f"act returned {list(actions.shape)} for {rows} rows: it must return one control step per row, [{rows}, "
        f"{', '.join(map(str, size))}]",
    )
    _promise(np.issubdtype(actions.dtype, np.number), f"act returned {actions.dtype} instead of numbers")
    bad_rows = np.flatnonzero(~np.isfinite(actions).reshape(rows, -1).all(1))
    _promise(not len(bad_rows), f"act returned NaN or infinity in rows {', '.join(map(str, bad_rows[:4]))}")


def _promise(kept: bool, text: str) -> None:
    if not kept:
        raise AssertionError(f"{text}.")
