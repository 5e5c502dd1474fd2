"""Protocols of rollout collectors, and of collectors that play single batches on request."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

from robopolicy.core.errors import NonFiniteError
from robopolicy.core.rollouts import Rollouts


class Collector(Protocol):
    """Source of an iteration's rollouts.

    A collector owns the world, the acting policy and its random numbers. The trainer calls `restart` before every
    checkpoint, whether or not the run is killed. Unfinished work is then discarded or saved in `tree`, so a resumed run
    collects the same data as an uninterrupted one.
    """

    def collect(self, iteration: int) -> Rollouts:
        """Return the rollouts of an iteration (from 0); raises NonFiniteError naming it."""
        ...

    def observe(self, collected: Rollouts, prepared: Rollouts) -> None:
        """Record the outcomes of the proposed initial states, from all rollouts and those used for learning."""
        ...

    def restart(self) -> None:
        """Release the world; the next call starts with resets."""
        ...

    def close(self) -> None:
        """Stop background work."""
        ...

    def tree(self) -> dict[str, Any]:
        """Return the state that `restore` needs."""
        ...

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Restore the state from `tree`."""
        ...


class BatchCollector(Collector, Protocol):
    """A collector whose batches can be requested independently of the iteration count."""

    def batch(self, number: int, version: int) -> Rollouts:
        """Return the rollouts of batch `number` (it determines their seeds), marked with policy `version`."""
        ...


@runtime_checkable
class Reports(Protocol):
    """A collector with metrics of its own."""

    def report(self, number: int) -> dict[str, float]:
        """Return and forget the metrics of batch `number`, by name."""
        ...


@contextmanager
def while_collecting(number: int) -> Iterator[None]:
    """Add to a NonFiniteError that it occurred while batch `number` was collected."""
    try:
        yield
    except NonFiniteError as error:
        raise NonFiniteError(
            f"{error} This happened during collection for fine-tuning iteration {number + 1}."
        ) from error
