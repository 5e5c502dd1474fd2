"""Process that writes what a `RobotRecorder` sends as a LeRobotDataset; ends when its input does.

    python -m robopolicy.serving.recording_writer FOLDER < messages

Every message is four bytes of length and msgpack, the first one the description. Finished episodes are appended to
FOLDER within `SECONDS`, all or none of them (`write_dataset`), so a killed process leaves a complete dataset. Besides
the columns of any recording, rows have `plan`, `plan.step`, `latency_ms`, `held`, `failure.index`, `failure.alarm`,
`time`, and `policy` and `operator`, numbers of the names in meta/robopolicy/recording.json. Axes: L step of an episode,
P planned step, A action dimension.
"""

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from filelock import FileLock, Timeout
from torch import Tensor

from robopolicy.client.images import resize_with_padding
from robopolicy.client.protocol import unpack
from robopolicy.core.action_bounds import widen_bounds
from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import DataError, RobopolicyError
from robopolicy.core.machine import limit_threads
from robopolicy.core.origin import WorldOrigin
from robopolicy.core.spec import IMAGE_PREFIX, QUEUE, Field
from robopolicy.core.storage import read_object, recover_folder, remove_leftovers
from robopolicy.data.lerobot_format import RECORDING, write_dataset
from robopolicy.data.lerobot_reading import is_dataset, read_information

SECONDS = 10.0
"""Seconds that a finished episode may wait for others, which are then written together."""
PENDING = 128 * 2**20
"""Bytes of finished episodes that are written at once."""
ENDS_WITHIN = 60.0
"""Seconds to wait for another process that records to the folder."""
LONGEST = 256 * 2**20
"""Bytes after which an episode is cut in two: clients of other projects never end one."""


@dataclass
class Episode:
    """An episode while it is recorded. last: number of its last step; size: bytes."""

    task: str
    last: int
    steps: list[Mapping[str, Any]] = field(default_factory=list[Mapping[str, Any]])
    final: Mapping[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])
    terminated: bool = False
    size: int = 0


