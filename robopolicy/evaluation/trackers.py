"""Experiment trackers: TensorBoard, Weights & Biases, Trackio, or your own, fed with each line of metrics.jsonl.

metrics.jsonl stays the record of a run; a tracker is a view of it. So a tracker that fails is switched off with a
warning, and never ends a run. A resumed run repeats the steps after its last checkpoint exactly; those that were
sent before are not sent again.
"""

import io
import os
import secrets
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from queue import Full, Queue
from threading import Event, Thread
from typing import Any, Protocol, TypeGuard

from robopolicy.core.errors import ConfigError, DataError, RobopolicyWarning, in_one_line, require_extra
from robopolicy.core.registry import Registry
from robopolicy.core.run import RunFolder
from robopolicy.core.storage import read_object, write_json

EXTRA = "track"
TRACKERS = Registry(
    "tracker",
    "robopolicy.trackers",
    {
        "tensorboard": "robopolicy.evaluation.trackers:TensorBoard",
        "wandb": "robopolicy.evaluation.trackers:WandB",
        "trackio": "robopolicy.evaluation.trackers:Trackio",
    },
)
"""Registry for run.tracker: a class or function that takes a `TrackedRun` and returns a `Tracker`."""
PROJECT = "robopolicy"
IDENTITY = "tracker.json"
PATIENCE, MOST_WAITING = 60.0, 10_000
"""Seconds to wait for a tracker at the start and at the end, and maximum length of its queue."""
FRAMES, WIDTH = 100, 480
"""Maximum number of frames, and width in pixels, of a video that TensorBoard shows as an animated image."""


@dataclass(frozen=True)
class TrackedRun:
    """The run to track. path: run folder; name: unique within its root; config: all settings; identifier: see
    `identifier_in`.
    """

    path: Path
    name: str
    config: Mapping[str, Any]
    identifier: str = ""


def identifier_in(folder: Path) -> str:
    """Return an identifier of the run in a folder that survives resuming; a run that starts over has a new one."""
    path = folder / IDENTITY
    if not path.exists():
        write_json(path, {"id": secrets.token_hex(4)})
    return str(read_object(path, DataError).get("id", ""))


class Tracker(Protocol):
    """Receives metrics and media; any exception disables it."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics by name at a step. Steps of a metric restart at 0 if a run trains twice."""
        ...

    def media(self, name: str, path: Path) -> None:
        """Record a video (.mp4) or an image (.png) that the finished run shows."""
        ...

    def finish(self) -> None:
        """Flush and close; called once, when the run has ended or stops."""
        ...


