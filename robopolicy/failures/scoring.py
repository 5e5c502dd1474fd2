"""Scores of failure detectors: AUROC at equal times, detection and false alarms with Wilson intervals, lead time.

At the end of an episode every index that grows is a clock, so indices are compared among episodes that still run at the
same time. Axes: n decisions of an episode, N at most.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from robopolicy.core.arrays import Array
from robopolicy.evaluation.success import counted_rate
from robopolicy.failures.detector import Rollout

TIMES = (0.25, 0.5, 0.75)
"""Shares of the time limit at which indices are compared."""


def auroc(failed: Array, succeeded: Array) -> float | None:
    """Return the chance that a failed episode's index is the higher one, ties counting half; None if there is none of
    either.
    """
    if not (len(failed) and len(succeeded)):
        return None
    from scipy.stats import mannwhitneyu  # seconds to import: who scores, pays

    result: Any = mannwhitneyu(failed, succeeded)
    return float(result.statistic) / (len(failed) * len(succeeded))


def first_alarm(index: Array, threshold: Array) -> int | None:
    """Return the first decision at which the index [n] exceeds the threshold [N], None for no alarm."""
    alarms = np.flatnonzero(index > threshold[np.minimum(np.arange(len(index)), len(threshold) - 1)])
    return int(alarms[0]) if len(alarms) else None


@dataclass(frozen=True)
class Scored:
    """A detector's results on rollouts. indices: [n] of each; threshold: [N]; chunk: control steps of a decision;
    fps: control steps per second.
    """

    rollouts: Sequence[Rollout]
    indices: Sequence[Array]
    threshold: Array
    chunk: int
    fps: float

    def auroc_at(self, share: float) -> dict[str, Any]:
        """Return the AUROC after this share of the decisions, and how many failed and successful episodes still run."""
        count = max(1, round(share * len(self.threshold)))
        running = [(each.success, index[count - 1]) for each, index in self._pairs if len(index) >= count]
        failed, succeeded = (np.array([value for good, value in running if good is kind]) for kind in (False, True))
        return {"auroc": auroc(failed, succeeded), "failed": len(failed), "successful": len(succeeded)}

    def summary(self, rate: float = 0.05) -> dict[str, Any]:
        """Return AUROC at each of TIMES, detected failures and false alarms as counted rates, and the median time in
        seconds from the alarm to the end of detected failures.

        equal_false_alarms: detection at the lowest constant threshold that has false alarms in at most this share of
        the scored episodes themselves, for comparing detectors without the luck of calibration.
        """
        largest = np.sort([index.max() for each, index in self._pairs if each.success])[::-1]
        exact = largest[int(rate * len(largest))] if len(largest) else -np.inf
        return {
            "auroc": {f"{share:.0%}": self.auroc_at(share) for share in TIMES},
            **self._detected(self.threshold),
            "equal_false_alarms": self._detected(np.full(len(self.threshold), exact)),
        }

    @property
    def _pairs(self) -> list[tuple[Rollout, Array]]:
        return list(zip(self.rollouts, self.indices, strict=True))

    def _detected(self, threshold: Array) -> dict[str, Any]:
        """Return detected failures, false alarms and lead time with this threshold [N]."""
        failed, false = 0, 0
        leads: list[float] = []
        for each, index in self._pairs:
            alarm = first_alarm(index, threshold)
            failed += not each.success
            if alarm is None:
                continue
            if each.success:
                false += 1
            else:
                leads.append((each.length - alarm * self.chunk) / self.fps)
        return {
            "detected": counted_rate(len(leads), failed),
            "false_alarms": counted_rate(false, len(self.rollouts) - failed),
            "lead_seconds": float(np.median(leads)) if leads else None,
        }

    def after_fault(self) -> dict[str, Any]:
        """Return results of episodes in which a planted fault began: success, alarms before it, failures detected after
        it, and the median seconds from its beginning to the alarm.
        """
        begun_count = failed = early = good = 0
        delays: list[float] = []
        for each, index in self._pairs:
            if not each.fault or each.begin >= each.length:
                continue
            begun_count, good = begun_count + 1, good + each.success
            alarm = first_alarm(index, self.threshold)
            # The first decision that can show the fault is the first at or after its beginning.
            before = alarm is not None and alarm * self.chunk < each.begin
            early += before
            if each.success or before:
                continue
            failed += 1
            if alarm is not None:
                delays.append((alarm * self.chunk - each.begin) / self.fps)
        return {
            "success": counted_rate(good, begun_count),
            "alarms_before": counted_rate(early, begun_count),
            "detected": counted_rate(len(delays), failed),
            "delay_seconds": float(np.median(delays)) if delays else None,
        }
