"""Robots under shared control as people see them and order them (`Fleet`); used by several threads.

Axes: A action dimension, P planned step.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from robopolicy.core.action_bounds import bounds_of
from robopolicy.core.arrays import Array
from robopolicy.operators.assistance import Team
from robopolicy.operators.axes import AxesOperator
from robopolicy.operators.operator import Site, make_operator
from robopolicy.operators.shared_control import Mode

REMEMBERED = 120
"""Newest failure indices per robot that are shown."""
EVENTS = 60
"""Newest events that are shown."""


@dataclass
class RobotView:
    """Newest data of a robot. images: camera -> (number, uint8 [height, width, 3]); plan: remaining actions [P, A];
    index: failure index of each detector; reached_ms: milliseconds from the last takeover or stop to its first step;
    away: whether it has lost the console.
    """

    name: str
    images: dict[str, tuple[int, Array]] = field(default_factory=dict)
    plan: Array | None = None
    action: Array | None = None
    index: dict[str, deque[float]] = field(default_factory=dict)
    alarms: tuple[str, ...] = ()
    latency_ms: float | None = None
    steps: int = 0
    episodes: int = 0
    reached_ms: float | None = None
    ordered: float | None = None
    away: bool = False


class Fleet:
    """Robots under shared control: `show` is called by what runs them, the rest by their console.

    names: of the robots, in the order of the rows of `team`; site: of people who operate from the console.
    """

    def __init__(
        self,
        team: Team,
        site: Site,
        names: Sequence[str],
        clock: Callable[[], float] = time.monotonic,
    ):
        self.team, self.site = team, site
        self.robots = [RobotView(name) for name in names]
        self.watched = 0
        self._clock = clock
        self._started = time.time() - team.now  # of the team's clock, in seconds since 1970
        self._joined = 0

    def show(
        self,
        row: int,
        *,
        images: Mapping[str, Array] | None = None,
        plan: Array | None = None,
        action: Array | None = None,
        index: Mapping[str, float] | None = None,
        alarms: Sequence[str] = (),
        latency_ms: float | None = None,
        mode: str | None = None,
    ) -> None:
        """Take the newest data of a robot after a control step; what is None stays as it was.

        mode: in which the step was executed, if it is not the present one.
        """
        with self.team.lock:
            robot = self.robots[row]
            for camera, image in (images or {}).items():
                robot.images[camera] = robot.images.get(camera, (0, image))[0] + 1, image
            robot.plan = robot.plan if plan is None else plan
            robot.action = robot.action if action is None else action
            for name, value in (index or {}).items():
                robot.index.setdefault(name, deque(maxlen=REMEMBERED)).append(value)
            robot.alarms = tuple(alarms)
            robot.latency_ms = robot.latency_ms if latency_ms is None else latency_ms
            robot.steps += 1
            mode = self.team.control.modes[row].label if mode is None else mode
            if robot.ordered is not None and mode in (Mode.OPERATED.label, Mode.STOPPED.label):
                robot.reached_ms, robot.ordered = 1000 * (self._clock() - robot.ordered), None

    def begin(self, row: int) -> None:
        """Begin an episode of a robot."""
        with self.team.lock:
            robot = self.robots[row]
            robot.index, robot.plan = {}, None
            robot.episodes += 1

    def join(self) -> str:
        """Add a person at a console as an operator, who takes robots over when they want; return their name."""
        with self.team.lock:
            self._joined += 1
            name = f"browser {self._joined}"
            self.team.operators[name] = make_operator("browser", self.site)
            self.team.control.add_operator(name, assigned=False)
            self.watched += 1
            return name

    def leave(self, name: str) -> None:
        """Remove a person; the robot that they operate holds still and waits for somebody else."""
        with self.team.lock:
            self.team.control.remove_operator(name, self.team.now)
            self.team.operators.pop(name).close()
            self.watched -= 1

    def order(self, name: str, message: Mapping[str, Any]) -> str:
        """Carry out a message of the person `name`; return the reason if it cannot be carried out, "" otherwise.

        {"do": "take" | "hand_back" | "dismiss" | "ask", "robot": number}, {"do": "axes", "axes": [A]},
        {"do": "stop" | "release"}.
        """
        do, robot = message.get("do"), message.get("robot")
        with self.team.lock:
            control, now = self.team.control, self.team.now
            operator = self.team.operators[name]
            if do in ("stop", "release"):
                if do == "stop":
                    for view in self.robots:
                        view.ordered = self._clock()
                getattr(control, do)(now)
                return ""
            assert isinstance(operator, AxesOperator)
            if do == "axes":
                axes = message.get("axes")
                if not isinstance(axes, list) or not all(isinstance(each, int | float) for each in axes):
                    return "Axes must be a list of numbers."
                operator.set_axes(axes)
                return ""
            if type(robot) is not int or not 0 <= robot < len(self.robots):
                return f"There is no robot {robot!r:.20}."
            if self.robots[robot].away and do in ("take", "ask"):
                return f"{self.robots[robot].name} has no connection."
            if do == "take":
                self.robots[robot].ordered = self._clock()
                if not control.take_over(robot, name, now):
                    return self._taken(robot, name)
                operator.set_axes([])  # keys from before the takeover do not count
                return ""
            if do == "hand_back":
                if control.operator_of(robot) == name:
                    control.hand_back(robot, now)
                    return ""
                return f"You do not operate {self.robots[robot].name}."
            if do == "dismiss":
                return "" if control.dismiss(robot, now) else f"{self.robots[robot].name} asks for nothing."
            if do == "ask":
                is_waiting = control.alarm(robot, now, "held by a person")
                return "" if is_waiting else f"{self.robots[robot].name} does not act by itself."
            return f"There is no order {do!r:.20}."

    def _taken(self, robot: int, name: str) -> str:
        """Return the reason why a person cannot take a robot over."""
        control, view = self.team.control, self.robots[robot]
        if (operated := control.robot_of(name)) is not None:
            return f"You operate {self.robots[operated].name}: hand it back first."
        if control.modes[robot] is Mode.STOPPED:
            return "All robots are stopped: release them first."
        return f"{view.name} is operated by {control.operator_of(robot)}."

    def state(self, name: str) -> dict[str, Any]:
        """Return the state that a page shows to the person `name`, JSON-ready."""
        with self.team.lock:
            control = self.team.control
            queue = control.queue
            return {
                "me": name,
                "mine": control.robot_of(name),
                "stopped": control.stopped,
                "operators": [[each, control.robot_of(each)] for each in control.operators],
                "robots": [self._robot(row, queue) for row in range(len(self.robots))],
                "events": self._events(),
            }

    def _robot(self, row: int, queue: Sequence[int]) -> dict[str, Any]:
        control, view = self.team.control, self.robots[row]
        request = control.requests[row]
        return {
            "name": view.name,
            "mode": control.modes[row].label,
            "operator": control.operator_of(row),
            "reason": "" if request is None else request.reason,
            "place": queue.index(row) + 1 if row in queue else None,
            "cameras": list(view.images),
            "plan": _rounded(view.plan),
            "action": _rounded(view.action),
            "index": {detector: _rounded(values) for detector, values in view.index.items()},
            "alarms": list(view.alarms),
            "latency_ms": _rounded(view.latency_ms),
            "steps": view.steps,
            "episodes": view.episodes,
            "away": view.away,
            "reached_ms": _rounded(view.reached_ms),
        }

    def _events(self) -> list[dict[str, Any]]:
        newest = list(self.team.control.events)[-EVENTS:]
        return [
            {
                "time": round(self._started + event.time, 1),
                "robot": self.robots[event.robot].name,
                "mode": event.mode.label,
                "operator": event.operator,
                "reason": event.reason,
            }
            for event in newest
        ]

    def images(self, seen: Mapping[tuple[int, str], int]) -> list[tuple[int, str, int, Array]]:
        """Return row, camera, number and image of those whose number differs from `seen`."""
        with self.team.lock:
            return [
                (row, camera, number, image)
                for row, robot in enumerate(self.robots)
                for camera, (number, image) in robot.images.items()
                if seen.get((row, camera)) != number
            ]

    def about(self) -> dict[str, Any]:
        """Return the constants of a page: names of the action's elements, their range, and the control rate."""
        action = self.site.action
        low, high = bounds_of(action)
        names = action.names or tuple(f"action {place}" for place in range(action.size))
        return {"axes": list(names), "low": _rounded(low), "high": _rounded(high), "fps": self.site.fps}


def _rounded(values: Any) -> Any:
    """Return numbers as JSON, with 4 digits; None for those that are not finite."""
    if values is None:
        return None
    if isinstance(values, deque | list | np.ndarray):
        return [_rounded(each) for each in values]
    return float(f"{values:.4g}") if math.isfinite(values) else None
