"""Recorded demonstrations as a world: the future is the recording's, and what is paid is agreeing with it.

For policies with demonstrations and no simulator: group and step advantages, ratios and clips work on it unchanged. An
episode follows one demonstration. At every control step the policy's action is compared with the demonstrated one;
where it differs, the demonstrated action takes its place, which is allowed a few times before the episode fails.

Source: UI-S1, semi-online reinforcement learning, arXiv:2509.11543 (patches keep a rollout on the expert's trajectory).
Use it with finetune.advantage=step_groups, which compares the same steps of the same demonstration.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from robopolicy.core.errors import ConfigError
from robopolicy.core.randomness import derive, uniforms
from robopolicy.core.spec import IMAGE_PREFIX, TASK, Field, Observation, WorldSpec, validate_actions
from robopolicy.core.world import Rows, Snapshot, Step


class DemonstratedWorld:
    """Rows that follow recorded episodes; an episode's seed chooses the demonstration.

    observation: key -> frames [F, *shape], the episodes one after the other with one frame more than actions each;
    actions: [N, A]; lengths: [E] actions per episode; tasks: instruction of each episode; tolerance: how far an element
    of an action may be off, as a share of half its range; patches: how many times a control step may disagree.
    """

    def __init__(
        self,
        observation_fields: Mapping[str, Field],
        action_field: Field,
        fps: float,
        observation: Mapping[str, np.ndarray],
        actions: np.ndarray,
        lengths: np.ndarray,
        tasks: Sequence[str],
        batch_size: int,
        *,
        history: int = 1,
        tolerance: float = 0.2,
        patches: int = 4,
        seed: int = 0,
    ):
        if not len(lengths):
            raise ConfigError("There is no demonstration to follow: the dataset has no episode.")
        if tolerance <= 0 or patches < 0:
            raise ConfigError(f"world.options: tolerance {tolerance} must be positive, patches {patches} at least 0.")
        self._batch, self._seed, self._fresh = batch_size, seed, 0
        self._spec = WorldSpec(
            name="demonstrations",
            observation=dict(observation_fields),
            action=action_field,
            fps=fps,
            horizon=int(lengths.max()),
            history=history,
            rewards=("agreement",),
            instructions=tuple(dict.fromkeys(tasks)),
            success=f"The demonstration was followed to its end with at most {patches} disagreements.",
        )
        self._frames = {key: np.asarray(observation[key]) for key in observation_fields}
        self._actions, self._lengths = np.asarray(actions, dtype=np.float64), np.asarray(lengths)
        self._tasks = np.array([str(text) for text in tasks])
        self._first = self._lengths.cumsum() - self._lengths
        self._patches = patches
        half = (np.broadcast_to(action_field.high, action_field.shape) - action_field.low) / 2
        self._allowed = tolerance * np.where(np.isfinite(half), half, self._actions.std(0) + 1e-6)
        count = np.zeros(batch_size, dtype=np.int64)
        self._state = {
            "episode": count,
            "time": count.copy(),
            "patched": count.copy(),
            "over": np.ones(batch_size, dtype=bool),
            "success": np.zeros(batch_size, dtype=bool),
        }

    @property
    def spec(self) -> WorldSpec:
        """Fields of the recording; its instructions; the reward term `agreement`, 1 for every step that agreed."""
        return self._spec

    @property
    def batch_size(self) -> int:
        """Number of rows."""
        return self._batch

    def reset(
        self,
        rows: Rows = None,
        seeds: Sequence[int] | np.ndarray | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Observation:
        """Choose demonstrations by the seeds; options {"task": indices} chooses among those with that instruction."""
        index = self._index(rows)
        if seeds is None:
            seeds = derive(self._seed, "resets") % 2**51 + self._fresh + np.arange(len(index))
            self._fresh += len(index)
        drawn = uniforms(np.asarray(seeds, dtype=np.int64), 1)[:, 0]
        wanted = np.full(len(index), -1) if options is None else np.asarray(options.get("task", -1))
        for place, row in enumerate(index):
            allowed = np.arange(len(self._lengths))
            task = int(np.broadcast_to(wanted, len(index))[place])
            if task >= 0:
                allowed = np.flatnonzero(self._tasks == self._spec.instructions[task])
            self._state["episode"][row] = allowed[int(drawn[place] * len(allowed))]
        for name in ("time", "patched", "over", "success"):
            self._state[name][index] = 0
        return self._observe()

    def step(self, actions: np.ndarray) -> Step:
        """Compare a chunk with the recording, step by step."""
        validate_actions(actions, self._spec.action, self._batch)
        state, steps = self._state, actions.shape[1]
        valid = np.zeros((self._batch, steps), dtype=bool)
        agreed = np.zeros((self._batch, steps))
        trace: dict[str, list[np.ndarray]] = {key: [] for key in self._frames if not key.startswith(IMAGE_PREFIX)}
        low, high = self._spec.action.low, self._spec.action.high
        for column in range(steps):
            live = ~state["over"]
            place = self._first[state["episode"]] + np.minimum(state["time"], self._lengths[state["episode"]] - 1)
            error = np.abs(np.clip(actions[:, column], low, high) - self._actions[place])
            same = (error <= self._allowed + 1e-9).reshape(self._batch, -1).all(1)
            valid[:, column], agreed[:, column] = live, live & same
            state["patched"] += live & ~same
            state["time"] += live
            failed = live & (state["patched"] > self._patches)
            state["success"] |= live & ~failed & (state["time"] >= self._lengths[state["episode"]])
            state["over"] |= failed | state["success"]
            for key, parts in trace.items():
                parts.append(self._frames[key][self._frame()])
        return Step(
            observation=self._observe(),
            trace={key: np.stack(parts, 1) for key, parts in trace.items()},
            rewards={"agreement": agreed},
            valid=valid,
            terminated=state["over"].copy(),
            truncated=np.zeros(self._batch, dtype=bool),
            success=state["success"].copy(),
        )

    def snapshot(self, rows: Rows = None) -> Snapshot:
        """Copy which demonstrations rows follow, and how far they are."""
        index = self._index(rows)
        return Snapshot({name: value[index].copy() for name, value in self._state.items()})

    def restore(self, snapshot: Snapshot, rows: Rows = None) -> Observation:
        """Overwrite rows."""
        index = self._index(rows)
        for name, value in snapshot.arrays.items():
            self._state[name][index] = value
        return self._observe()

    def close(self) -> None:
        """Nothing runs."""

    def _index(self, rows: Rows) -> np.ndarray:
        return np.arange(self._batch) if rows is None else np.asarray(rows)

    def _frame(self, back: int = 0) -> np.ndarray:
        """Return the index of each row's frame, `back` steps ago (not before the start)."""
        episode = self._state["episode"]
        return self._first[episode] + episode + np.maximum(self._state["time"] - back, 0)

    def _observe(self) -> Observation:
        frames = [self._frame(back) for back in reversed(range(self._spec.history))]
        found = {key: np.stack([value[frame] for frame in frames], 1) for key, value in self._frames.items()}
        return {**found, TASK: self._tasks[self._state["episode"]]}
