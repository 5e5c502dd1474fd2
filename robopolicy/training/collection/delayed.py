"""Collecting with old weights on purpose, repeatably."""

from collections import deque
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from robopolicy.core.policy import Trainable
from robopolicy.core.rollouts import Rollouts
from robopolicy.nn.sharing import learned, load_learned
from robopolicy.training.collection.copies import CopyCollector
from robopolicy.training.collection.protocol import BatchCollector


class DelayedCollector(CopyCollector):
    """Collects in turns with learning, but with weights that are `delay` updates old: staleness that is repeatable.

    A stand-in for a slow link to the robots, and for measuring what stale data does to an algorithm. The old weights
    stay over a restart.
    """

    def __init__(self, collector: BatchCollector, policy: Trainable, actor: Trainable, delay: int):
        super().__init__(collector, policy, actor)
        self.past: deque[dict[str, Tensor]] = deque(maxlen=delay + 1)

    def collect(self, iteration: int) -> Rollouts:
        """Collect with the oldest weights there are, at most `delay` updates old."""
        self.past.append({name: value.detach().clone() for name, value in learned(self.policy).items()})
        load_learned(self.actor, self.past[0])
        return self.collector.batch(iteration, iteration + 1 - len(self.past))

    def tree(self) -> dict[str, Any]:
        """Return the collector's state and the old weights."""
        return {**super().tree(), "past": {str(place): weights for place, weights in enumerate(self.past)}}

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Go on from `tree`."""
        super().restore(tree)
        self.past.extend(tree["past"][str(place)] for place in range(len(tree["past"])))
