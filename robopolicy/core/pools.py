"""Pools of worker processes: the same function on many items, with results that depend neither on the number of workers
nor on their order of arrival.

    with open_pool("local", PoolSettings(count=8)) as pool:
        shared = pool.put(large)
        items = [{"seed": seed, "data": shared} for seed in range(100)]
        for index, result in pool.map("package.module:function", items):
            ...  # results[index] = result, and save it

A function is named by its import path and called with each item's entries as keyword arguments. Items and results are
plain data: numbers, text, lists, mappings, numpy arrays. Custom pools are found by import path (`Pool`, `perform`).
"""

import sys
import traceback
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

from robopolicy.core import errors
from robopolicy.core.errors import (
    RobopolicyError,
    RobopolicyNote,
    RobopolicyWarning,
    in_a_sentence,
    in_one_line,
)
from robopolicy.core.registry import Registry, load_dotted, trust, trusted_names

MOST_DEATHS = 3
"""Number of times that a worker may die on the same item before the job stops with an error."""

POOLS = Registry(
    "pool of workers",
    "robopolicy.pools",
    {
        "local": "robopolicy.workers.local:LocalPool",
        "ray": "robopolicy.workers.ray:RayPool",
        "slurm": "robopolicy.workers.slurm:SlurmPool",
    },
)
"""Registry for workers.pool: a class or function that takes `PoolSettings` and returns a `Pool`."""


class WorkerError(RuntimeError):
    """An item raised an unexpected error in a worker; the worker's traceback is attached as a note."""


class WorkerDiedError(RobopolicyError):
    """Workers died on the same item, again and again."""


@dataclass(frozen=True)
class PoolSettings:
    """Settings of a pool. count: number of workers; address: of a cluster, "" for this machine; allow_unauthenticated:
    join a cluster that requires no token; options: of each worker, in the terms of the pool; folder: for files that all
    machines must reach.
    """

    count: int = 1
    address: str = ""
    allow_unauthenticated: bool = False
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    folder: Path = Path("runs") / "workers"


class Pool(Protocol):
    """Workers that run functions. If a worker dies, its item runs again on another worker (see `died`)."""

    @property
    def workers(self) -> int:
        """Number of workers."""
        ...

    def put(self, value: Any) -> Any:
        """Send a large value to the workers once; return a handle that items contain in its place."""
        ...

    def map(self, function: str, items: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Any]]:
        """Yield (index of the item, result of `function`), once per item, in order of arrival.

        function: import path, "package.module:function". Raises the error of an item; the other items in progress are
        stopped.
        """
        ...

    def close(self) -> None:
        """End all workers."""
        ...


@contextmanager
def open_pool(name: str, settings: PoolSettings) -> Generator[Pool]:
    """Open the pool of this name or import path, and end its workers afterwards, also after an error or Ctrl-C."""
    pool = cast(Pool, POOLS.load(name)(settings))
    try:
        yield pool
    finally:
        pool.close()


def context() -> dict[str, Any]:
    """Return the facts about this process that a worker needs, as plain data: places of modules, and what the user
    trusts.
    """
    return {"path": [place for place in sys.path if place], **trusted_names()}


def perform(function: str, item: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Call a function in a worker; return its result, error and warnings as plain data, for `received`.

    given: `context` of the process that asks.
    """
    sys.path.extend(place for place in given["path"] if place not in sys.path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RobopolicyWarning)
        try:
            trust(given)
            reply: dict[str, Any] = {"value": load_dotted(function, "Function")(**item)}
        except Exception as error:
            known = isinstance(error, RobopolicyError) and getattr(errors, type(error).__name__, None) is type(error)
            reply = {
                "error": type(error).__name__ if known else "RobopolicyError" if in_a_sentence(error) else "",
                "text": in_a_sentence(error) or f"A worker raised {type(error).__name__}: {in_one_line(str(error))}.",
                "traceback": traceback.format_exc(),
            }
    notes = [each for each in caught if issubclass(each.category, RobopolicyWarning)]
    return {**reply, "warnings": [(str(each.message), issubclass(each.category, RobopolicyNote)) for each in notes]}


def received(reply: Mapping[str, Any]) -> Any:
    """Return the value of a worker's reply, after repeating its warnings here; raises its error."""
    for text, is_note in reply["warnings"]:
        warnings.warn(text, RobopolicyNote if is_note else RobopolicyWarning, stacklevel=2)
    if "error" not in reply:
        return reply["value"]
    kind: type[Exception] = getattr(errors, reply["error"]) if reply["error"] else WorkerError
    error = kind(reply["text"])
    error.add_note(f"In the worker:\n{reply['traceback']}")
    raise error


def died(deaths: int, how: str) -> None:
    """Raise WorkerDiedError if workers have died on the same item `MOST_DEATHS` times; how: end of the last one."""
    if deaths >= MOST_DEATHS:
        raise WorkerDiedError(
            f"{deaths} workers died on the same item (the last one {how}). If memory is short, set fewer workers "
            "(workers.count) or smaller batches (world.batch_size); otherwise run it in this process to see the "
            "error: workers.count=1 workers.pool=local."
        )
