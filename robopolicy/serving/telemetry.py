"""Telemetry of the server: its log, its events, Prometheus metrics, and OpenTelemetry traces if wanted.

The log has one JSON object per line on standard error, readable for people and log collectors. Events are what is
logged and every answer, for whoever is connected to /events.
"""

import asyncio
import logging
import sys
import threading
import time
from typing import Any

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from robopolicy.core.errors import ConfigError

LOGGER = logging.getLogger("robopolicy.serving")

PER_SECOND = 20
"""Maximum lines per second of one event; the rest are counted."""
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Upper bounds of the histogram of latencies, seconds."""
SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Upper bounds of the histogram of batch sizes, requests."""
UNREAD = 1000
"""Maximum events that wait for a reader; further ones are lost to it."""
SEND_SECONDS = 2.0
"""Maximum seconds for sending traces."""

disable_created_metrics()


class Events:
    """Events for any number of readers, as JSON-ready mappings; a slow reader loses some and delays nobody."""

    def __init__(self) -> None:
        self._readers: set[asyncio.Queue[dict[str, Any]]] = set()

    def __bool__(self) -> bool:
        """Whether anybody reads."""
        return bool(self._readers)

    def add(self, event: str, details: dict[str, Any]) -> None:
        """Hand an event to all readers."""
        for reader in self._readers:
            if not reader.full():
                reader.put_nowait({"time": time.time(), "event": event, **details})

    def open(self) -> asyncio.Queue[dict[str, Any]]:
        """Return a queue that receives the events from now on, until `close`."""
        reader: asyncio.Queue[dict[str, Any]] = asyncio.Queue(UNREAD)
        self._readers.add(reader)
        return reader

    def close(self, reader: asyncio.Queue[dict[str, Any]]) -> None:
        """Hand no more events to a reader."""
        self._readers.discard(reader)


class Log:
    """Event log; an event that repeats too fast is counted instead, and the count is written with the next one."""

    def __init__(self, events: Events | None = None) -> None:
        self.events = Events() if events is None else events
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
            self.events.add(event, details)


def json_lines() -> logging.Formatter:
    """Return the format of the log, one JSON object per line: {time, level, event, ...details}."""
    form = structlog.stdlib.ProcessorFormatter
    known = [structlog.stdlib.add_log_level, structlog.processors.TimeStamper(fmt="iso", key="time"), _add_details]
    text = structlog.processors.JSONRenderer(default=str)
    return form(foreign_pre_chain=known, processors=[form.remove_processors_meta, text])


def _add_details(logger: Any, name: str, entry: structlog.typing.EventDict) -> structlog.typing.EventDict:
    return {**entry, **getattr(entry["_record"], "details", {})}


def log_to_stderr() -> None:
    """Write the log to standard error; other output of the websocket library is dropped."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(json_lines())
    LOGGER.handlers[:] = [handler]
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False
    logging.getLogger("websockets.server").setLevel(logging.CRITICAL)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)


class Traces:
    """OpenTelemetry traces: one span per answer, sent in the background to where the OTEL_* environment variables say.

    Raises ConfigError without the extra `opentelemetry`.
    """

    def __init__(self) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(
                "serve.opentelemetry=true needs OpenTelemetry: pip install 'robopolicy[opentelemetry]'"
            ) from error
        for noisy in ("opentelemetry.sdk", "opentelemetry.exporter"):  # a collector that is away is not the robots'
            logging.getLogger(noisy).setLevel(logging.CRITICAL)
        named = Resource({"service.name": "robopolicy"}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=named, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(timeout=SEND_SECONDS)))
        self._tracer = self._provider.get_tracer("robopolicy.serving")

    def answered(self, seconds: float, **attributes: Any) -> None:
        """Record an answer that was just made, `seconds` after its request arrived."""
        end = time.time_ns()
        attributes = {f"robopolicy.{name}": value for name, value in attributes.items()}
        self._tracer.start_span("answer", attributes=attributes, start_time=end - int(1e9 * seconds)).end(end)

    def close(self) -> None:
        """Send what is left, for at most SEND_SECONDS."""
        sending = threading.Thread(target=self._provider.shutdown, daemon=True)
        sending.start()
        sending.join(SEND_SECONDS)


class Metrics:
    """Server metrics since start, all named robopolicy_*."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def made(kind: Any, name: str, text: str, labels: tuple[str, ...] = (), **options: Any) -> Any:
            return kind(f"robopolicy_{name}", text, labels, registry=self.registry, **options)

        self.requests: Counter = made(Counter, "requests", "Messages received")
        self.errors: Counter = made(Counter, "errors", "Refused requests and connections")
        self.refused: Counter = made(Counter, "refused", "The same by reason", ("reason",))
        self.batches: Counter = made(Counter, "inference_batches", "Forward passes")
        self.latency: Histogram = made(Histogram, "latency_seconds", "From message to answer", buckets=SECONDS)
        self.batch_size: Histogram = made(Histogram, "batch_size", "Requests in a forward pass", buckets=SIZES)
        self.connections: Gauge = made(Gauge, "connections", "Open connections")
        self.answers: Counter = made(Counter, "answers", "Answers by policy", ("policy", "version"))
        self.outside: Counter = made(
            Counter, "outside_training_range", "Observed elements far outside of the training data", ("element",)
        )
        self.alarms: Counter = made(Counter, "failure_alarms", "Episodes with an alarm", ("detector", "version"))
        self.episodes: Counter = made(Counter, "episodes", "Episodes begun", ("policy", "version"))
        self.reloads: Counter = made(Counter, "policy_reloads", "Checkpoints taken, or not", ("outcome",))
        self._gauges: dict[str, Gauge] = {}
        self._made = made

    def refuse(self, reason: str) -> None:
        """Count a refusal: key, busy, observation, policy."""
        self.errors.inc()
        self.refused.labels(reason).inc()

    def text(self, **gauges: float) -> str:
        """Return the exposition text. gauges: further current values, by name."""
        for name, value in gauges.items():
            if name not in self._gauges:
                self._gauges[name] = self._made(Gauge, name, name.replace("_", " "))
            self._gauges[name].set(value)
        return generate_latest(self.registry).decode()
