"""The clock of a robot's control steps, and how long its server took."""

import time
from collections.abc import Sequence

import numpy as np


class Clock:
    """Paces control steps; a step that is late is counted and shifts the following ones.

    rate: steps a second, 0 for as fast as can be; misses: steps that came more than a tenth of a period late.
    """

    def __init__(self, rate: float):
        self.period = 1.0 / rate if rate > 0 else 0.0
        self.misses = 0
        self._next: float | None = None

    def start(self) -> None:
        """Begin an episode: its first control step is due whenever it is ready."""
        self._next = None

    def wait(self) -> None:
        """Sleep until the next control step is due, or count it as late."""
        now = time.perf_counter()
        if self._next is None:
            self._next = now
        if self.period and now > self._next + 0.1 * self.period:
            self.misses += 1
            self._next = now
        elif self._next > now:
            time.sleep(self._next - now)
        self._next += self.period


def latency_figures(seconds: Sequence[float]) -> dict[str, float]:
    """Return {p50, p90, p99, max} of how long answers took, in milliseconds; nothing where there was none."""
    if not seconds:
        return {}
    latency = np.array(seconds) * 1e3
    return {
        **{f"p{level}": float(np.percentile(latency, level)) for level in (50, 90, 99)},
        "max": float(latency.max()),
    }
