"""Rows of environments, stepped in this process or spread over worker processes.

A chunk of C control steps is one message to each worker and one back, without a round trip per step. Messages are
arrays that parent and workers of this module exchange over private pipes; external data is never unpickled.
"""

import multiprocessing
import signal
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np

from robopolicy.core.errors import ConfigError, NonFiniteError, RobopolicyError, RobopolicyWarning, SpecError
from robopolicy.core.history import shift_window
from robopolicy.core.spec import ImageSize, image_sizes
from sims.suites.environment import Description, RowEnvironment
from sims.suites.mujoco_state import MujocoState
from sims.suites.success import place_of


class WorkerError(RobopolicyError):
    """A simulation worker died or an external environment raised an error."""


KNOWN_ERRORS: dict[str, type[RobopolicyError]] = {
    kind.__name__: kind for kind in (ConfigError, SpecError, NonFiniteError, WorkerError)
}


@dataclass(frozen=True)
class Images:
    """Images in observations: cameras, their requested sizes, and the number of history frames."""

    cameras: tuple[str, ...]
    size: ImageSize | None
    history: int


@dataclass(frozen=True)
class Played:
    """Result of a chunk for n rows: values [n, C, D], reward [n, C], success [n, C], length [n] steps run, terminated,
    truncated [n]; frames: camera -> [n, H, height, width, 3], whose last min(length, H) are new; notes: messages for
    the user.
    """

    values: np.ndarray
    reward: np.ndarray
    success: np.ndarray
    length: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    frames: dict[str, np.ndarray]
    notes: tuple[str, ...] = ()


def joined(parts: Sequence[Played]) -> Played:
    """Concatenate the rows of several workers."""
    first = parts[0]
    if len(parts) == 1:
        return first
    names = ("values", "reward", "success", "length", "terminated", "truncated")
    arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    frames = {camera: np.concatenate([part.frames[camera] for part in parts]) for camera in first.frames}
    return Played(frames=frames, **arrays, notes=tuple(note for part in parts for note in part.notes))


