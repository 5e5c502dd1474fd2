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
    """Return a collector whose rollouts are the leader's in every process; `collector` itself with one process, or if
    the processes divide its shards.

    generators: of the run; after collecting, those of all processes continue where the leader's are.
    """
    is_divided = isinstance(collector, ShardedStreams | ShardedEpisodes) and collector.shards.is_divided
    return collector if replicas.count() == 1 or is_divided else SharedCollector(collector, generators)


class SharedCollector:
    """Collector of the leader, whose rollouts go to all processes; the other processes' worlds stay unused."""

    def __init__(self, collector: Collector, generators: Generators):
        self.collector, self.generators = collector, generators

    def collect(self, iteration: int) -> Rollouts:
        """See `Collector`."""
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
        """See `Collector`."""
        if replicas.leads():
            self.collector.observe(collected, prepared)

    def restart(self) -> None:
        """See `Collector`."""
        self.collector.restart()

    def close(self) -> None:
        """See `Collector`."""
        self.collector.close()

    def report(self, number: int) -> dict[str, float]:
        """See `Reports`."""
        if replicas.leads() and isinstance(self.collector, Reports):
            return self.collector.report(number)
        return {}

    def tree(self) -> dict[str, Any]:
        """See `Collector`."""
        return self.collector.tree()

    def restore(self, tree: Mapping[str, Any]) -> None:
        """See `Collector`."""
        self.collector.restore(tree)