class Following:
    """Feeds a tracker from a run folder: `folder.followers.append(Following(...))`.

    The tracker runs in its own thread, so that a slow network does not slow down the run. make: returns the tracker.
    Raises the ConfigError of `make`, such as for a missing package; any other failure disables the tracker.
    """

    def __init__(self, make: Callable[[TrackedRun], Tracker], run: TrackedRun, folder: RunFolder):
        self.run = run
        # A resumed run repeats the steps after its last checkpoint with the same numbers: these were sent already.
        self._sent = Counter(mark(record) for record in folder.metrics())
        self._last = 0
        self._wrong: BaseException | None = None
        self._is_off = False
        self._calls: Queue[Callable[[Tracker], None] | None] = Queue(MOST_WAITING)
        self._made = Event()
        self._thread = Thread(target=self._work, args=(make,), daemon=True, name="tracker")
        self._thread.start()
        self._made.wait(PATIENCE)
        if isinstance(self._wrong, ConfigError):
            raise self._wrong
        self._say()

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Send the metrics of one line of metrics.jsonl, unless they were sent before."""
        point = mark(record)
        axis, step, _ = point
        self._last = max(self._last, step)
        if self._sent[point] > 0:
            self._sent[point] -= 1
            return
        self._log({name: value for name, value in record.items() if name != axis}, axis or "run", step)

    def finish(self) -> None:
        """Send the result, videos and images of the folder, then close the tracker. A second call does nothing."""
        if self._is_off:
            return
        if (self.run.path / "result.json").exists():
            self._log(flat(read_object(self.run.path / "result.json")), "result", self._last)
        for path in sorted((*self.run.path.glob("*.mp4"), *self.run.path.glob("*.png"))):
            self._send(lambda tracker, path=path: tracker.media(path.stem, path))
        self._send(lambda tracker: tracker.finish())
        self._send(None)
        self._thread.join(PATIENCE)
        if self._thread.is_alive() and self._wrong is None:
            self._wrong = TimeoutError(f"it did not accept all data within {PATIENCE:.0f} s")
        self._say()
        self._is_off = True

    def _log(self, values: Mapping[str, Any], group: str, step: int) -> None:
        numbers = {f"{group}/{name}": float(value) for name, value in values.items() if is_number(value)}
        if numbers:
            self._send(lambda tracker: tracker.log(numbers, step))

    def _send(self, call: Callable[[Tracker], None] | None) -> None:
        self._say()
        if self._is_off:
            return
        try:
            self._calls.put_nowait(call)
        except Full:
            self._wrong = TimeoutError(f"its queue of {MOST_WAITING} records is full")
            self._say()

    def _say(self) -> None:
        """Warn once if the tracker has failed, and disable it."""
        if self._wrong is not None and not self._is_off:
            self._is_off = True
            warnings.warn(
                f"run.tracker failed and is disabled: {in_one_line(self._wrong)}. The run continues; all metrics "
                f"are in {self.run.path / 'metrics.jsonl'}.",
                RobopolicyWarning,
                stacklevel=4,
            )

    def _work(self, make: Callable[[TrackedRun], Tracker]) -> None:
        try:
            tracker = make(self.run)
            self._made.set()
            while (call := self._calls.get()) is not None:
                call(tracker)
        except BaseException as error:  # packages may raise anything, even SystemExit
            self._wrong = error
        finally:
            self._made.set()


def mark(record: Mapping[str, Any]) -> tuple[str, int, frozenset[str]]:
    """Return an identifier of a line of metrics.jsonl within its run: step counter, its value, metric names."""
    return (*position(record), frozenset(record))


def position(record: Mapping[str, Any]) -> tuple[str, int]:
    """Return the name of a record's step counter and its value; ("", 0) if it has none."""
    names = ("iteration", "step", "round", *(name for name in record if name.endswith("_step")))
    for name in names:
        if isinstance(record.get(name), int):
            return name, int(record[name])
    return "", 0


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as {"section.key": value}."""
    result: dict[str, Any] = {}
    for name, value in tree.items():
        result |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return result


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value of metrics.jsonl is a number that can be plotted."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class TensorBoard:
    """Writes event files to the run's folder `tensorboard`: `tensorboard --logdir runs` shows all runs."""

    def __init__(self, run: TrackedRun):
        require_extra("tensorboard", EXTRA)
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        self._writer = SummaryWriter(str(run.path / "tensorboard"), flush_secs=5)
        self._step = 0
        if run.config:
            values = {key: v if isinstance(v, (bool, int, float, str)) else str(v) for key, v in run.config.items()}
            writer = self._writer._get_file_writer()
            assert writer is not None
            for summary in hparams(values, {}):
                writer.add_summary(summary)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Implement `Tracker.log`."""
        self._step = step
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def media(self, name: str, path: Path) -> None:
        """Implement `Tracker.media`; a video becomes an animated GIF, which needs no further package."""
        from tensorboard.compat.proto import summary_pb2

        summaries: Any = summary_pb2  # its classes are made at run time
        encoded, height, width = gif_of(path) if path.suffix == ".mp4" else (path.read_bytes(), 0, 0)
        image = summaries.Summary.Image(encoded_image_string=encoded, height=height, width=width, colorspace=3)
        writer = self._writer._get_file_writer()
        assert writer is not None
        writer.add_summary(summaries.Summary(value=[summaries.Summary.Value(tag=name, image=image)]), self._step)

    def finish(self) -> None:
        """Implement `Tracker.finish`."""
        self._writer.close()


class WandB:
    """A run of Weights & Biases: online with an API key or a login, else offline (`wandb sync` uploads it later)."""

    def __init__(self, run: TrackedRun):
        wandb = require_extra("wandb", EXTRA)
        has_account = "WANDB_MODE" in os.environ or "WANDB_API_KEY" in os.environ or wandb.api.api_key
        self._wandb = wandb
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.name,
            id=run.identifier,
            resume="allow",
            config=dict(run.config),
            dir=str(run.path),
            mode=None if has_account else "offline",
        )
        self._axes: set[str] = set()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Implement `Tracker.log`; every counter (iteration, step) is an axis of its own."""
        axis = next(iter(metrics), "run/").partition("/")[0]
        if axis not in self._axes:
            self._axes.add(axis)
            self._run.define_metric(f"{axis}/*", step_metric=axis)
        self._run.log({**metrics, axis: step})

    def media(self, name: str, path: Path) -> None:
        """Implement `Tracker.media`."""
        item = self._wandb.Video(str(path)) if path.suffix == ".mp4" else self._wandb.Image(str(path))
        self._run.log({name: item})

    def finish(self) -> None:
        """Implement `Tracker.finish`."""
        self._run.finish()


class Trackio:
    """A run of Trackio, in its local database: `trackio show --project robopolicy`. No account, no network."""

    def __init__(self, run: TrackedRun):
        self._trackio = require_extra("trackio", EXTRA)
        self._run = self._trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=f"{run.name}-{run.identifier}",  # all run folders share its database
            config={key: str(value) for key, value in run.config.items()},
            resume="allow",
            embed=False,
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Implement `Tracker.log`."""
        self._run.log(dict(metrics), step=step)

    def media(self, name: str, path: Path) -> None:
        """Implement `Tracker.media`."""
        item = self._trackio.Video(str(path)) if path.suffix == ".mp4" else self._trackio.Image(str(path))
        self._run.log({name: item})

    def finish(self) -> None:
        """Implement `Tracker.finish`."""
        self._run.finish()


def gif_of(path: Path) -> tuple[bytes, int, int]:
    """Return a video as an animated GIF of at most FRAMES frames and WIDTH pixels, its height and its width."""
    import av  # LeRobot's datasets need it as well

    frames = []
    with av.open(str(path)) as video:
        frames = [frame.to_image() for frame in video.decode(video=0)]
    thinned = frames[:: max(1, -(-len(frames) // FRAMES))]
    for image in thinned:
        image.thumbnail((WIDTH, WIDTH))
    encoded = io.BytesIO()
    thinned[0].save(encoded, "GIF", save_all=True, append_images=thinned[1:], duration=100, loop=0)
    return encoded.getvalue(), thinned[0].height, thinned[0].width
