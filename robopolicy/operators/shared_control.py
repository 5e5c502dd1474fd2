"""Shared control of N robots by M operators: a state machine without clock, thread or device (`SharedControl`).

A robot acts autonomously until it raises an alarm. It then holds still, goes back if it can, and waits in one queue for
an idle operator, who acts until the sub-task is finished and hands the robot back (ARMADA, arXiv:2510.02298). An
operator may also take any robot over unasked, and anybody may stop all of them. Times are numbers that the caller
passes, in control steps or seconds.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

LOGGED = 10_000
"""Number of newest events and of finished requests that are kept."""


class Mode(IntEnum):
    """What a robot does, and who decides it."""

    AUTONOMOUS = 0
    HOLDING = 1
    REWINDING = 2
    WAITING = 3
    OPERATED = 4
    HANDING_BACK = 5
    STOPPED = 6

    @property
    def label(self) -> str:
        """Name for people: "handing back"."""
        return self.name.lower().replace("_", " ")


_ALARMED = (Mode.HOLDING, Mode.REWINDING, Mode.WAITING)
TRANSITIONS: dict[Mode, frozenset[Mode]] = {
    Mode.AUTONOMOUS: frozenset({Mode.HOLDING, Mode.OPERATED, Mode.STOPPED}),
    Mode.HOLDING: frozenset({Mode.REWINDING, Mode.WAITING, Mode.OPERATED, Mode.HANDING_BACK, Mode.STOPPED}),
    Mode.REWINDING: frozenset({Mode.WAITING, Mode.OPERATED, Mode.HANDING_BACK, Mode.STOPPED}),
    Mode.WAITING: frozenset({Mode.OPERATED, Mode.HANDING_BACK, Mode.STOPPED}),
    Mode.OPERATED: frozenset({Mode.WAITING, Mode.HANDING_BACK, Mode.STOPPED}),
    Mode.HANDING_BACK: frozenset({Mode.AUTONOMOUS, Mode.OPERATED, Mode.STOPPED}),
    Mode.STOPPED: frozenset({Mode.HANDING_BACK}),
}
"""Mode -> modes that can follow within an episode; a new episode begins autonomously."""


@dataclass
class Request:
    """A robot's request for help, or a takeover without one.

    reason: of the alarm, "" for a takeover without one; asked, taken, ended: times; number: order of the requests.
    """

    number: int
    robot: int
    reason: str
    asked: float
    taken: float | None = None
    operator: str | None = None
    ended: float | None = None

    @property
    def waited(self) -> float | None:
        """Time from the alarm to the takeover, None if nobody took over."""
        return None if self.taken is None else self.taken - self.asked


@dataclass(frozen=True)
class Event:
    """A robot's change of mode; operator: who acts, in mode OPERATED; reason: of the change, "" if there is none."""

    time: float
    robot: int
    before: Mode
    mode: Mode
    operator: str | None = None
    reason: str = ""


