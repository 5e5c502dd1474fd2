"""Counters and a latency histogram in Prometheus' text form."""

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Upper bounds of the latency histogram, seconds."""


class Metrics:
    """What a server did since it started."""

    def __init__(self) -> None:
        self.requests = self.errors = self.connections = self.batches = 0
        self._counts = [0] * (len(BUCKETS) + 1)
        self._total = 0.0

    def observe(self, seconds: float) -> None:
        """Count one answered request and the time from its arrival to its answer."""
        place = next((index for index, bound in enumerate(BUCKETS) if seconds <= bound), len(BUCKETS))
        self._counts[place] += 1
        self._total += seconds

    def text(self) -> str:
        """Return the exposition text."""
        lines = []
        for name, kind, value in (
            ("requests_total", "counter", self.requests),
            ("errors_total", "counter", self.errors),
            ("inference_batches_total", "counter", self.batches),
            ("connections", "gauge", self.connections),
        ):
            lines += [f"# TYPE robopolicy_{name} {kind}", f"robopolicy_{name} {value}"]
        lines.append("# TYPE robopolicy_latency_seconds histogram")
        running = 0
        for bound, count in zip((*BUCKETS, "+Inf"), self._counts, strict=True):
            running += count
            lines.append(f'robopolicy_latency_seconds_bucket{{le="{bound}"}} {running}')
        lines += [f"robopolicy_latency_seconds_sum {self._total:.6f}", f"robopolicy_latency_seconds_count {running}"]
        return "\n".join(lines) + "\n"
