"""Records what robots do while they are served or driven, as a LeRobotDataset, without delaying them.

    with RobotRecorder(folder, description) as recorder:
        recorder.step("left arm", RecordedStep(frames, action, plan=plan))    # at every control step
        recorder.end("left arm", success=True)                                # at the end of an episode

`step` and `end` only append to a queue; a thread hands it to a process of its own (`recording_writer`), which encodes
and writes. If that process cannot keep up, steps are dropped and counted: the recording of this episode ends before the
gap, and the rest becomes another episode. Finished episodes are on the disk after seconds; if this process is killed,
the other one writes what it has, including unfinished episodes, and ends. Needs numpy and msgpack only; the writing
process needs the complete package. Axes: P planned step, A action dimension.
"""

import fcntl
import json
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from robopolicy.client.executed import ActingAgent, Segment
from robopolicy.client.protocol import pack
from robopolicy.core.errors import ServingError

WAITING = 256 * 2**20
"""Maximum bytes of steps that wait to be written; further ones are dropped."""
STARTS_WITHIN = 120.0
"""Seconds within which the writing process must have started, on a busy machine too."""
PIPE = 2**20
"""Bytes that the pipe to the writing process holds, Linux's largest without privileges: a full one costs switches."""
ENDS_WITHIN = 60.0
"""Seconds that `close` waits for the writing process, which then goes on alone."""


@dataclass(frozen=True)
class RecordedStep:
    """One control step of one robot.

    observation: field -> frame [*shape] before the action; action: [A] as executed; actor, segment: who acted and the
    kind of segment, as `ActingAgent` and `Segment`; operator: name of the person or script that acted, "" for none;
    held: the robot was held still; plan: [P, A], the answer that the policy acts on, None for none; plan_step: index of
    the action in it; latency: seconds of that answer; policy: name and version of the policy that gave it; index,
    alarm: of the failure detector; rewards: by term, for a description with rewards; success: the task is done, for a
    description with success; time: seconds since 1970.
    """

    observation: Mapping[str, np.ndarray]
    action: np.ndarray
    actor: int = int(ActingAgent.POLICY)
    segment: int = int(Segment.AUTONOMOUS)
    operator: str = ""
    held: bool = False
    plan: np.ndarray | None = None
    plan_step: int = -1
    latency: float = 0.0
    policy: str = ""
    index: float = 0.0
    alarm: bool = False
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    success: bool = False
    time: float = 0.0


class RobotRecorder:
    """Records the steps of any number of robots, each named by a text; calls return at once and from any thread.

    description: metadata of the served policy, as its server sends it (`observation`, `action`, `prediction`, `fps`,
    `world`), optionally with `rewards`, names of reward terms, and `success`, whether steps say it; limit: bytes of the
    folder beyond which nothing is recorded; waiting: bytes that may wait. An existing dataset is continued. dropped:
    steps that were not recorded; state: {"episodes", "steps", "bytes", "full"} on the disk; error: reason why nothing
    is recorded any more, "" for none; `require_ready` waits for the writing process, which takes seconds to start, and
    raises what it cannot write to.
    """

    def __init__(self, folder: Path, description: Mapping[str, Any], *, limit: float = 50e9, waiting: int = WAITING):
        self.folder, self.limit = Path(folder), waiting
        self.dropped, self.error = 0, ""
        self.state: dict[str, Any] = {"episodes": 0, "steps": 0, "bytes": 0, "full": False}
        self._messages: deque[tuple[int, dict[str, Any]]] = deque()
        self._bytes, self._closed = 0, False
        self._sent: dict[str, int] = {}
        self._changed, self._ready = threading.Condition(), threading.Event()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "robopolicy.serving.recording_writer", str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,  # Ctrl-C is for us; in a session of its own its niceness would not count
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        if hasattr(fcntl, "F_SETPIPE_SZ") and self._process.stdin is not None:
            with suppress(OSError):  # all pipes of a user share a limit
                fcntl.fcntl(self._process.stdin, fcntl.F_SETPIPE_SZ, PIPE)
        self._put({"description": dict(description), "limit": limit}, 0)
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._send, self._listen)]
        for thread in self._threads:
            thread.start()

    def require_ready(self, seconds: float = STARTS_WITHIN) -> None:
        """Wait until the writing process has started. Raises ServingError if it has not, or cannot write."""
        if not self._ready.wait(seconds) or self.error:
            raise ServingError(
                self.error or f"The recording to {self.folder} did not start: is the machine overloaded?"
            )

    def step(self, robot: str, step: RecordedStep, task: str = "") -> None:
        """Record a control step; the first one of a robot, and the first one after `end`, begins an episode.

        task: its instruction. Arrays must not be changed afterwards.
        """
        size = sum(frame.nbytes for frame in step.observation.values()) + 1000
        number = self._sent[robot] = self._sent.get(robot, 0) + 1  # a gap in these numbers ends an episode
        if not self._put({"robot": robot, "number": number, "task": task, "step": vars(step)}, size):
            self.dropped += 1

    def end(self, robot: str, final: Mapping[str, np.ndarray] | None = None, *, terminated: bool = False) -> None:
        """End the episode of a robot, if it has one. final: the observation after the last action, if known;
        terminated: the task ended it, not a time limit or a lost connection.
        """
        if self._sent.pop(robot, None) is not None:
            self._put({"robot": robot, "end": {"final": dict(final or {}), "terminated": terminated}}, 1000)

    def close(self, seconds: float = ENDS_WITHIN) -> None:
        """End all episodes and wait until everything is written, at most this long."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._threads[0].join(seconds)
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return
        self._threads[1].join(seconds)

    def __enter__(self) -> "RobotRecorder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _put(self, message: dict[str, Any], size: int) -> bool:
        """Append to the queue; return whether there was room."""
        with self._changed:
            if self.error or self.state["full"] or self._closed or (size and self._bytes + size > self.limit):
                return False
            self._messages.append((size, message))
            self._bytes += size
            self._changed.notify()
            return True

    def _send(self) -> None:
        """Hand messages to the process, in order, until closed."""
        pipe = self._process.stdin
        assert pipe is not None
        try:
            while True:
                with self._changed:
                    while not self._messages and not self._closed:
                        self._changed.wait()
                    if not self._messages:
                        break
                    size, message = self._messages.popleft()
                data = pack(message)
                pipe.write(len(data).to_bytes(4, "big") + data)
                pipe.flush()
                with self._changed:
                    self._bytes -= size
            pipe.close()
        except OSError:  # `_listen` knows why
            pass

    def _listen(self) -> None:
        """Take what the process reports, one line of JSON after every write, until it ends."""
        pipe = self._process.stdout
        assert pipe is not None
        with pipe:
            for line in pipe:
                self.state |= json.loads(line)
                self.error = str(self.state.pop("error", ""))
                self._ready.set()
        status = self._process.wait()
        if status and not self.error:
            self.error = f"The process that records to {self.folder} ended with status {status}."
        self._ready.set()