class SharedControl:
    """Modes of robots, numbered from 0, and assignment of operators, by name.

    operators: are assigned to waiting robots by `step`, one robot each, in the order in which the robots asked. A call
    that no longer applies, such as the alarm of a robot that somebody operates, changes nothing and returns False.
    modes: of the robots; requests: each robot's open request, None without one; finished: closed requests; events:
    changes of mode; both are limited to the newest `LOGGED`.
    """

    def __init__(self, robots: int = 0, operators: Iterable[str] = ()):
        self.modes: list[Mode] = []
        self.requests: list[Request | None] = []
        self.finished: deque[Request] = deque(maxlen=LOGGED)
        self.events: deque[Event] = deque(maxlen=LOGGED)
        self.stopped = False
        self._rewinds: list[bool] = []
        self._operators = dict.fromkeys(operators, True)  # whether they are assigned
        self._count = 0
        for _ in range(robots):
            self.add_robot()

    def add_robot(self) -> int:
        """Add a robot and return its number."""
        self.modes.append(Mode.STOPPED if self.stopped else Mode.AUTONOMOUS)
        self.requests.append(None)
        self._rewinds.append(False)
        return len(self.modes) - 1

    def add_operator(self, name: str, assigned: bool = True) -> None:
        """Add an operator; assigned: takes waiting robots from the queue, otherwise only by `take_over`."""
        self._operators[name] = assigned

    def remove_operator(self, name: str, now: float) -> None:
        """Remove an operator; the robot that they operate waits for another, before all others in the queue."""
        robot = self.robot_of(name)
        if robot is not None:
            request = self.requests[robot]
            assert request is not None
            request.operator = None
            self._enter(robot, Mode.WAITING, now, f"{name} left")
        self._operators.pop(name, None)

    @property
    def operators(self) -> tuple[str, ...]:
        """Names of the operators."""
        return tuple(self._operators)

    @property
    def queue(self) -> list[int]:
        """Robots that wait for an operator, in the order in which they asked."""
        waiting = [request for request in self.requests if request and self.modes[request.robot] is Mode.WAITING]
        return [request.robot for request in sorted(waiting, key=lambda each: each.number)]

    def operator_of(self, robot: int) -> str | None:
        """Return the name of the robot's operator, None without one."""
        request = self.requests[robot]
        return None if request is None else request.operator

    def robot_of(self, operator: str) -> int | None:
        """Return the robot that the operator operates, None if idle."""
        return next((each.robot for each in self.requests if each and each.operator == operator), None)

    def alarm(self, robot: int, now: float, reason: str, *, rewind: bool = False) -> bool:
        """Ask for help for an autonomous robot; it holds still. rewind: the robot will go back before it waits."""
        if self.modes[robot] is not Mode.AUTONOMOUS:
            return False
        self._open(robot, now, reason)
        self._rewinds[robot] = rewind
        return self._enter(robot, Mode.HOLDING, now, reason)

    def rewound(self, robot: int, now: float) -> bool:
        """Report that a robot has gone back; it waits from now on, and its place in the queue is that of its alarm."""
        return self.modes[robot] is Mode.REWINDING and self._enter(robot, Mode.WAITING, now)

    def dismiss(self, robot: int, now: float) -> bool:
        """Answer a request without taking over: the robot resumes."""
        if self.modes[robot] not in _ALARMED:
            return False
        self._close(robot, now)
        return self._enter(robot, Mode.HANDING_BACK, now, "dismissed")

    def take_over(self, robot: int, operator: str, now: float) -> bool:
        """Let an idle operator take a robot over, whether it asked or not, unless somebody operates it."""
        mode = self.modes[robot]
        if mode in (Mode.OPERATED, Mode.STOPPED) or operator not in self._operators:
            return False
        if self.robot_of(operator) is not None:
            return False
        request = self.requests[robot] or self._open(robot, now, "")
        request.operator = operator
        request.taken = now if request.taken is None else request.taken
        return self._enter(robot, Mode.OPERATED, now)

    def hand_back(self, robot: int, now: float) -> bool:
        """End the operator's turn; the operator is idle at once, the robot resumes once `resumed` is called."""
        if self.modes[robot] is not Mode.OPERATED:
            return False
        self._close(robot, now)
        return self._enter(robot, Mode.HANDING_BACK, now)

    def resumed(self, robot: int, now: float) -> bool:
        """Report that a robot's policy acts again, from a new observation."""
        return self.modes[robot] is Mode.HANDING_BACK and self._enter(robot, Mode.AUTONOMOUS, now)

    def reset(self, robot: int, now: float) -> None:
        """Begin a robot's next episode, autonomously; its operator is idle. A stopped robot remains stopped."""
        self._close(robot, now)
        if self.modes[robot] not in (Mode.AUTONOMOUS, Mode.STOPPED):
            self._enter(robot, Mode.AUTONOMOUS, now, "new episode")

    def stop(self, now: float) -> None:
        """Stop all robots until `release`, and all added meanwhile; requests end and operators are idle."""
        self.stopped = True
        for robot, mode in enumerate(self.modes):
            self._close(robot, now)
            if mode is not Mode.STOPPED:
                self._enter(robot, Mode.STOPPED, now, "stop")

    def release(self, now: float) -> None:
        """End a stop: all robots resume."""
        self.stopped = False
        for robot, mode in enumerate(self.modes):
            if mode is Mode.STOPPED:
                self._enter(robot, Mode.HANDING_BACK, now, "release")

    def step(self, now: float) -> None:
        """Let alarmed robots go back or wait, and assign idle operators to waiting robots."""
        for robot, mode in enumerate(self.modes):
            if mode is Mode.HOLDING:
                self._enter(robot, Mode.REWINDING if self._rewinds[robot] else Mode.WAITING, now)
        idle = [name for name, assigned in self._operators.items() if assigned and self.robot_of(name) is None]
        for robot, name in zip(self.queue, idle, strict=False):
            self.take_over(robot, name, now)

    def _open(self, robot: int, now: float, reason: str) -> Request:
        self._count += 1
        request = self.requests[robot] = Request(self._count, robot, reason, now)
        return request

    def _close(self, robot: int, now: float) -> None:
        if (request := self.requests[robot]) is not None:
            request.ended, self.requests[robot] = now, None
            self.finished.append(request)

    def _enter(self, robot: int, mode: Mode, now: float, reason: str = "") -> bool:
        before, self.modes[robot] = self.modes[robot], mode
        self.events.append(Event(now, robot, before, mode, self.operator_of(robot), reason))
        return True
