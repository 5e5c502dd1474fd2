"""Time of a fine-tuning iteration on more processes, computed from the recorded iterations of a run in one process.

Collection and evaluation are divided by the workers, each of which keeps `KEPT` of the speed of a single process; the
update is divided by the data-parallel processes, without the time to exchange gradients. Sending weights and rollouts
takes `SENDING` seconds. If collection and update overlap, the longer one counts. Everything but the first row is
computed, not measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

KEPT = 0.75
"""Share of its speed that collection keeps on a worker, by decisions per CPU second: 0.74 to 0.82 from states, in four
shards with small batches, 0.98 to 1.13 from cameras (`robopolicy bench workers`).
"""
SENDING = 0.05
"""Seconds in which weights go to the workers of one machine and rollouts come back, measured for push_t."""
SETUPS = ((4, 1), (16, 1), (64, 1), (64, 8))
"""Workers and data-parallel processes of the computed rows."""
HEADER = ["processes", "collect", "update", "evaluate", "iteration", "speed", "basis"]


@dataclass(frozen=True)
class Recorded:
    """Seconds per iteration of a run in one process: medians of collection and update, mean of evaluations."""

    collect: float
    update: float
    evaluate: float
    iterations: int
    overlaps: bool = False

    @classmethod
    def of(cls, metrics: Sequence[Mapping[str, Any]]) -> "Recorded | None":
        """Return the seconds recorded in the lines of metrics.jsonl after the first iteration, None without any."""
        lines = [line for line in metrics if "seconds_collect" in line][1:]
        if not lines:
            return None
        collect, update = (median(float(line[f"seconds_{name}"]) for line in lines) for name in ("collect", "update"))
        return cls(collect, update, mean(float(line.get("seconds_evaluate", 0.0)) for line in lines), len(lines))

    @property
    def total(self) -> float:
        """Seconds of an iteration, in which collection and update overlap or follow each other."""
        both = max(self.collect, self.update) if self.overlaps else self.collect + self.update
        return both + self.evaluate

    def on(self, workers: int, replicas: int, overlaps: bool = False) -> "Recorded":
        """Return the seconds of an iteration with workers, data-parallel processes, and overlapping collection."""
        share, sending = (1, 0.0) if workers == 1 else (KEPT * workers, SENDING)
        return Recorded(
            self.collect / share + sending, self.update / replicas, self.evaluate / share, self.iterations, overlaps
        )


def scaling_rows(recorded: Recorded, environments: int) -> list[list[str]]:
    """Return the rows of the table below `HEADER`; environments: parallel ones, a multiple of the shards."""
    rows = [["this run", *_numbers(recorded, recorded), "measured"]]
    shards = {most: max(each for each in range(1, most + 1) if environments % each == 0) for most, _ in SETUPS}
    for workers, replicas in dict.fromkeys((shards[workers], replicas) for workers, replicas in SETUPS):
        for overlaps in (False, True):
            setup = f"{workers} workers" + f", {replicas} data-parallel" * (replicas > 1) + ", overlapping" * overlaps
            rows.append([setup, *_numbers(recorded.on(workers, replicas, overlaps), recorded), "computed"])
    return rows


def _numbers(seconds: Recorded, alone: Recorded) -> list[str]:
    parts = (seconds.collect, seconds.update, seconds.evaluate, seconds.total)
    return [*(f"{each:.2f} s" for each in parts), f"{alone.total / seconds.total:.1f}x"]
