"""A world whose success is decided by a classifier of its observations.

The classifier reads every control step, so chunks are executed step by step. The success of the wrapped world is also
returned (`Step.own_success`), so that false accepts can be counted. Axes: B row, C chunk step, H history frame.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from robopolicy.core.arrays import Array
from robopolicy.core.errors import SpecError
from robopolicy.core.returns import SUCCESS
from robopolicy.core.spec import IMAGE_PREFIX, Observation, validate_actions
from robopolicy.core.world import Rows, Snapshots, Step, World
from robopolicy.core.wrapped_world import WrappedSnapshots, WrappedWorld
from robopolicy.evaluation.intervals import percent
from robopolicy.success.classifier import SuccessClassifier, require_input, require_one_task

_OURS = "classified/"


def with_classifier(
    world: World,
    classifier: SuccessClassifier,
    path: Path,
    *,
    hidden: Sequence[str] = (),
    terminate: bool = True,
    only_reward: bool = False,
) -> World:
    """Return `world` with the success of `classifier`, which was loaded from `path`.

    world: should not end episodes at its own success; hidden: cameras that only the classifier reads, which the
    observation omits; terminate: success ends the episode; only_reward: the only reward is 1 at the first success.
    Raises SpecError when the world lacks what the classifier reads, or has several tasks.
    """
    one_task = "choose one task by world.name or world.options.instructions, and the classifier trained for it"
    require_one_task(classifier, world.spec.goals, f"'{world.spec.name}'", one_task)
    for key in classifier.fields:
        require_input(key, world.spec.observation)
    kind = ClassifiedSnapshots if isinstance(world, Snapshots) else ClassifiedWorld
    return kind(world, classifier, path, hidden, terminate, only_reward)


class ClassifiedWorld(WrappedWorld):
    """A `World` with a classifier's success; create it with `with_classifier`."""

    def __init__(
        self,
        world: World,
        classifier: SuccessClassifier,
        path: Path,
        hidden: Sequence[str],
        terminate: bool,
        only_reward: bool,
    ):
        self.classifier, self.path = classifier, path
        spec = world.spec
        visible = {
            key: field
            for key, field in spec.observation.items()
            if not key.startswith(IMAGE_PREFIX) or key.removeprefix(IMAGE_PREFIX) not in hidden
        }
        changes: dict[str, Any] = {"observation": visible, "success": self._criterion(), "reports_success": True}
        rewards = (SUCCESS,) if only_reward else spec.rewards
        super().__init__(world, replace(spec, **changes, terminate_on_success=terminate, rewards=rewards))
        rows = world.batch_size
        self._flags = {
            name: np.zeros(rows, dtype=bool) for name in ("success", "own_success", "terminated", "truncated")
        }
        self._streak = np.zeros(rows, dtype=np.int64)
        self._observation: Observation = {}

    def _criterion(self) -> str:
        rate = percent(self.classifier.false_accepts)
        frames = self.classifier.hold
        return (
            f"The success classifier {self.path} accepts {frames} consecutive frame{'s' * (frames > 1)}. It accepted "
            f"{rate} of the failed test episodes."
        )

    @property
    def success_classifier(self) -> dict[str, Any]:
        """Description of the classifier for reports; see `core.world.ClassifiesSuccess`."""
        return {
            "checkpoint": str(self.path),
            "hold": self.classifier.hold,
            "false_accepts": self.classifier.false_accepts,
            "max_false_accepts": self.classifier.measured["threshold"]["rate"],
            "world_reports_success": self.world.spec.reports_success,
        }

    def reset(
        self, rows: Rows = None, seeds: Sequence[int] | Array | None = None, options: Mapping[str, Any] | None = None
    ) -> Observation:
        """Start new episodes in `rows` [R]; see `World.reset`."""
        index = np.arange(self.batch_size) if rows is None else np.asarray(rows)
        self._keep(self.world.reset(rows, seeds, options), index)
        for flag in self._flags.values():
            flag[index] = False
        self._streak[index] = 0
        return self._shown()

    def step(self, actions: Array) -> Step:
        """Execute a chunk [B, C, A] step by step, until no row is running; raises as the world and the classifier."""
        if not self._observation:
            raise SpecError("No episode has started: call reset() first.")
        actions = np.asarray(actions)
        validate_actions(actions, self._spec.action, self.batch_size)
        rows, count = actions.shape[:2]
        vectors = [key for key in self._spec.observation if not key.startswith(IMAGE_PREFIX)]
        trace = {key: np.repeat(self._observation[key][:, -1:], count, 1) for key in vectors}
        rewards = {name: np.zeros((rows, count)) for name in self._spec.rewards}
        valid = np.zeros((rows, count), dtype=bool)
        for place in range(count):
            running = ~(self._flags["terminated"] | self._flags["truncated"])
            if not running.any():
                break
            step = self.world.step(actions[:, place : place + 1])
            live = running & step.valid[:, 0]
            first = self._classify(step, np.flatnonzero(live))
            valid[:, place] = live
            for name in rewards:
                values = first.astype(np.float64) if name == SUCCESS else step.rewards[name][:, 0]
                rewards[name][:, place] = np.where(live, values, 0.0)
            for key in vectors:
                trace[key][:, place:] = self._observation[key][:, -1:]
        flags: dict[str, Any] = {name: flag.copy() for name, flag in self._flags.items()}
        if not self.world.spec.reports_success:
            flags["own_success"] = None
        return Step(self._shown(), trace, rewards, valid, **flags)

    def _classify(self, step: Step, live: Array) -> Array:
        """Update the state with one control step of the rows `live` [R]; return the rows of a first success, [B]."""
        self._keep(step.observation, live)
        flags, first = self._flags, np.zeros(self.batch_size, dtype=bool)
        if not len(live):
            return first
        frames = {key: step.observation[key][live, -1] for key in self.classifier.fields}
        above = self.classifier.logits(frames) > self.classifier.threshold
        self._streak[live] = np.where(above, self._streak[live] + 1, 0)
        accepted = self._streak[live] >= self.classifier.hold
        first[live] = accepted & ~flags["success"][live]
        flags["success"][live] |= accepted
        flags["own_success"][live] = step.success[live]
        ends = flags["success"][live] & self._spec.terminate_on_success
        flags["terminated"][live] = step.terminated[live] | ends
        flags["truncated"][live] = step.truncated[live] & ~flags["terminated"][live]
        return first

    def _keep(self, observation: Observation, rows: Array) -> None:
        """Store the observation of these rows [R]; the others keep theirs."""
        if not self._observation or len(rows) == self.batch_size:
            self._observation = {key: np.array(value) for key, value in observation.items()}
            return
        for key, value in observation.items():
            kept = self._observation[key]
            if value.dtype.kind == "U" and value.dtype.itemsize > kept.dtype.itemsize:
                kept = self._observation[key] = kept.astype(value.dtype)
            kept[rows] = value[rows]

    def _shown(self) -> Observation:
        hidden = self.world.spec.observation.keys() - self._spec.observation.keys()
        return {key: value.copy() for key, value in self._observation.items() if key not in hidden}


class ClassifiedSnapshots(ClassifiedWorld, WrappedSnapshots):
    """A `ClassifiedWorld` that supports `Snapshots`; they include the classifier's flags."""

    prefix = _OURS

    @property
    def origin(self) -> str:
        """Implement `WrappedSnapshots.origin`."""
        return "a world with a success classifier (world.success)"

    @property
    def own_arrays(self) -> dict[str, Array]:
        """Implement `WrappedSnapshots.own_arrays`: arrays [B, ...]."""
        return {**self._flags, "streak": self._streak}

    def restored(self, observation: Observation, rows: Array) -> Observation:
        """Implement `WrappedSnapshots.restored`; rows: [R] -> [B, H, ...]."""
        self._keep(observation, rows)
        return self._shown()
