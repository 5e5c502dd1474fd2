"""A server in its own process, and a robot in another that asks it twenty times a second whatever else goes on."""

import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
from served_policies import FRONT, run_one

from robopolicy.client.policy_client import PolicyClient
from robopolicy.core.spec import STATE

SPAWN = multiprocessing.get_context("spawn")


@contextmanager
def served(policy: str, settings: dict[str, Any] | None = None) -> Iterator[tuple[int, BaseProcess]]:
    """Serve a policy in a process of its own; yield its port and the process, which is killed at the end."""
    here, there = SPAWN.Pipe()
    process = SPAWN.Process(target=run_one, args=(there, policy, settings or {}), daemon=True)
    process.start()
    assert here.poll(120), "the server did not start"
    try:
        yield here.recv(), process
        assert process.is_alive(), "the server died"
    finally:
        process.kill()
        process.join(20)


def memory(process: BaseProcess) -> float:
    """Return the resident memory of a process, MiB."""
    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def ask_steadily(pipe: Any, port: int) -> None:
    """Ask a server of `Echo` 20 times a second, until told to end; send the waits when asked for them.

    A wait is the time beyond the policy's own. Raises AssertionError on an answer to another question.
    """
    waits: list[float] = []
    with PolicyClient(port=port) as client:
        for step in range(10**9):
            began = time.perf_counter()
            value = 1.0 + step % 3  # an Echo is slow from 5 on
            answer = client.infer({STATE: np.array([value, 0.0]), FRONT: np.full((4, 6, 3), 7, np.uint8)})
            took = time.perf_counter() - began
            assert answer["actions"][:2, 0].tolist() == [value, 1.0 + (step - 1) % 3 if step else value]
            waits.append(took - 1e-3 * answer["policy_timing"]["infer_ms"])
            while pipe.poll():
                if pipe.recv() == "end":
                    return
                pipe.send(waits)
                waits = []
            time.sleep(max(0.0, 0.05 - took))


class Innocent:
    """A robot that wants nothing but its answers; every one is compared with what it must be."""

    def __init__(self, port: int):
        self._pipe, there = SPAWN.Pipe()
        self._process = SPAWN.Process(target=ask_steadily, args=(there, port), daemon=True)
        self._process.start()
        there.close()
        self.waits()

    def waits(self, seconds: float = 0.0) -> list[float]:
        """Return the waits [s] since this was asked last, or of the next `seconds`. Raises EOFError if it ended."""
        if seconds:
            self.waits()
            time.sleep(seconds)
        self._pipe.send("waits")
        return self._pipe.recv()

    def __enter__(self) -> "Innocent":
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.send("end")
        self._process.join(20)
        assert self._process.exitcode == 0
