"""Collection in a data-parallel run: the leader plays, and all processes receive its rollouts, unless they divide the
shards.
"""

from collections.abc import Mapping
from typing import Any

from robopolicy.core import replicas
from robopolicy.core.exchange import broadcast
from robopolicy.core.randomness import Generators
from robopolicy.core.rollouts import Rollouts
from robopolicy.training.collection.protocol import Collector, Reports
from robopolicy.training.collection.shards import ShardedEpisodes, ShardedStreams


def shared_by_replicas(collector: Collector, generators: Generators) -> Collector:
    """Return a collector that gives every process the rollouts of rank 0; `collector` itself with one process, or if
    the processes divide its shards.

    generators: random generators of the run; after each collection, those of all processes have the state of rank 0's.
    """
    is_divided = isinstance(collector, ShardedStreams | ShardedEpisodes) and collector.shards.is_divided
    return collector if replicas.count() == 1 or is_divided else SharedCollector(collector, generators)


class SharedCollector:
    """Gives the rollouts that rank 0 collects to all processes; the worlds of the other processes are not used."""

    def __init__(self, collector: Collector, generators: Generators):
        self.collector, self.generators = collector, generators

    def collect(self, iteration: int) -> Rollouts:
        """Collect an iteration on rank 0; return its rollouts in every process."""
        own: list[Rollouts] = []

        def played() -> dict[str, Any]:
            own.append(self.collector.collect(iteration))
            return {"rollouts": own[0].tree(), "generators": self.generators.state()}

        received = broadcast(played)
        if own:
            return own[0]
        self.generators.restore(received["generators"])
        return Rollouts.of(received["rollouts"]).to(self.generators.device)

    def observe(self, collected: Rollouts, prepared: Rollouts) -> None:
        """Pass the outcomes to rank 0's collector."""
        if replicas.leads():
            self.collector.observe(collected, prepared)

    def restart(self) -> None:
        """Release the world; the next call starts with resets."""
        self.collector.restart()

    def close(self) -> None:
        """Stop background work."""
        self.collector.close()

    def report(self, number: int) -> dict[str, float]:
        """Return and forget the metrics of batch `number`, by name; only rank 0 has any."""
        if replicas.leads() and isinstance(self.collector, Reports):
            return self.collector.report(number)
        return {}

    def tree(self) -> dict[str, Any]:
        """Return the state that `restore` needs."""
        return self.collector.tree()

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Restore the state from `tree`."""
        self.collector.restore(tree)
