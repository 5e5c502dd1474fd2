"""Worker processes on this machine.

A worker is a fresh interpreter that imports what its items need; the main script is not imported again. Both ends of
its connection belong to this process and its child, so nothing from outside is read. A worker ends when its standard
input closes, that is, whenever this process ends, however it ends.
"""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from robopolicy.core.errors import ConfigError
from robopolicy.core.pools import PoolSettings, context, died, perform, received

START = "import json as j, sys; sys.path[:] = j.loads(sys.argv[2]); from robopolicy.workers.local import work; work({})"
"""Command that a worker's interpreter runs."""


@dataclass(frozen=True)
class Shared:
    """Handle of a value that each worker receives once; the value is freed everywhere when the handle is."""

    key: int


@dataclass
class _Worker:
    process: "subprocess.Popen[bytes]"
    connection: "Connection[Any, Any]"
    item: int = -1
    values: set[int] = field(default_factory=set)

    def end(self, patience: float = 0.0) -> str:
        """End the process, by force after `patience` seconds, and return how it ended."""
        self.connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience)
        self.process.kill()
        code = self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"


class LocalPool:
    """Pool of `settings.count` processes, which start when there are items for them."""

    def __init__(self, settings: PoolSettings):
        if settings.options:
            raise ConfigError(f"workers.options={dict(settings.options)}: the pool local has no options.")
        self.workers = settings.count
        self._values: dict[int, Any] = {}
        self._keys = itertools.count()
        self._idle: list[_Worker] = []
        self._busy: dict[Connection[Any, Any], _Worker] = {}

    @property
    def processes(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.process.pid for worker in (*self._busy.values(), *self._idle)]

    def put(self, value: Any) -> Shared:
        """Implement `Pool.put`."""
        handle = Shared(next(self._keys))
        self._values[handle.key] = value
        weakref.finalize(handle, self._values.pop, handle.key, None)
        return handle

    def map(self, function: str, items: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Any]]:
        """Implement `Pool.map`."""
        given, deaths = context(), Counter[int]()
        waiting = deque(range(len(items)))
        busy = self._busy

        def bury(worker: _Worker) -> None:
            how = worker.end(patience=2.0)
            deaths[worker.item] += 1
            waiting.appendleft(worker.item)
            died(deaths[worker.item], how)

        def assign() -> None:
            while len(busy) + len(self._idle) < min(self.workers, len(busy) + len(waiting)):
                self._idle.append(_started())
            while waiting and self._idle:
                worker = self._idle.pop()
                worker.item = waiting.popleft()
                busy[worker.connection] = worker
                try:
                    self._send(worker, function, items[worker.item], given)
                except OSError:
                    bury(busy.pop(worker.connection))

        try:
            assign()
            while busy:
                for connection in wait(list(busy)):
                    worker = busy.pop(connection)  # pyright: ignore[reportArgumentType]
                    try:
                        reply = worker.connection.recv()
                    except (EOFError, OSError):
                        bury(worker)
                        assign()
                        continue
                    index = worker.item
                    self._idle.append(worker)
                    assign()
                    yield index, received(reply)
        finally:
            self._end_busy()

    def close(self) -> None:
        """Implement `Pool.close`."""
        self._end_busy()
        while self._idle:
            self._idle.pop().end()

    def _end_busy(self) -> None:
        while self._busy:
            self._busy.popitem()[1].end()

    def _send(self, worker: _Worker, function: str, item: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        missing = {value.key for value in item.values() if isinstance(value, Shared)} - worker.values
        values, freed = {key: self._values[key] for key in missing}, worker.values - self._values.keys()
        worker.values = (worker.values | missing) - freed
        worker.connection.send((function, dict(item), dict(given), values, freed))


def _started() -> _Worker:
    """Start a worker in a separate process group: Ctrl-C reaches only this process, which then ends the workers."""
    ours, theirs = Pipe()
    number = theirs.fileno()
    command = [sys.executable, "-c", START.format(number), "robopolicy-worker", json.dumps(["", *sys.path])]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[number], process_group=0)
    theirs.close()
    return _Worker(process, ours)


def work(number: int) -> None:
    """Run in a worker: receive items over the connection of this file number and reply, until it closes."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    with contextlib.suppress(OSError):
        os.dup2(2, 1)  # standard output belongs to the results of this command
    connection: Connection[Any, Any] = Connection(number)
    values: dict[int, Any] = {}
    while True:
        try:
            function, item, given, new, freed = connection.recv()
        except (EOFError, OSError):
            return
        values = {key: value for key, value in (values | new).items() if key not in freed}
        item = {name: values[value.key] if isinstance(value, Shared) else value for name, value in item.items()}
        connection.send(perform(function, item, given))


def end_with_parent() -> None:
    """End this process when its standard input closes."""
    while os.read(0, 1):
        pass
    os._exit(1)
