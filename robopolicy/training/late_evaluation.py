"""Evaluation parallel to learning: the policy of one iteration is evaluated during the update of the next.

The result arrives exactly one iteration later, however long it takes, so that runs repeat and resume exactly. At a
checkpoint the waiting policy is the current one, so that only its metrics have to be stored.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from robopolicy.core.policy import Trainable
from robopolicy.core.progress import without_progress
from robopolicy.nn.sharing import copy_trainable, load_trainable_state, trainable_state

Measure = Callable[[Trainable], dict[str, float]]
"""A policy -> its evaluation metrics."""


class LateEvaluation:
    """The policy that waits for its evaluation, a copy with the weights of its iteration.

    measure: evaluates it; parallel: in a thread, for an evaluation on workers, else when its metrics are read. `row`
    has the metrics of its iteration without the evaluation's, empty if no policy waits.
    """

    def __init__(self, policy: Trainable, measure: Measure, *, parallel: bool):
        self.policy = copy_trainable(policy)
        self.row: dict[str, float] = {}
        self.measure = measure
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="evaluation") if parallel else None
        self._result: Future[dict[str, float]] | None = None

    def hold(self, policy: Trainable, row: dict[str, float]) -> None:
        """Let `policy` with its current weights wait, and the metrics of its iteration."""
        load_trainable_state(self.policy, {name: value.clone() for name, value in trainable_state(policy).items()})
        self.row = row

    def start(self) -> None:
        """Start the evaluation of a waiting policy."""
        if self.row and self._thread is not None:
            self._result = self._thread.submit(self._quietly)

    def figures(self) -> dict[str, float]:
        """Return the metrics of the waiting policy, when they are known; re-raises the error of its evaluation."""
        result, self._result = self._result, None
        return self._quietly() if result is None else result.result()

    def close(self) -> None:
        """End the thread after its evaluation."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def tree(self) -> dict[str, Any]:
        """Return the mutable state, for a checkpoint that also has the policy's weights."""
        return {"row": self.row}

    def restore(self, policy: Trainable, tree: dict[str, Any]) -> None:
        """Restore the state from `tree`; policy: with the weights of the checkpoint."""
        if tree["row"]:
            self.hold(policy, tree["row"])

    def _quietly(self) -> dict[str, float]:
        with without_progress():
            return self.measure(self.policy)
