"""`check_controller`: the promises of a `Controller`, tested in a world.

A failure is an `AssertionError` whose text names the broken promise.
"""

from collections.abc import Callable

import numpy as np

from robopolicy.core.arrays import Array
from robopolicy.core.conformance import copy
from robopolicy.core.spec import Observation
from robopolicy.core.world import Controller, World


def check_controller(make: Callable[[], Controller], world: World) -> None:
    """Check that a controller answers row by row, in the world's shape, and can be reset row by row.

    make: a new controller; world: of at least 3 rows. Raises AssertionError naming the broken promise.
    """
    rows, size = world.batch_size, tuple(world.spec.action.shape)
    seen = world.reset(seeds=np.arange(rows))
    given, controller = copy(seen), make()
    controller.reset()
    found = _acted(controller, seen)
    _promise(
        found.shape == (rows, *size),
        f"act returned {list(found.shape)} for {rows} rows: it returns one control step for each, "
        f"[{rows}, {', '.join(map(str, size))}]",
    )
    _promise(np.issubdtype(found.dtype, np.number), f"act returned {found.dtype}, not numbers")
    _promise(bool(np.isfinite(found).all()), f"act returned NaN or infinity in rows {_rows(~np.isfinite(found))}")
    _promise(
        all(np.array_equal(seen[key], given[key]) for key in given), "act wrote into the observation that it was given"
    )
    _check_partial_reset(make, given, rows)


def _check_partial_reset(make: Callable[[], Controller], given: Observation, rows: int) -> None:
    """What a controller remembers of a row goes when that row begins anew, and what it knows of others stays."""
    controller = make()
    controller.reset()
    _acted(controller, copy(given))
    controller.reset(np.array([1]))
    found = _acted(controller, copy(given))
    _promise(len(found) == rows, "after reset(rows) act answers for all rows")
    _promise(bool(np.isfinite(found).all()), f"after reset(rows) act returned NaN in rows {_rows(~np.isfinite(found))}")


def _acted(controller: Controller, observation: Observation) -> Array:
    """Let it act; what it raises is a broken promise too, named with what it was shown."""
    try:
        return np.asarray(controller.act(observation))
    except Exception as error:
        fields = ", ".join(f"{key} {list(value.shape)}" for key, value in observation.items())
        raise AssertionError(f"act raised {type(error).__name__}: {error}. It was shown {fields}.") from error


def _rows(where: Array) -> str:
    return ", ".join(map(str, np.flatnonzero(where.reshape(len(where), -1).any(1))[:4]))


def _promise(kept: bool, text: str) -> None:
    if not kept:
        raise AssertionError(f"{text}.")
