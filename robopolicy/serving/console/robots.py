"""Robots that report to a console over the network (`RobotReports`), each in its own process; see `client.supervision`.

A robot's reports and their answers are msgpack messages at `/robot`. Axes: A action dimension, P planned step.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from robopolicy.client.protocol import Limits, unpack
from robopolicy.core.arrays import Array, is_mapping
from robopolicy.core.errors import SpecError
from robopolicy.operators.alarms import ServerAlarm
from robopolicy.operators.shared_control import Mode
from robopolicy.serving.console.fleet import Fleet, RobotView

MOST = 64
"""Most robots of a console."""
LIMITS = Limits(message=4 * 2**20, names=32, text=200, length=256, elements=4096)
"""Limits of a robot's message."""
AWAY = "no connection"
"""Reason of events of a robot that has disconnected."""


class RobotReports:
    """Lets robots join a fleet, takes their reports and gives them orders. Used by the console's thread."""

    def __init__(self, fleet: Fleet):
        self.fleet = fleet
        self._alarms: dict[int, ServerAlarm] = {}
        self._acting: dict[int, str | None] = {}
        self._present: set[int] = set()

    def join(self, data: bytes) -> int:
        """Return the number of the robot that introduces itself as {"name": text}; one that returns keeps its number.

        Raises SpecError for an invalid name, one that is taken, and when there are too many robots.
        """
        message = unpack(data, LIMITS)
        name = message.get("name") if isinstance(message, dict) else None
        if not isinstance(name, str) or not 0 < len(name) <= 60 or not name.isprintable():
            raise SpecError("A robot introduces itself by a name of at most 60 characters.")
        team, fleet = self.fleet.team, self.fleet
        with team.lock:
            known = [row for row, view in enumerate(fleet.robots) if view.name == name]
            if known and known[0] in self._present:
                raise SpecError(f"A robot with the name '{name}' is connected already.")
            if not known and len(fleet.robots) >= MOST:
                raise SpecError(f"The console has {MOST} robots already.")
            row = known[0] if known else team.control.add_robot()
            if not known:
                fleet.robots.append(RobotView(name))
            self._present.add(row)
            self._alarms[row], self._acting[row] = ServerAlarm(1), None
            fleet.robots[row].away = False
            team.control.reset(row, team.tick())
            return row

    def leave(self, row: int) -> None:
        """Take note that a robot has disconnected; it holds still by itself."""
        team = self.fleet.team
        with team.lock:
            self._present.discard(row)
            team.control.reset(row, team.tick())
            self.fleet.robots[row].away = True

    def exchange(self, row: int, data: bytes) -> dict[str, Any]:
        """Take a robot's report and return its orders. Raises SpecError for an invalid report."""
        report = _Report(unpack(data, LIMITS), self.fleet.site.action.size)
        team, alarm = self.fleet.team, self._alarms[row]
        control = team.control
        with team.lock:
            now = team.tick()
            if report.failure is not None:
                alarm.answered(0, *report.failure)
            index, alarms = report.failure or ({}, self.fleet.robots[row].alarms)
            self.fleet.show(
                row,
                images=report.images,
                plan=report.plan,
                action=report.action,
                index=index,
                alarms=alarms,
                latency_ms=report.latency_ms,
                mode=report.mode,
            )
            if alarm.raised()[0] and report.mode == Mode.AUTONOMOUS.label:
                control.alarm(row, now, alarm.name)
            action = self._operated(row, report, now)
            control.step(now)
            if control.modes[row] is Mode.HANDING_BACK:
                alarm.resume(np.array([0]))
                control.resumed(row, now)
            order: dict[str, Any] = {"mode": control.modes[row].label}
            return order if action is None else {**order, "action": action}

    def _operated(self, row: int, report: "_Report", now: float) -> Array | None:
        """Return the action [A] of the robot's operator, None for none; hand back if the operator says so."""
        team, rows = self.fleet.team, np.array([row])
        name = team.control.operator_of(row)
        operator = None if name is None else team.operators[name]
        if operator is not None and name == self._acting[row] and operator.finished(rows)[0]:
            team.control.hand_back(row, now)
            name = operator = None
        if operator is not None and name != self._acting[row]:
            operator.begin(rows)
        self._acting[row] = name
        if operator is None:
            return None
        action = np.asarray(operator.act({}, rows, report.action[None]))[0]
        return action if np.isfinite(action).all() else None


class _Report:
    """A robot's report with checked contents."""

    def __init__(self, message: Any, size: int):
        if not isinstance(message, dict):
            raise SpecError("A report is a mapping.")
        self.mode = str(message.get("mode", ""))
        self.action = _numbers(message.get("action"), (size,))
        plan = np.asarray(message.get("plan", np.zeros((0, size))))
        self.plan = _numbers(plan, (min(len(plan), LIMITS.length) if plan.ndim else 0, size))
        latency = message.get("latency_ms")
        self.latency_ms = float(latency) if isinstance(latency, int | float) else None
        failure = message.get("failure")
        self.failure = _failure(failure) if is_mapping(failure) else None
        images = message.get("images")
        self.images = {str(name)[:60]: _image(image) for name, image in images.items()} if is_mapping(images) else {}


def _numbers(value: Any, shape: tuple[int, ...]) -> Array:
    array = np.asarray(value)
    if array.dtype.kind not in "fiu" or array.shape != shape or not np.isfinite(array).all():
        raise SpecError(f"A report's action and plan are finite numbers of shape {list(shape)}.")
    return array.astype(np.float64)


def _image(value: Any) -> Array:
    image = np.asarray(value)
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or not image.size:
        raise SpecError("A report's images are uint8 [height, width, 3].")
    return image


def _failure(value: Mapping[Any, Any]) -> tuple[dict[str, float], tuple[str, ...]]:
    index, alarms = value.get("index", {}), value.get("alarms", [])
    if not is_mapping(index) or not isinstance(alarms, list):
        raise SpecError("A report's failure has an index by detector and a list of alarms.")
    numbers = {str(name)[:60]: float(each) for name, each in index.items() if isinstance(each, int | float)}
    return numbers, tuple(str(each)[:60] for each in alarms)
