"""What all collectors share that act with a copy of the policy: the collector under them does the rest."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from robopolicy.core.policy import Trainable
from robopolicy.core.rollouts import Rollouts
from robopolicy.training.collection.protocol import BatchCollector


class CopyCollector(ABC):
    """A `Collector` on top of `collector`, which acts with `actor`, a copy of `policy`, the one that learns."""

    def __init__(self, collector: BatchCollector, policy: Trainable, actor: Trainable):
        self.collector, self.policy, self.actor = collector, policy, actor

    @abstractmethod
    def collect(self, iteration: int) -> Rollouts:
        """Return the rollouts of an iteration (from 0); raises NonFiniteError naming it."""

    def observe(self, collected: Rollouts, prepared: Rollouts) -> None:
        """Learn what came of the starts."""
        self.collector.observe(collected, prepared)

    def restart(self) -> None:
        """Begin with fresh episodes at the next call."""
        self.collector.restart()

    def close(self) -> None:
        """Stop what runs beside the trainer."""
        self.collector.close()

    def tree(self) -> dict[str, Any]:
        """Return the collector's state."""
        return self.collector.tree()

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Go on from `tree`."""
        self.collector.restore(tree)
