"""Local workers that stay up from one command of a test file to the next: their imports take most of the time."""

import os
import signal

import pytest

from robopolicy.workers.local import LocalPool


class Warm(LocalPool):
    """A pool whose workers outlive the command that opened it. kill: end a worker after the first result."""

    kill = False

    def map(self, function, items):
        for result in super().map(function, items):
            if self.kill and self._busy:
                self.kill = False
                os.kill(next(iter(self._busy.values())).process.pid, signal.SIGKILL)
            yield result

    def close(self):
        self._end_busy()


@pytest.fixture(scope="module")
def pools():
    """The pools of a test file, by number of workers."""
    opened: dict[int, Warm] = {}
    yield opened
    for pool in opened.values():
        LocalPool.close(pool)


@pytest.fixture
def warm(pools, monkeypatch):
    """Let commands use the workers of earlier ones."""

    def pool(settings):
        return pools[settings.count] if settings.count in pools else pools.setdefault(settings.count, Warm(settings))

    monkeypatch.setattr("robopolicy.workers.local.LocalPool", pool)
    return pool
