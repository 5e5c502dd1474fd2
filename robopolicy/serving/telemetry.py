"""Telemetry of the server: its log, and metrics in Prometheus' text format.

The log has one JSON object per line on standard error, readable for people and log collectors.
"""

import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

LOGGER = logging.getLogger("robopolicy.serving")

PER_SECOND = 20
"""Maximum lines per second of one event; the rest are counted."""
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Upper bounds of the histogram of latencies, seconds."""
SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Upper bounds of the histogram of batch sizes, requests."""


class Log:
    """Event log; an event that repeats too fast is counted instead, and the count is written with the next one."""

    def __init__(self) -> None:
        self._window: dict[str, tuple[float, int]] = {}

    def __call__(self, event: str, level: int = logging.INFO, **details: Any) -> None:
        """Write `event` with `details` (JSON values), unless it was already written PER_SECOND times within this
        second.
        """
        now = time.monotonic()
        began, count = self._window.get(event, (now, 0))
        if now - began >= 1:
            if count > PER_SECOND:
                details["not_written_before"] = count - PER_SECOND
            began, count = now, 0
        self._window[event] = began, count + 1
        if count < PER_SECOND:
            LOGGER.log(level, event, extra={"details": details})


class JsonLines(logging.Formatter):
    """Log format: {"time", "level", "event", ...details}; a traceback, if any, under "trace"."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of JSON."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry: dict[str, Any] = {"time": f"{stamp}.{int(record.msecs):03d}Z", "level": record.levelname.lower()}
        entry["event"] = record.getMessage()
        entry |= getattr(record, "details", {})
        if record.exc_info:
            entry["trace"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def log_to_stderr() -> None:
    """Write the log to standard error; other output of the websocket library is dropped."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    LOGGER.handlers[:] = [handler]
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False
    logging.getLogger("websockets.server").setLevel(logging.CRITICAL)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)


class Histogram:
    """Histogram of values with upper `bounds`."""

    def __init__(self, name: str, bounds: tuple[float, ...]):
        self.name, self.bounds = name, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        place = next((index for index, bound in enumerate(self.bounds) if value <= bound), len(self.bounds))
        self._counts[place] += 1
        self._total += value

    def lines(self) -> list[str]:
        """Return the lines in Prometheus' exposition format."""
        lines, running = [f"# TYPE robopolicy_{self.name} histogram"], 0
        for bound, count in zip((*self.bounds, "+Inf"), self._counts, strict=True):
            running += count
            lines.append(f'robopolicy_{self.name}_bucket{{le="{bound}"}} {running}')
        return [*lines, f"robopolicy_{self.name}_sum {self._total:.6f}", f"robopolicy_{self.name}_count {running}"]


class Metrics:
    """Server metrics since start. refused: number of refusals by reason (key, limit, busy, observation, policy)."""

    def __init__(self) -> None:
        self.requests = self.connections = self.batches = self.sessions = 0
        self.refused: Counter[str] = Counter()
        self.latency = Histogram("latency_seconds", SECONDS)
        self.batch_size = Histogram("batch_size", SIZES)

    @property
    def errors(self) -> int:
        """Total number of refused requests and connections."""
        return self.refused.total()

    def text(self, gauges: Mapping[str, float]) -> str:
        """Return the exposition text. gauges: further current values, by name."""
        lines = []
        for name, kind, value in (
            ("requests_total", "counter", self.requests),
            ("errors_total", "counter", self.errors),
            ("inference_batches_total", "counter", self.batches),
            ("connections", "gauge", self.connections),
            ("sessions", "gauge", self.sessions),
            *((name, "gauge", value) for name, value in gauges.items()),
        ):
            lines += [f"# TYPE robopolicy_{name} {kind}", f"robopolicy_{name} {value:g}"]
        lines.append("# TYPE robopolicy_refused_total counter")
        for reason, count in sorted(self.refused.items()):
            lines.append(f'robopolicy_refused_total{{reason="{reason}"}} {count}')
        lines += [*self.latency.lines(), *self.batch_size.lines()]
        return "\n".join(lines) + "\n"
