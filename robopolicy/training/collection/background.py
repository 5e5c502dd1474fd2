"""Collecting in the background while the learner learns, with bounded staleness.

A thread owns the world and a copy of the policy; physics and tensor work release Python's lock, so both really run at
the same time. Admission is AReaL's rule (arXiv:2505.24298): batch n may be started once the learner has done
n - staleness updates. Weights are taken over between batches, never inside one, so every decision of a batch has one
version, unless it belongs to an episode that was left unfinished (APRIL) and goes on with newer weights.
staleness 1 is collecting one batch ahead. `DelayedCollector` is as stale on purpose, repeatably.
"""

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from contextvars import copy_context
from typing import Any

from torch import Tensor

from robopolicy.core.policy import Trainable
from robopolicy.core.rollouts import Rollouts
from robopolicy.nn.sharing import learned, load_learned
from robopolicy.training.collection.protocol import BatchCollector


class CopyCollector(ABC):
    """A `Collector` on top of `collector`, which acts with `actor`, a copy of `policy`, the one that learns."""

    def __init__(self, collector: BatchCollector, policy: Trainable, actor: Trainable):
        self.collector = collector
        self.policy = policy
        self.actor = actor

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


class BackgroundCollector(CopyCollector):
    """Runs `collector`, whose policy is the copy `actor` that nobody else uses, in a thread of its own.

    staleness: by how many updates the thread may run ahead. With 1 the thread begins a batch as soon as the one before
    it is done, with weights that are one update old: runs repeat bit by bit, unless the system keeps the thread from
    beginning for the whole of an update. With 2 or more which weights a batch sees depends on timing, and runs do not
    repeat. `close` must be called.
    """

    def __init__(self, collector: BatchCollector, policy: Trainable, actor: Trainable, staleness: int):
        super().__init__(collector, policy, actor)
        self.staleness = staleness
        self._changed = threading.Condition()
        self._ready: deque[Rollouts] = deque()
        self._weights: dict[str, Tensor] | None = None
        self._version = self._submitted = 0
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False

    def collect(self, iteration: int) -> Rollouts:
        """Hand over the weights after `iteration` updates and wait for the next batch; raises the thread's errors."""
        # A copy under no lock: the learner is between updates here.
        weights = {name: value.detach().clone() for name, value in learned(self.policy).items()}
        with self._changed:
            self._weights, self._version = weights, iteration
            self._changed.notify_all()
            # The first batch after a (re)start is of the present iteration: nothing is collected for updates gone by.
            if self._thread is None:
                self._submitted = self._version = iteration
                self._stopping = False
                work = copy_context().run  # with it goes the precision that this thread learns in
                self._thread = threading.Thread(target=work, args=(self._work,), name="collector", daemon=True)
                self._thread.start()
            while not self._ready and self._error is None:
                self._changed.wait(0.2)  # wakes up for Ctrl-C
            if self._error is not None:
                raise self._error
            batch = self._ready.popleft()
            self._changed.notify_all()
            return batch

    def observe(self, collected: Rollouts, prepared: Rollouts) -> None:
        """Learn what came of the starts, between two batches of the thread's."""
        with self._changed:
            super().observe(collected, prepared)

    def restart(self) -> None:
        """Stop the thread and drop what it has made: after a checkpoint everything starts from fresh episodes."""
        self.close()
        self._ready.clear()
        super().restart()

    def close(self) -> None:
        """Stop the thread after the batch it is in."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        try:
            while True:
                with self._changed:
                    # AReaL's admission: batch n waits until n - staleness updates are done.
                    while not self._stopping and self._submitted > self._version + self.staleness:
                        self._changed.wait()
                    if self._stopping:
                        return
                    batch = self._submitted
                    version = self._version
                    weights = self._weights
                    self._submitted, self._weights = batch + 1, None
                # Between batches only: a batch is of one version.
                if weights is not None:
                    load_learned(self.actor, weights)
                rollouts = self.collector.batch(batch, version)
                with self._changed:
                    self._ready.append(rollouts)
                    self._changed.notify_all()
        # Kept for `collect`, which raises it in the trainer's thread; otherwise the trainer would wait for ever.
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()


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
        # While fewer than delay + 1 weights are there, the oldest is younger than `delay` updates.
        return self.collector.batch(iteration, iteration + 1 - len(self.past))

    def tree(self) -> dict[str, Any]:
        """Return the collector's state and the old weights."""
        return {**super().tree(), "past": {str(place): weights for place, weights in enumerate(self.past)}}

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Go on from `tree`."""
        super().restore(tree)
        self.past.extend(tree["past"][str(place)] for place in range(len(tree["past"])))
