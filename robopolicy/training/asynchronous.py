"""Collecting in the background while the learner learns, with bounded staleness.

A thread owns the world and a copy of the policy; physics and tensor work release Python's lock, so both really run at
the same time. Admission is AReaL's rule (arXiv:2505.24298): batch n may be started once the learner has done
n - staleness updates. Weights are taken over between batches, never inside one, so every decision of a batch has one
version, unless it belongs to an episode that was left unfinished (APRIL) and goes on with newer weights.
staleness 1 is collecting one batch ahead (periodic asynchrony keeps 0 by waiting; that is the synchronous collector).
"""

import copy
import threading
from collections import deque
from typing import Any

import torch
from torch import Tensor

from robopolicy.core.rollouts import Rollouts
from robopolicy.training.collection import Collector


class BackgroundCollector:
    """Runs a `Collector`, whose policy must be a copy that nobody else uses, in a thread of its own.

    Runs are not repeatable bit by bit: which weights a batch sees depends on timing. `close` must be called.
    """

    def __init__(self, collector: Collector, generator: torch.Generator, staleness: int):
        self.collector, self.generator, self.staleness = collector, generator, staleness
        self._changed = threading.Condition()
        self._ready: deque[Rollouts] = deque()
        self._weights: dict[str, Tensor] | None = None
        self._version = self._submitted = 0
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False

    def publish(self, policy: Any, version: int) -> None:
        """Make the weights of `policy`, after `version` updates, the ones to collect the next batch with."""
        weights = {name: value.detach().clone() for name, value in policy.state_dict().items()}
        with self._changed:
            self._weights, self._version = weights, version
            self._changed.notify_all()

    def collect(self, iteration: int) -> Rollouts:
        """Wait for the next batch; raises what went wrong in the thread."""
        with self._changed:
            if self._thread is None:
                self._submitted = self._version = iteration
                self._stopping = False
                self._thread = threading.Thread(target=self._work, name="collector", daemon=True)
                self._thread.start()
            while not self._ready and self._error is None:
                self._changed.wait(0.2)  # wakes up for Ctrl-C
            if self._error is not None:
                raise self._error
            batch = self._ready.popleft()
            self._changed.notify_all()
            return batch

    def observe(self, collected: Rollouts, prepared: Rollouts) -> None:
        """Tell the sampler what came of its starts."""
        with self._changed:
            self.collector.observe(collected, prepared)

    def restart(self) -> None:
        """Stop the thread and drop what it has made: after a checkpoint everything starts from fresh episodes."""
        self.close()
        self._ready.clear()
        self.collector.restart()

    def close(self) -> None:
        """Stop the thread after the batch it is in."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def tree(self) -> dict[str, Any]:
        """Return the sampler's state."""
        return self.collector.tree()

    def restore(self, tree: dict[str, Any]) -> None:
        """Go on from `tree`."""
        self.collector.restore(tree)

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
                    self.collector.policy.load_state_dict(weights)  # type: ignore[attr-defined]
                rollouts = self.collector.collect(batch, self.generator, version)
                with self._changed:
                    self._ready.append(rollouts)
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()


class DelayedCollector:
    """Collects in turns with the learner, but with weights that are `delay` updates old: staleness that is repeatable.

    A stand-in for a slow link to the robots, and for measuring what stale data does to an algorithm.
    """

    def __init__(self, collector: Collector, generator: torch.Generator, delay: int):
        self.collector, self.generator, self.delay = collector, generator, delay
        self.past: deque[dict[str, Tensor]] = deque(maxlen=delay + 1)

    def publish(self, policy: Any, version: int) -> None:
        """Take in the weights after `version` updates."""
        self.past.append({name: value.detach().clone() for name, value in policy.state_dict().items()})

    def collect(self, iteration: int) -> Rollouts:
        """Collect with the oldest weights there are, at most `delay` updates old."""
        self.collector.policy.load_state_dict(self.past[0])  # type: ignore[attr-defined]
        return self.collector.collect(iteration, self.generator, iteration + 1 - len(self.past))

    def observe(self, collected: Rollouts, prepared: Rollouts) -> None:
        """Tell the sampler what came of its starts."""
        self.collector.observe(collected, prepared)

    def restart(self) -> None:
        """Begin with fresh episodes at the next call; the old weights stay."""
        self.collector.restart()

    def close(self) -> None:
        """Nothing runs."""

    def tree(self) -> dict[str, Any]:
        """Return the sampler's state and the old weights."""
        return {**self.collector.tree(), "past": {str(place): weights for place, weights in enumerate(self.past)}}

    def restore(self, tree: dict[str, Any]) -> None:
        """Go on from `tree`."""
        self.collector.restore(tree)
        self.past.extend(tree["past"][str(place)] for place in range(len(tree["past"])))


def copy_for_collecting(policy: Any) -> Any:
    """Return a frozen copy of the policy for the thread."""
    return copy.deepcopy(policy).requires_grad_(False).eval()