class EnvironmentRows:
    """`count` environments in one process; every method takes and returns whole arrays of rows."""

    def __init__(self, make_row: Callable[[], RowEnvironment], count: int, images: Images):
        self._rows = [make_row() for _ in range(count)]
        self._images = images
        self._size = self._rows[0].layout.size
        self._sizes = image_sizes(images.cameras, images.size, self._rows[0].layout.sizes)

    def describe(self) -> Description:
        """Return the description of the environment."""
        return self._rows[0].describe()

    def reset(
        self, index: np.ndarray, seeds: np.ndarray, options: dict | None
    ) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        """Start rows `index` [R] with seeds [R]; returns values [R, D], tasks [R], camera -> [R, height, width, 3]."""
        values = np.zeros((len(index), self._size), dtype=np.float32)
        for out, row, seed in zip(values, index, seeds, strict=True):
            self._rows[row].reset(seed, out, options)
        tasks = np.array([self._rows[row].task for row in index], dtype=object)
        return values, tasks, {camera: self.render(index, camera, *size) for camera, size in self._sizes.items()}

    def step(self, actions: np.ndarray, left: np.ndarray, stop_on_success: bool) -> Played:
        """Run actions [n, C, A], stopping a row when its episode ends; left: [n] control steps until its time limit.

        Images are rendered after every control step for rows with a history, else only after a row's last one.
        """
        results = self._blank(*actions.shape[:2])
        # One copy for all rows: an environment may keep its action, or write into it.
        actions = actions.astype(self._rows[0].action_dtype)
        each_step = bool(self._images.cameras) and self._images.history > 1
        for row, (environment, limit) in enumerate(zip(self._rows, left.tolist(), strict=True)):
            rewards = []
            done = []
            terminated = False
            truncated = False
            for action, values in zip(actions[row, :limit], results.values[row], strict=False):
                reward, terminated, truncated, success = environment.step(action, values, len(rewards) + 1 == limit)
                rewards.append(reward)
                done.append(success)
                if each_step:
                    self._image(environment, row, results)
                if terminated or truncated or (success and stop_on_success):
                    break
            length = len(rewards)
            if length and not each_step:
                self._image(environment, row, results)
            results.reward[row, :length] = rewards
            results.success[row, :length] = done
            results.length[row] = length
            results.terminated[row], results.truncated[row] = terminated, truncated
        return replace(results, notes=tuple(note for row in self._rows for note in row.take_notes()))

    def _blank(self, count: int, chunk: int) -> Played:
        history = self._images.history
        return Played(
            values=np.zeros((count, chunk, self._size), dtype=np.float32),
            reward=np.zeros((count, chunk)),
            success=np.zeros((count, chunk), dtype=bool),
            length=np.zeros(count, dtype=np.int64),
            terminated=np.zeros(count, dtype=bool),
            truncated=np.zeros(count, dtype=bool),
            frames={
                camera: np.zeros((count, history, *size, 3), dtype=np.uint8) for camera, size in self._sizes.items()
            },
        )

    def _image(self, environment: RowEnvironment, row: int, played: Played) -> None:
        """Shift the row's frames [H, height, width, 3] by one and render the newest."""
        for camera, frames in played.frames.items():
            newest = environment.image(camera, *self._sizes[camera])
            frames[row : row + 1] = shift_window(frames[row : row + 1], newest[None, None])

    def states(self, index: np.ndarray) -> tuple[np.ndarray, list[Any]]:
        """Return physics [R, N] and Python attributes [R] of rows `index` [R].

        Raises ConfigError when the environment is not simulated with MuJoCo.
        """
        states = [self._state(row) for row in index]
        return padded([state.physics() for state in states]), [state.attributes() for state in states]

    def restore(self, index: np.ndarray, physics: np.ndarray, attributes: Sequence[Any]) -> None:
        """Restore rows `index` [R] from the result of `states`: physics [R, N] and attributes [R].

        Raises ConfigError when the environment is not simulated with MuJoCo.
        """
        for row, vector, layers in zip(index, physics, attributes, strict=True):
            self._state(row).restore_attributes(layers)  # first: they may select the model
            self._state(row).restore_physics(vector)

    def _state(self, row: int) -> MujocoState:
        state = self._rows[row].state
        if state is None:
            raise ConfigError("This environment does not simulate with MuJoCo, so its state cannot be saved.")
        return state

    def render(self, index: np.ndarray, camera: str, height: int, width: int) -> np.ndarray:
        """Return uint8 [R, height, width, 3] of rows `index` [R]. Raises ConfigError when there is no such image."""
        frames = np.empty((len(index), height, width, 3), dtype=np.uint8)
        for frame, row in zip(frames, index, strict=True):
            frame[:] = self._rows[row].image(camera, height, width)
        return frames

    def close(self) -> None:
        """Close every environment."""
        for row in self._rows:
            try:
                row.close()
            except Exception as error:  # what was played stays as it is
                warnings.warn(
                    f"An environment could not be closed: {type(error).__name__}: {error} (at {place_of(error)}).",
                    RobopolicyWarning,
                    stacklevel=2,
                )


