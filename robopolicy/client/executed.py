"""Control steps that a robot reports to a server that records: what it observed, what it executed, and who acted.

Axes: n step, A action dimension.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Any

import numpy as np

from .protocol import EXECUTED


class ActingAgent(IntEnum):
    """Code of the agent that acted."""

    UNKNOWN = -1
    POLICY = 0
    HUMAN = 1
    SCRIPT = 2
    NOBODY = 3
    """The robot held still, e.g. while it waited for an operator."""


class Segment(IntEnum):
    """Code of the kind of segment: autonomous, recovery or correction."""

    UNKNOWN = -1
    AUTONOMOUS = 0
    RECOVER = 1
    CORRECT = 2


NUMBERS = {
    "step": np.int64,
    "actor": np.int64,
    "segment": np.int64,
    "held": np.bool_,
    "plan_step": np.int64,
    "time": np.float64,
}
"""Entries of a report with one number per step, and their types; step: number of the step in its episode."""
ACTING = ("actor", "segment", "operator", "held")
"""Entries that say who acts."""
BEFORE = {"actor": int(ActingAgent.POLICY), "segment": int(Segment.AUTONOMOUS), "operator": "", "held": False}
"""Who acts before a robot reports anything: the policy."""


def executed_report(executed: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the value of `EXECUTED` for steps with `observation`, `action`, `operator` and the entries of NUMBERS."""
    steps = list(executed)
    if not steps:
        return {}
    return {
        **{key: np.stack([step["observation"][key] for step in steps]) for key in steps[0]["observation"]},
        "action": np.stack([np.asarray(step["action"], np.float32) for step in steps]),
        "operator": [str(step["operator"]) for step in steps],
        **{name: np.array([step[name] for step in steps], kind) for name, kind in NUMBERS.items()},
    }


class ExecutedSteps:
    """Steps of one robot that its server does not know yet.

    A report that may be lost is repeated, and the server skips what it knows. metadata: of the server; most: number of
    steps that are kept, the newest; last: the newest step, {} before the first; wanted: whether the server records.
    """

    def __init__(self, metadata: Mapping[str, Any], most: int):
        self.wanted = metadata.get("records") is True
        self._steps: deque[dict[str, Any]] = deque(maxlen=most)
        self._reported = 0
        self.last: dict[str, Any] = {}

    def add(
        self,
        observation: Mapping[str, np.ndarray],
        action: np.ndarray,
        step: int,
        *,
        held: bool = False,
        plan_step: int = -1,
        actor: int = ActingAgent.POLICY,
        segment: int = Segment.AUTONOMOUS,
        operator: str = "",
    ) -> None:
        """Add an executed step: frames by field [*shape], action [A], and who acted, as `RecordedStep` says."""
        self.last = {
            "observation": dict(observation),
            "action": action,
            "step": step,
            "time": time.time(),
            "actor": int(actor),
            "segment": int(segment),
            "operator": operator,
            "held": held,
            "plan_step": plan_step,
        }
        if self.wanted:
            self._steps.append(self.last)

    def report(self) -> dict[str, Any]:
        """Return a message with the steps that the server does not know yet, {} if there are none to report."""
        if not self._steps:
            return {}
        self._reported = len(self._steps)
        return {EXECUTED: executed_report(self._steps)}

    def answered(self) -> None:
        """Forget what the last report contained, now that it is answered."""
        for _ in range(min(self._reported, len(self._steps))):
            self._steps.popleft()
        self._reported = 0
