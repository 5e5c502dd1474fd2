"""Detectors that call an operator: thresholds per decision, a new beginning after help, and how far to go back."""

from types import SimpleNamespace

import numpy as np
import pytest

from robopolicy.core.spec import STATE, Field, PolicySpec
from robopolicy.failures.alarms import DetectorAlarm
from robopolicy.failures.detector import Calibrated, Seen
from robopolicy.failures.float import FloatDetector
from robopolicy.failures.watcher import Watcher

SPEC = PolicySpec({STATE: Field((1,))}, Field((1,)), 1, 4, 4, 0, 10.0)


class Sum:
    """The sum of what was seen so far."""

    reads_chunks = learns_from_rollouts = False

    def start(self, batch_size):
        self.sums = np.zeros(batch_size)

    def reset(self, rows):
        self.sums[rows] = 0

    def watch(self, seen, rows):
        self.sums[rows] += seen.embedding[:, 0]
        return self.sums[rows].copy()


class Shown:
    """An observer of a policy whose embedding is its state."""

    samples = 0
    policy = SimpleNamespace(spec=SPEC)

    def see(self, observation, generator):
        return Seen(observation[STATE][:, -1].numpy(), np.zeros((len(observation[STATE]), 0, 0)))


def alarm_of(detector, threshold) -> DetectorAlarm:
    return DetectorAlarm(Watcher(Shown(), {"sum": Calibrated("sum", detector, np.array(threshold), {})}), 2)


def decide(alarm: DetectorAlarm, values: list[float], rows=(0, 1)) -> list[bool]:
    observation = {STATE: np.array(values, np.float32)[:, None, None], "task": np.array(["", ""])}
    alarm.decide(observation, np.array(rows))
    return alarm.raised().tolist()


def test_an_index_above_its_threshold_calls_and_counts_anew_after_help():
    alarm = alarm_of(Sum(), [1.0, 2.0])
    alarm.start(np.arange(2), np.array([5, 6]))
    assert decide(alarm, [0.9, 1.5]) == [False, True]
    assert decide(alarm, [1.0, 0.0]) == [False, True]  # 1.9 of 2: an alarm stays, the other row is not there yet
    assert decide(alarm, [0.2, 0.0], rows=(0,)) == [True, True]
    assert alarm.steps_back(0) == 8  # of .9, 1, .2 no first part is below a fifth; the third was not executed
    alarm.resume(np.array([0]))
    assert alarm.raised().tolist() == [False, True]
    assert decide(alarm, [5.0, 0.0], rows=(0,)) == [False, True]  # what the operator's turn added does not count
    assert decide(alarm, [2.1, 0.0], rows=(0,)) == [True, True]
    alarm.start(np.array([1]), np.array([7]))
    assert decide(alarm, [0.0, 0.5], rows=(1,)) == [True, False]
    assert alarm.index["sum"][1] == [0.5]


@pytest.mark.checks("ARMADA")
def test_float_goes_back_by_the_costs_of_its_plan():
    detector = FloatDetector()
    detector.fit([np.array([[1.0], [1.0], [1.0], [1.0]])], [], 4)
    alarm = alarm_of(detector, [np.inf])
    alarm.start(np.array([0]), np.array([0]))
    for value in (1.0, 1.0, -1.0, -1.0):
        decide(alarm, [value, 0.0], rows=(0,))
    assert detector.costs(0) == pytest.approx([0.0, 0.0, 0.5, 0.5])
    assert alarm.steps_back(0) == 4  # two decisions were as demonstrated; of the other two, one was executed