class Pool:
    """B rows of one environment, split evenly over worker processes, or in this process when workers is 0.

    name: of the environment, for errors; make_row must be importable in a fresh process (no lambda) when workers > 0.
    Methods raise WorkerError when a worker has died or the environment raised its own error, ConfigError when the pool
    is closed, and otherwise the errors of `EnvironmentRows`.
    """

    def __init__(
        self, name: str, make_row: Callable[[], RowEnvironment], count: int, workers: int, images: Images
    ) -> None:
        self._name = name
        self._local = _begin(name, make_row, count, images) if workers == 0 else None
        self._connections: list[Connection] = []
        self._processes: list[BaseProcess] = []
        self._lost: WorkerError | None = None
        self.shares = [np.arange(count)] if workers == 0 else np.array_split(np.arange(count), min(workers, count))
        if self._local is None:
            context = multiprocessing.get_context("spawn")
            for share in self.shares:
                own_end, far = context.Pipe()
                process = context.Process(target=serve, args=(far, name, make_row, len(share), images), daemon=True)
                process.start()
                far.close()
                self._connections.append(own_end)
                self._processes.append(process)

    @property
    def process_ids(self) -> list[int]:
        """Process ids of the workers, none in in-process mode."""
        return [process.pid or 0 for process in self._processes]

    def describe(self) -> Description:
        """Return the environment's description; also waits until every worker is up."""
        return self._call("describe", [()] * len(self.shares))[0]

    def reset(
        self, index: np.ndarray, seeds: np.ndarray, options: dict | None = None
    ) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        """Start rows `index` [R] with seeds [R].

        Returns values [R, D], the tasks that the environments report [R], and camera -> images [R, height, width, 3].
        """
        places, calls = self._split(index)
        parts = self._call(
            "reset",
            [None if call is None else (call, seeds[at], options) for call, at in zip(calls, places, strict=True)],
        )
        values, tasks = (
            _gather([None if part is None else part[item] for part in parts], places, len(index)) for item in (0, 1)
        )
        cameras = next(part for part in parts if part is not None)[2]
        images = {
            camera: _gather([None if part is None else part[2][camera] for part in parts], places, len(index))
            for camera in cameras
        }
        return values, tasks, images

    def step(self, actions: np.ndarray, left: np.ndarray, stop_on_success: bool) -> Played:
        """Run a chunk [B, C, A] in every row with control steps left, [B]; see `EnvironmentRows.step`."""
        if self._local is not None:
            return _run(self._local, self._name, "step", (actions, left, stop_on_success))
        return joined(self._call("step", [(actions[share], left[share], stop_on_success) for share in self.shares]))

    def states(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return physics [R, N] and Python attributes, an object array [R], of rows `index` [R]."""
        places, calls = self._split(index)
        parts = self._call("states", [None if call is None else (call,) for call in calls])
        widest = max(part[0].shape[1] for part in parts if part is not None)
        wide = [None if part is None else padded(part[0], widest) for part in parts]
        physics = _gather(wide, places, len(index))
        attributes = np.empty(len(index), dtype=object)
        for part, at in zip(parts, places, strict=True):
            for place, layers in zip(at, part[1] if part is not None else (), strict=True):
                attributes[place] = layers
        return physics, attributes

    def restore(self, index: np.ndarray, physics: np.ndarray, attributes: np.ndarray) -> None:
        """Restore rows `index` [R] from the result of `states`: physics [R, N], attributes [R]."""
        places, calls = self._split(index)
        self._call(
            "restore",
            [
                None if call is None else (call, physics[at], list(attributes[at]))
                for call, at in zip(calls, places, strict=True)
            ],
        )

    def render(self, index: np.ndarray, camera: str, height: int, width: int) -> np.ndarray:
        """Return uint8 [R, height, width, 3] of rows `index` [R]."""
        places, calls = self._split(index)
        parts = self._call("render", [None if call is None else (call, camera, height, width) for call in calls])
        return _gather(parts, places, len(index))

    def close(self) -> None:
        """Stop the workers; closing twice is harmless."""
        if self._local is not None:
            self._local.close()
            self._local = None
        for connection in self._connections:
            with suppress(OSError):
                connection.send(None)
            connection.close()
        for process in self._processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()
        self._connections = []
        self._processes = []
        self._lost = None

    def _split(self, index: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray | None]]:
        """Split `index` by worker: return the positions in `index` of its rows, and its local row numbers (None: no
        row).
        """
        places = [np.flatnonzero(np.isin(index, share)) for share in self.shares]
        calls = [index[at] - share[0] if len(at) else None for at, share in zip(places, self.shares, strict=True)]
        return places, calls

    def _call(self, method: str, arguments: Sequence[tuple | None]) -> list[Any]:
        """Call `method` in all workers that have arguments, in parallel; the result is None for the others."""
        if self._local is not None:
            return [
                None if row_arguments is None else _run(self._local, self._name, method, row_arguments)
                for row_arguments in arguments
            ]
        if self._lost is not None:
            raise self._lost
        if not self._connections:
            raise ConfigError("This world is closed: create a new one.")
        for worker, call_arguments in enumerate(arguments):
            if call_arguments is not None:
                try:
                    self._connections[worker].send((method, call_arguments))
                except OSError as error:
                    raise self._dead(worker) from error
        answers: list[Any] = [None] * len(arguments)
        failures = []
        for worker, call_arguments in enumerate(arguments):
            if call_arguments is not None:
                try:
                    kind, answers[worker] = self._connections[worker].recv()
                except (EOFError, OSError) as error:
                    raise self._dead(worker) from error
                if kind != "done":
                    failures.append((kind, answers[worker]))
        if failures:
            kind, text = failures[0]
            raise KNOWN_ERRORS[kind](text)
        return answers

    def _dead(self, worker: int) -> WorkerError:
        process, share = self._processes[worker], self.shares[worker]
        process.join(timeout=5)
        code = process.exitcode
        reason = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        # From here on other workers may hold answers that nobody read, so the pool is of no more use.
        self._lost = WorkerError(
            f"Simulation worker {worker} of '{self._name}' (process {process.pid}, rows {share[0]} to {share[-1]}) "
            f"died: {reason}. Its episodes are lost: create the world again. SIGKILL often means that the system ran "
            "out of memory (use a smaller batch or fewer workers); with world.options.workers=0 the environments "
            "run in this process, which shows the error."
        )
        return self._lost


def padded(vectors: Sequence[np.ndarray] | np.ndarray, size: int = 0) -> np.ndarray:
    """Return vectors, [n] each, as [R, N] with zeros behind the shorter ones; size: least N."""
    rows = np.zeros((len(vectors), max(size, *map(len, vectors))))
    for row, vector in zip(rows, vectors, strict=True):
        row[: len(vector)] = vector
    return rows


def _gather(parts: Sequence[np.ndarray | None], places: Sequence[np.ndarray], count: int) -> np.ndarray:
    """Merge the workers' rows [n, ...] into `count` rows by their positions [n], in request order: [count, ...]."""
    first = next(part for part in parts if part is not None)
    out = np.empty((count, *first.shape[1:]), dtype=first.dtype)
    for part, at in zip(parts, places, strict=True):
        if part is not None:
            out[at] = part
    return out


def _begin(name: str, make_row: Callable[[], RowEnvironment], count: int, images: Images) -> EnvironmentRows:
    """Create rows; an error of the environment itself becomes a WorkerError."""
    try:
        return EnvironmentRows(make_row, count, images)
    except RobopolicyError:
        raise
    except Exception as error:
        raise WorkerError(
            f"'{name}' could not be created: {type(error).__name__}: {error} (at {place_of(error)})."
        ) from error


def _run(rows: EnvironmentRows, name: str, method: str, arguments: tuple) -> Any:
    """Call a method of `rows`; an error of the environment itself becomes a WorkerError with the call that failed."""
    try:
        return getattr(rows, method)(*arguments)
    except RobopolicyError:
        raise
    except Exception as error:
        raise WorkerError(
            f"The environment '{name}' failed in {method}: {type(error).__name__}: {error} (at {place_of(error)}). "
            "The error comes from the environment itself: reset the world, or create it again if it happens "
            "repeatedly."
        ) from error


def serve(
    connection: Connection, name: str, make_row: Callable[[], RowEnvironment], count: int, images: Images
) -> None:
    """Main loop of a worker process: answer the parent's requests until it sends stop or exits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore", DeprecationWarning)
    rows: EnvironmentRows | None = None
    while True:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            break
        if message is None:
            break
        try:
            if rows is None:
                rows = _begin(name, make_row, count, images)
            answer = ("done", _run(rows, name, *message))
        except RobopolicyError as error:
            kind = type(error).__name__
            answer = (kind if kind in KNOWN_ERRORS else "WorkerError", str(error))
        connection.send(answer)
    if rows is not None:
        rows.close()
