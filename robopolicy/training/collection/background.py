"""Collecting in the background while the learner learns, with bounded staleness.

A thread owns the world and a copy of the policy; physics and tensor work release Python's lock, so both really run at
the same time. Admission is AReaL's rule (arXiv:2505.24298): batch n may be started once the learner has done
n - staleness updates. Weights are taken over between batches, never inside one, so every decision of a batch has one
version, unless it belongs to an episode that was left unfinished (APRIL) and goes on with newer weights.
staleness 1 is collecting one batch ahead.
"""

import threading
from collections import deque
from contextvars import copy_context

from torch import Tensor

from robopolicy.core.policy import Trainable
from robopolicy.core.rollouts import Rollouts
from robopolicy.nn.sharing import learned, load_learned
from robopolicy.training.collection.copies import CopyCollector
from robopolicy.training.collection.protocol import BatchCollector


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
        weights = {name: value.detach().clone() for name, value in learned(self.policy).items()}
        with self._changed:
            self._weights, self._version = weights, iteration
            self._changed.notify_all()
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
                    while not self._stopping and self._submitted > self._version + self.staleness:
                        self._changed.wait()
                    if self._stopping:
                        return
                    batch, version, weights = self._submitted, self._version, self._weights
                    self._submitted, self._weights = batch + 1, None
                if weights is not None:
                    load_learned(self.actor, weights)
                rollouts = self.collector.batch(batch, version)
                with self._changed:
                    self._ready.append(rollouts)
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