class Writer:
    """Collects the steps of all robots into episodes and appends finished ones to the dataset in `folder`.

    Raises DataError when the folder is neither empty nor a recording of the same columns.
    """

    def __init__(self, folder: Path, description: Mapping[str, Any], limit: float):
        self.folder, self.limit = recover_folder(folder), limit
        if folder.parent.is_dir():
            remove_leftovers(folder.parent, folder.name)
        if folder.exists() and any(folder.iterdir()) and not is_dataset(folder):
            raise DataError(f"{folder} is neither empty nor a LeRobotDataset: record into another folder.")
        self.fields = {key: Field.from_json(each) for key, each in description["observation"].items() if key != QUEUE}
        self.action = Field.from_json(description["action"])
        self.fps = float(description["fps"])
        self.plan_shape = (int(description["prediction" if description.get("chunking") else "chunk"]), self.action.size)
        self.rewards, self.says_success = tuple(description.get("rewards", ())), bool(description.get("success"))
        world = description.get("world")
        self.origin = None if world is None else WorldOrigin.from_json(world, folder)
        names = read_object(folder / RECORDING) if (folder / RECORDING).is_file() else {}
        self.names: dict[str, list[str]] = {each: list(names.get(each, [""])) for each in ("policies", "operators")}
        if is_dataset(folder):  # a robot's cameras may have another size than the policy reads: the first one counts
            features = read_information(folder)["features"]
            self.fields |= {key: _image(features[key]["shape"]) for key in self._cameras if key in features}
        self.running: dict[str, Episode] = {}
        self.finished: list[Episode] = []
        self.since = 0.0
        self.counts = {"episodes": 0, "steps": 0, "bytes": 0, "full": False}
        self._measure()

    @property
    def _cameras(self) -> list[str]:
        return [key for key in self.fields if key.startswith(IMAGE_PREFIX)]

    def take(self, message: Mapping[str, Any]) -> None:
        """Take a step, or the end of an episode."""
        robot = message["robot"]
        if end := message.get("end"):
            self.end(robot, end["final"], end["terminated"])
            return
        step, number = message["step"], message["number"]
        episode = self.running.get(robot)
        if episode is not None and (
            number != episode.last + 1 or episode.size > LONGEST or episode.task != message["task"]
        ):
            self.end(robot)
        episode = self.running.setdefault(robot, Episode(message["task"], number))
        episode.last = number
        episode.steps.append(step)
        episode.size += sum(frame.nbytes for frame in step["observation"].values())

    def end(self, robot: str, final: Mapping[str, np.ndarray] | None = None, terminated: bool = False) -> None:
        """End the episode of a robot, if it has one."""
        if (episode := self.running.pop(robot, None)) is not None:
            episode.final, episode.terminated = final or {}, terminated
            self.since = time.monotonic() if not self.finished else self.since
            self.finished.append(episode)

    @property
    def due(self) -> bool:
        """Whether finished episodes should be written now."""
        waited = time.monotonic() - self.since >= SECONDS
        return bool(self.finished) and (waited or sum(each.size for each in self.finished) > PENDING)

    def write(self) -> None:
        """Append the finished episodes to the dataset, unless it is full."""
        finished, self.finished = self.finished, []
        if not finished or self.counts["full"]:
            return
        episodes, columns = self._gathered(finished)
        write_dataset(
            episodes, self.folder, existing="append", origin=self.origin, columns=columns, recording=self.names
        )
        self.counts["episodes"] += len(episodes)
        self.counts["steps"] += episodes.step_count
        self._measure()

    def _measure(self) -> None:
        files = self.folder.rglob("*") if self.folder.is_dir() else ()
        self.counts["bytes"] = sum(each.stat().st_size for each in files if each.is_file())
        self.counts["full"] = self.counts["bytes"] >= self.limit

    def _gathered(self, finished: Sequence[Episode]) -> tuple[Episodes, dict[str, Tensor]]:
        """Return episodes and further columns."""
        steps = [step for episode in finished for step in episode.steps]
        final_known = [not self._cameras and episode.final.keys() >= self.fields.keys() for episode in finished]
        actions = np.stack([np.asarray(step["action"], np.float32).reshape(self.action.shape) for step in steps])

        def number(name: str, dtype: torch.dtype) -> Tensor:
            return torch.tensor([step[name] for step in steps], dtype=dtype)

        if not is_dataset(self.folder):
            self.fields |= {key: _image(finished[0].steps[0]["observation"][key].shape) for key in self._cameras}
        episodes = Episodes(
            observation_fields=dict(self.fields),
            action_field=widen_bounds(self.action, actions),
            fps=self.fps,
            observation={key: self._frames(key, finished, final_known) for key in self.fields},
            actions=torch.from_numpy(actions),
            lengths=torch.tensor([len(episode.steps) for episode in finished]),
            tasks=tuple(episode.task for episode in finished),
            rewards={name: torch.tensor([float(step["rewards"][name]) for step in steps]) for name in self.rewards}
            or None,
            step_success=number("success", torch.bool) if self.says_success else None,
            terminated=torch.tensor([episode.terminated for episode in finished]),
            final_known=torch.tensor(final_known),
            actor=number("actor", torch.int64),
            segment=number("segment", torch.int64),
        )
        columns = {
            "plan": torch.from_numpy(np.stack([self._plan(step["plan"]) for step in steps])),
            "plan.step": number("plan_step", torch.int64),
            "latency_ms": 1e3 * number("latency", torch.float32),
            "held": number("held", torch.bool),
            "failure.index": number("index", torch.float32),
            "failure.alarm": number("alarm", torch.bool),
            "time": number("time", torch.float64),
            "policy": torch.tensor([self._code("policies", step["policy"]) for step in steps]),
            "operator": torch.tensor([self._code("operators", step["operator"]) for step in steps]),
        }
        return episodes, columns

    def _frames(self, key: str, finished: Sequence[Episode], final_known: Sequence[bool]) -> Tensor:
        """Return the frames of a field [F, *shape]; an unknown final one repeats the one before."""
        frames: list[np.ndarray] = []
        for episode, is_known in zip(finished, final_known, strict=True):
            frames += [step["observation"][key] for step in episode.steps]
            frames.append(episode.final[key] if is_known else frames[-1])
        shape = self.fields[key].shape
        if not key.startswith(IMAGE_PREFIX):
            return torch.from_numpy(np.stack(frames).astype(np.float32).reshape(len(frames), *shape))
        sized = [frame if frame.shape == shape else resize_with_padding(frame, shape[:2]) for frame in frames]
        return torch.from_numpy(np.stack(sized).astype(np.uint8, copy=False))

    def _plan(self, plan: np.ndarray | None) -> np.ndarray:
        """Return a plan [n <= P, A] as [P * A]: zero without one, its last action repeated where it is shorter."""
        if plan is None or not len(plan):
            return np.zeros(self.plan_shape, np.float32).reshape(-1)
        rows = np.minimum(np.arange(self.plan_shape[0]), len(plan) - 1)
        return np.asarray(plan, np.float32).reshape(len(plan), -1)[rows].reshape(-1)

    def _code(self, kind: str, name: str) -> int:
        names = self.names[kind]
        if name not in names:
            names.append(name)
        return names.index(name)


def _image(shape: Sequence[int]) -> Field:
    return Field(tuple(shape), "uint8", 0.0, 255.0)


def messages(source: BinaryIO) -> Iterator[Any]:
    """Yield the messages of a stream; a half message at its end is of a killed process."""
    while len(head := source.read(4)) == 4:
        size = int.from_bytes(head, "big")
        data = source.read(size)
        if len(data) < size:
            return
        yield unpack(data)


def main(folder: Path, source: BinaryIO) -> int:
    """Write the messages of `source` until it ends; report on standard output after every write."""
    os.nice(10)  # robots wait for others
    limit_threads(1)
    waiting: queue.Queue[Any] = queue.Queue(1000)

    def read() -> None:
        for message in messages(source):
            waiting.put(message)
        waiting.put(None)

    threading.Thread(target=read, daemon=True).start()
    first = waiting.get()
    if first is None:
        return 0
    lock = FileLock(folder.with_name(f".{folder.name}.robopolicy-lock"), timeout=ENDS_WITHIN)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()  # the writing process of a killed server may have some left
        writer = Writer(folder, first["description"], first["limit"])
        report(writer.counts)
        going = True
        while going:
            try:
                message = waiting.get(timeout=1.0)
                going = message is not None
                if going:
                    writer.take(message)
            except queue.Empty:
                pass
            if not going:
                for robot in list(writer.running):
                    writer.end(robot)
            if writer.due or not going:
                writer.write()
                report(writer.counts)
    except Timeout:
        report({"error": f"Another process records to {folder}: choose another folder."})
        return 1
    except RobopolicyError as error:
        report({"error": str(error)})
        return 1
    return 0


def report(values: Mapping[str, Any]) -> None:
    """Print one line of JSON, unless the process that reads it is gone."""
    with suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), f"{json.dumps(values)}\n".encode())


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.stdin.buffer))
