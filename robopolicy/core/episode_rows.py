"""Bookkeeping of vectorised environments (`EpisodeRows`): step counts, success, episode ends, observation history.

A row is one of B parallel environments. Simulated, recorded and imagined worlds each use an `EpisodeRows`, so row
indices, seeds, success, the three ways an episode ends (terminated: the task ended; truncated: time limit; horizon_end:
an imagined rollout was cut off), history windows and snapshots have the same meaning everywhere. Axes: B row, R
selected or running rows, C chunk step, H history frame.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from robopolicy.core.arrays import Array
from robopolicy.core.errors import ConfigError, SpecError
from robopolicy.core.history import initial_window, repeat_last_valid, shift_window, shifted_window
from robopolicy.core.spec import IMAGE_PREFIX, TASK, Observation, WorldSpec
from robopolicy.core.world import Rows, Snapshot, Step


@dataclass(frozen=True)
class Advanced:
    """Result of advancing R running rows by an action chunk of C control steps.

    length: [R] int64, steps until the episode or the chunk ended, >= 1; live: [R, C] bool, True for those steps; first:
    [R, C] bool, the step at which an episode succeeded for the first time.
    """

    length: Array
    live: Array
    first: Array


class EpisodeRows:
    """Episode state of a world's B rows, as arrays [B, ...] by name.

    spec: spec of the world (history, horizon, terminate_on_success, fields, instructions); draw: function R -> episode
    seeds [R] int64, used when a reset passes none; cuts: whether episodes can be cut off (`horizon_end`), as imagined
    rollouts are. The arrays: "history/KEY" [B, H, *shape], steps and instruction int64, success, terminated, truncated
    and, with cuts, horizon_end bool; a world adds its own in `start`. Raises ConfigError unless sizes are at least 1.
    """

    def __init__(self, spec: WorldSpec, batch_size: int, draw: Callable[[int], Array], *, cuts: bool = False) -> None:
        require_sizes(batch_size=batch_size, history=spec.history, horizon=spec.horizon)
        self.spec, self.batch_size = spec, batch_size
        self._draw = draw
        self._ends = ("terminated", "truncated", "horizon_end") if cuts else ("terminated", "truncated")
        self._arrays: dict[str, Array] = {}
        self._texts = list(spec.instructions)

    @property
    def arrays(self) -> dict[str, Array]:
        """All arrays [B, ...] by name, readable and writable in place. Raises SpecError before the first reset."""
        self.require_started()
        return self._arrays

    def require_started(self) -> None:
        """Raise SpecError before the first reset."""
        if not self._arrays:
            raise SpecError("The world has not been started: call reset() first.")

    # -- starting ------------------------------------------------------------------------------------------------

    def index(self, rows: Rows) -> Array:
        """Return row indices [R] int64. Raises SpecError unless they are distinct and in range."""
        if rows is None:
            return np.arange(self.batch_size)
        index = np.asarray(rows, dtype=np.int64).reshape(-1)
        if len(index) and (index.min() < 0 or index.max() >= self.batch_size or len(np.unique(index)) != len(index)):
            raise SpecError(f"Rows {index.tolist()} must be distinct and lie in 0..{self.batch_size - 1}.")
        return index

    def reset_rows(self, rows: Rows, seeds: Sequence[int] | Array | None) -> tuple[Array, Array]:
        """Return the rows to reset [R] and the seeds of their episodes [R] int64; seeds are drawn if None are given.

        Raises SpecError on invalid rows, when the first reset omits rows, and unless there is one seed per row.
        """
        index = self.index(rows)
        if not self._arrays and len(index) != self.batch_size:
            raise SpecError("The first reset must start every row: call reset() before reset(rows).")
        episode_seeds = np.array(self._draw(len(index)) if seeds is None else seeds, dtype=np.int64)  # a copy
        if episode_seeds.shape != (len(index),):
            raise SpecError(
                f"reset got {len(index)} row(s) but seeds of shape {episode_seeds.shape}: pass one seed per row."
            )
        return index, episode_seeds

    def start(
        self,
        index: Array,
        frames: Mapping[str, Array],
        *,
        instruction: Array | int = 0,
        own: Mapping[str, Array] | None = None,
    ) -> None:
        """Start new episodes in rows `index` [R].

        frames: key -> [R, n >= 1, *shape], the observations so far; instruction: index into the spec's instructions,
        [R] or one for all; own: the world's own arrays [R, ...], with the same names at every start.
        """
        arrays = {f"history/{key}": initial_window(frames[key], self.spec.history) for key in self.spec.observation}
        arrays |= own or {}
        if not self._arrays:
            self._allocate(arrays)
        for name, value in arrays.items():
            self._arrays[name][index] = value
        self._arrays["instruction"][index] = instruction
        for name in ("steps", "success", *self._ends):
            self._arrays[name][index] = 0

    def _allocate(self, fresh: Mapping[str, Array]) -> None:
        """Allocate every array with the shapes of the first episodes' values; history uses the fields' dtypes."""
        rows, fields = self.batch_size, self.spec.observation
        dtypes = {name: value.dtype for name, value in fresh.items()}
        dtypes |= {f"history/{key}": np.dtype(field.dtype) for key, field in fields.items()}
        self._arrays = {name: np.zeros((rows, *value.shape[1:]), dtypes[name]) for name, value in fresh.items()}
        self._arrays |= {name: np.zeros(rows, dtype=np.int64) for name in ("instruction", "steps")}
        self._arrays |= {name: np.zeros(rows, dtype=bool) for name in ("success", *self._ends)}

    def instruction_index(self, texts: Sequence[str] | Array) -> Array:
        """Return indices [R] int64 of language instructions; an instruction that the spec does not list gets the next
        index.
        """
        self._texts += [text for text in dict.fromkeys(map(str, texts)) if text not in self._texts]
        return np.array([self._texts.index(str(text)) for text in texts], dtype=np.int64)

    # -- going on ------------------------------------------------------------------------------------------------

    @property
    def running(self) -> Array:
        """[B] bool: rows whose episode is still running."""
        arrays = self.arrays
        end_mask = arrays["terminated"] | arrays["truncated"]
        return ~(end_mask | arrays["horizon_end"]) if "horizon_end" in self._ends else ~end_mask

    @property
    def running_index(self) -> slice | Array:
        """Index of the running rows in an array [B, ...]: a slice if all of them run, else indices [R]."""
        running = self.running
        return slice(None) if running.all() else np.flatnonzero(running)

    def advance(
        self,
        index: slice | Array,
        success: Array,
        *,
        terminated: Array | None = None,
        truncated: Array | None = None,
        cut: Array | None = None,
    ) -> Advanced:
        """Count the steps of an action chunk in the running rows `index`, record success, and mark episodes as ended.

        All arguments are [R, C] bool and describe the state after each step, regardless of earlier ends. success: the
        task is done (once reached, it stays recorded for the episode); terminated, truncated: the world itself ends the
        episode there; cut: the rollout stops although the episode would continue, so values can be bootstrapped.
        Success terminates an episode if the spec says so, and the spec's horizon truncates it. If several coincide,
        termination takes precedence over truncation, and truncation over a cut.
        """
        arrays = self.arrays
        spec = self.spec
        chunk = success.shape[1]
        before = arrays["success"][index, None]
        latched = before | np.logical_or.accumulate(success, axis=1)
        first = latched & ~np.concatenate([before, latched[:, :-1]], axis=1)
        count = arrays["steps"][index, None] + np.arange(1, chunk + 1)
        done = latched & spec.terminate_on_success
        done = done if terminated is None else done | terminated
        timed_out = count >= spec.horizon
        timed_out = timed_out if truncated is None else timed_out | truncated
        ends = done | timed_out if cut is None else done | timed_out | cut
        if not ends.any():  # what comes at nearly every step is quick: nothing but counts and success is to be written
            arrays["steps"][index] += chunk
            arrays["success"][index] = latched[:, -1]
            return Advanced(np.full(len(ends), chunk), np.ones(ends.shape, dtype=bool), first)
        length = np.where(ends.any(axis=1), ends.argmax(axis=1) + 1, chunk)
        live = np.arange(chunk) < length[:, None]
        final = (np.arange(len(length)), length - 1)
        arrays["steps"][index] = count[final]
        arrays["success"][index] = latched[final]
        arrays["terminated"][index] = done[final]
        arrays["truncated"][index] = timed_out[final] & ~done[final]
        if cut is not None:
            arrays["horizon_end"][index] = cut[final] & ~timed_out[final] & ~done[final]
        return Advanced(length, live, first & live)

    def extended_history(self, index: slice | Array, frames: Mapping[str, Array]) -> dict[str, Array]:
        """Return the history of rows `index` followed by new `frames` [R, C, *shape]: key -> [R, H + C, *shape]."""
        return {
            key: np.concatenate([self.arrays[f"history/{key}"][index], value], axis=1) for key, value in frames.items()
        }

    def update_history(self, index: slice | Array, path: Mapping[str, Array], length: Array) -> None:
        """Advance the history window of rows `index` by `length` [R] steps along `path`, key -> [R, H + C, *shape]."""
        for key, value in path.items():
            self.arrays[f"history/{key}"][index] = shifted_window(value, length, self.spec.history)

    def move_history(self, index: slice | Array, frames: Mapping[str, Array], length: Array | None) -> None:
        """Shift the history of rows `index` by the first `length` [R] (None: all) of `frames`, key -> [R, C, ...]."""
        for key, value in frames.items():
            window = self.arrays[f"history/{key}"]
            window[index] = shift_window(window[index], value, length)

    # -- showing -------------------------------------------------------------------------------------------------

    def observation(self) -> Observation:
        """Return a copy of every row's history, key -> [B, H, *shape], and the instructions [B] under `task`."""
        observation = {key: self.arrays[f"history/{key}"].copy() for key in self.spec.observation}
        observation[TASK] = self.instructions()
        return observation

    def instructions(self) -> Array:
        """Return every row's instruction, [B] texts."""
        return np.asarray(self._texts)[self.arrays["instruction"]]

    def scatter(self, index: slice | Array, values: Array) -> Array:
        """Scatter `values` [R, ...] of rows `index` into an array of all rows, [B, ...], with zeros in the others."""
        if isinstance(index, slice):
            return values
        scattered = np.zeros((self.batch_size, *values.shape[1:]), values.dtype)
        scattered[index] = values
        return scattered

    def trace(self, index: slice | Array, frames: Mapping[str, Array], length: Array | None) -> dict[str, Array]:
        """Return the observation after every step, key -> [B, C, *shape]; ended rows repeat their last frame.

        frames: key -> [R, C, *shape] of rows `index`; only the first `length` [R] (None: all) are used.
        """
        trace = {key: repeat_last_valid(value, length) for key, value in frames.items()}
        if not isinstance(index, slice):
            for key, value in trace.items():
                trace[key] = np.repeat(self.arrays[f"history/{key}"][:, -1:], value.shape[1], axis=1)
                trace[key][index] = value
        return trace

    def step(
        self,
        trace: Mapping[str, Array],
        rewards: Mapping[str, Array],
        valid: Array,
        uncertainty: Array | None = None,
    ) -> Step:
        """Build the `Step` for the current state: trace key -> [B, C, *shape], rewards name -> [B, C], valid [B, C],
        uncertainty [B, C].
        """
        flags = {name: self.arrays[name].copy() for name in ("success", *self._ends)}
        return Step(self.observation(), dict(trace), dict(rewards), valid, **flags, uncertainty=uncertainty)

    def idle(self, chunk: int) -> Step:
        """Return the `Step` of `chunk` C control steps in which no row is running."""
        vectors = [key for key in self.spec.observation if not key.startswith(IMAGE_PREFIX)]
        trace = {key: np.repeat(self.arrays[f"history/{key}"][:, -1:], chunk, axis=1) for key in vectors}
        rewards = {name: np.zeros((self.batch_size, chunk)) for name in self.spec.rewards}
        return self.step(trace, rewards, np.zeros((self.batch_size, chunk), dtype=bool))

    # -- saving --------------------------------------------------------------------------------------------------

    def snapshot(self, rows: Rows) -> dict[str, Array]:
        """Return copies [R, ...] of the arrays of `rows`. Raises SpecError on invalid rows."""
        index = self.index(rows)
        return {name: value[index] for name, value in self.arrays.items()}

    def validate_snapshot(self, snapshot: Snapshot, rows: Rows) -> Array:
        """Return the indices [R] of `rows`. Raises SpecError unless `snapshot` can be restored into them."""
        arrays, index = self.arrays, self.index(rows)
        if len(snapshot) != len(index):
            raise SpecError(f"The snapshot has {len(snapshot)} row(s), but {len(index)} row(s) are to be restored.")
        for name, value in arrays.items():
            if name not in snapshot.arrays or snapshot.arrays[name].shape[1:] != value.shape[1:]:
                raise SpecError(
                    f"The snapshot does not fit this world ('{name}'): both need the same task, history and cameras."
                )
        return index

    def restore(self, snapshot: Snapshot, rows: Rows) -> Array:
        """Overwrite `rows` with `snapshot` and return their indices [R]. Raises SpecError unless it fits."""
        index = self.validate_snapshot(snapshot, rows)
        for name, value in self.arrays.items():
            value[index] = snapshot.arrays[name]
        return index


def require_sizes(**sizes: int) -> None:
    """Raise ConfigError unless every size (passed by argument name) is at least 1."""
    if min(sizes.values()) < 1:
        values = ", ".join(f"{name}={size}" for name, size in sizes.items())
        limit = " (set world.options.horizon=NUMBER)" if sizes.get("horizon", 1) < 1 else ""
        raise ConfigError(f"A world needs {', '.join(sizes)} of at least 1, but got {values}{limit}.")
