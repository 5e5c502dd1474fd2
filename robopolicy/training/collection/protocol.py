"""What collects an iteration's rollouts for the trainer, and what plays one batch for a collector."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from robopolicy.core.errors import NonFiniteError
from robopolicy.core.rollouts import Rollouts


class Collector(Protocol):
    """Where an iteration's rollouts come from.

    It holds the world, the policy that acts and its random numbers. The trainer calls `restart` before every checkpoint
    whether or not the run is killed: what is in flight is dropped there, or becomes part of `tree`, so that a run that
    is resumed collects what an uninterrupted one does.
    """

    def collect(self, iteration: int) -> Rollouts:
        """Return the rollouts of an iteration (from 0); raises NonFiniteError naming it."""
        ...

    def observe(self, collected: Rollouts, prepared: Rollouts) -> None:
        """Learn what came of the starts that were proposed: all that was collected, and what is learned from."""
        ...

    def restart(self) -> None:
        """Leave the world: the next call begins with resets."""
        ...

    def close(self) -> None:
        """Stop what runs beside the trainer."""
        ...

    def tree(self) -> dict[str, Any]:
        """Return what `restore` needs."""
        ...

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Go on from `tree`."""
        ...


class BatchCollector(Collector, Protocol):
    """A collector whose batches another one may ask for out of step with the iterations."""

    def batch(self, number: int, version: int) -> Rollouts:
        """Return the rollouts of batch `number`, which names their seeds, marked as made by policy `version`."""
        ...


@contextmanager
def while_collecting(number: int) -> Iterator[None]:
    """Let a NonFiniteError say that it happened while batch `number` was collected."""
    try:
        yield
    except NonFiniteError as error:
        raise NonFiniteError(f"{error} It happened while collecting for fine-tuning iteration {number + 1}.") from error
