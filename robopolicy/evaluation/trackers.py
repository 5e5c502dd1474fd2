"""Experiment trackers: TensorBoard, Weights & Biases, Trackio, or your own, fed with each line of metrics.jsonl.

metrics.jsonl stays the record of a run; a tracker is a view of it. So a tracker that fails is switched off with a
warning, and never ends a run. A resumed run repeats the steps after its last checkpoint exactly; those that were
sent before are not sent again.
"""

import hashlib
import io
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from robopolicy.core.errors import RobopolicyWarning, in_one_line, require_extra
from robopolicy.core.registry import Registry
from robopolicy.core.run import RunFolder

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
"""What run.tracker names: a class or function that takes a `TrackedRun` and returns a `Tracker`."""
PROJECT = "robopolicy"
FRAMES, WIDTH = 100, 480
"""Most frames, and pixels of width, of a video that TensorBoard shows as an animated image."""


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker shows. path: its folder; name: unique within its root; config: all its settings."""

    path: Path
    name: str
    config: Mapping[str, Any]

    @property
    def identifier(self) -> str:
        """A text that is the same whenever this folder is resumed."""
        return hashlib.sha256(str(self.path.resolve()).encode()).hexdigest()[:16]


class Tracker(Protocol):
    """Receives metrics and media; may raise anything, which switches it off."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record numbers by name at a step; steps of one name never decrease."""
        ...

    def media(self, name: str, path: Path) -> None:
        """Record a video (.mp4) or an image (.png) that the finished run shows."""
        ...

    def finish(self) -> None:
        """Flush and close; called once, when the run has ended or stops."""
        ...


class Following:
    """Feeds a tracker from a run folder: `folder.followers.append(Following(...))`.

    make: returns the tracker; it is called here, so that a missing package is said before the run starts. Raises what
    `make` raises.
    """

    def __init__(self, make: Callable[[TrackedRun], Tracker], run: TrackedRun, folder: RunFolder):
        self.run = run
        # A killed run logged these; it repeats those after its last checkpoint, with the same numbers.
        self._sent: dict[str, int] = {}
        for record in folder.metrics() if (folder.path / "metrics.jsonl").exists() else ():
            axis, step = position(record)
            self._sent[axis] = max(step, self._sent.get(axis, step))
        self.tracker: Tracker | None = make(run)

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Send the numbers of one line of metrics.jsonl, unless its step was sent before."""
        axis, step = position(record)
        if step <= self._sent.get(axis, -1) and axis:
            return
        self._sent[axis] = step
        numbers = {name: float(value) for name, value in record.items() if is_number(value) and name != axis}
        self._try(lambda tracker: tracker.log({f"{axis or 'run'}/{name}": n for name, n in numbers.items()}, step))

    def finish(self) -> None:
        """Send the videos and images of the folder, then close the tracker."""
        for path in sorted((*self.run.path.glob("*.mp4"), *self.run.path.glob("*.png"))):
            self._try(lambda tracker, path=path: tracker.media(path.stem, path))
        self._try(lambda tracker: tracker.finish())
        self.tracker = None

    def _try(self, call: Callable[[Tracker], None]) -> None:
        if self.tracker is None:
            return
        try:
            call(self.tracker)
        except Exception as error:
            kind, self.tracker = type(self.tracker).__name__, None
            warnings.warn(
                f"The tracker {kind} failed and is switched off: {in_one_line(error)}. The run "
                f"goes on; all metrics are in {self.run.path / 'metrics.jsonl'}.",
                RobopolicyWarning,
                stacklevel=2,
            )


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


def is_number(value: object) -> bool:
    """Whether a value of metrics.jsonl is a number that can be plotted."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class TensorBoard:
    """Writes event files to the run's folder `tensorboard`: `tensorboard --logdir runs` shows all runs."""

    def __init__(self, run: TrackedRun):
        require_extra("tensorboard", EXTRA)
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run.path / "tensorboard"), flush_secs=5)
        self._step = 0
        lines = "\n".join(f"    {key}: {value}" for key, value in run.config.items())
        self._writer.add_text("config", lines, 0)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """See `Tracker`."""
        self._step = step
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def media(self, name: str, path: Path) -> None:
        """See `Tracker`; a video becomes an animated GIF, which needs no further package."""
        from tensorboard.compat.proto import summary_pb2

        summaries: Any = summary_pb2  # its classes are made at run time
        encoded, height, width = gif_of(path) if path.suffix == ".mp4" else (path.read_bytes(), 0, 0)
        image = summaries.Summary.Image(encoded_image_string=encoded, height=height, width=width, colorspace=3)
        writer = self._writer._get_file_writer()
        assert writer is not None
        writer.add_summary(summaries.Summary(value=[summaries.Summary.Value(tag=name, image=image)]), self._step)

    def finish(self) -> None:
        """See `Tracker`."""
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
        """See `Tracker`; every counter (iteration, step) is an axis of its own."""
        axis = next(iter(metrics), "run/").partition("/")[0]
        if axis not in self._axes:
            self._axes.add(axis)
            self._run.define_metric(f"{axis}/*", step_metric=axis)
        self._run.log({**metrics, axis: step})

    def media(self, name: str, path: Path) -> None:
        """See `Tracker`."""
        item = self._wandb.Video(str(path)) if path.suffix == ".mp4" else self._wandb.Image(str(path))
        self._run.log({name: item})

    def finish(self) -> None:
        """See `Tracker`."""
        self._run.finish()


class Trackio:
    """A run of Trackio, in its local database: `trackio show --project robopolicy`. No account, no network."""

    def __init__(self, run: TrackedRun):
        self._trackio = require_extra("trackio", EXTRA)
        self._run = self._trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=run.name,
            config={key: str(value) for key, value in run.config.items()},
            resume="allow",
            embed=False,
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """See `Tracker`."""
        self._run.log(dict(metrics), step=step)

    def media(self, name: str, path: Path) -> None:
        """See `Tracker`."""
        item = self._trackio.Video(str(path)) if path.suffix == ".mp4" else self._trackio.Image(str(path))
        self._run.log({name: item})

    def finish(self) -> None:
        """See `Tracker`."""
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
