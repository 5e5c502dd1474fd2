"""OpenTelemetry traces of a real server, read by a collector of ours; what a collector that is away costs."""

import gzip
import multiprocessing
import os
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest
from served_policies import FRONT, run_one

from robopolicy.client.policy_client import PolicyClient
from robopolicy.client.protocol import SESSION
from robopolicy.core.spec import STATE
from robopolicy.serving.telemetry import SEND_SECONDS, Traces

pytest.importorskip("opentelemetry.sdk", reason="pip install 'robopolicy[opentelemetry]'")
pytestmark = pytest.mark.long


class Collector(BaseHTTPRequestHandler):
    """Keeps the bodies of what is posted."""

    bodies: list[bytes]

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.bodies.append(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments): ...


def test_every_answer_is_a_span_with_what_it_was(monkeypatch):
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    Collector.bodies = []
    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "robot.site=lab")
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        settings = {"opentelemetry": True}
        process = context.Process(target=run_one, args=(there, "echo", settings), daemon=True)
        process.start()
        assert here.poll(120)
        began = time.time_ns()
        with PolicyClient(port=here.recv()) as client:
            for value in range(3):
                state, image = np.array([float(value), 0.0]), np.zeros((4, 6, 3), np.uint8)
                client.infer({STATE: state, FRONT: image, SESSION: "left arm"})
        ended = time.time_ns()
        os.kill(process.pid, signal.SIGTERM)
        process.join(20)
        assert process.exitcode == 0
        collector.shutdown()
    (resource,) = {
        each.resource.SerializeToString(): each.resource for each in spans_of(ExportTraceServiceRequest)
    }.values()
    about = {each.key: each.value.string_value for each in resource.attributes}
    assert about["service.name"] == "robopolicy" and about["robot.site"] == "lab"
    spans = [span for each in spans_of(ExportTraceServiceRequest) for scope in each.scope_spans for span in scope.spans]
    assert [span.name for span in spans] == ["answer"] * 3
    for span in spans:
        told = {each.key: each.value for each in span.attributes}
        assert told["robopolicy.session"].string_value.endswith("left arm")
        assert began < span.start_time_unix_nano < span.end_time_unix_nano < ended
        seconds = 1e-9 * (span.end_time_unix_nano - span.start_time_unix_nano)
        assert 0 < told["robopolicy.inference_seconds"].double_value < seconds


def spans_of(kind):
    return [each for body in Collector.bodies for each in kind.FromString(body).resource_spans]


def test_a_collector_that_is_away_delays_nobody(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    traces, began = Traces(), time.monotonic()
    for _ in range(5000):
        traces.answered(0.01, session="robot", policy="", inference_seconds=0.005, alarms=())
    assert time.monotonic() - began < 5
    began = time.monotonic()
    traces.close()
    assert time.monotonic() - began < SEND_SECONDS + 1
