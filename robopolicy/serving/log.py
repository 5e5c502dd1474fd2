"""A server's log: one JSON object a line on standard error, so that a person and a collector can read it."""

import json
import logging
import sys
import time
from typing import Any

LOGGER = logging.getLogger("robopolicy.serving")

PER_SECOND = 20
"""Lines of one event that are written a second; the rest are counted."""


class Log:
    """Events as they happen; one that repeats too fast is counted instead, and the count is written with the next."""

    def __init__(self) -> None:
        self._window: dict[str, tuple[float, int]] = {}

    def __call__(self, event: str, level: int = logging.INFO, **details: Any) -> None:
        """Write `event` with `details` (JSON values), unless it came PER_SECOND times within this second already."""
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
    """{"time", "level", "event", ...details}; a trace, where there is one, under "trace"."""

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
    """Write the log to standard error; what the websocket library says beside it is dropped."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    LOGGER.handlers[:] = [handler]
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False
    logging.getLogger("websockets.server").setLevel(logging.CRITICAL)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
