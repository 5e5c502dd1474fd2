"""Driven robots under shared control: alarms, operators and a console between drivers and robots (`SharedRobots`).

Axes: B robot, H history frame, A action dimension.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from robopolicy.client.driver import Driver
from robopolicy.client.executed import ActingAgent
from robopolicy.client.protocol import FAILURE
from robopolicy.core.arrays import Array, is_mapping
from robopolicy.core.spec import IMAGE_PREFIX, TASK, Observation
from robopolicy.core.world import Renders, Step, World, can_render
from robopolicy.operators.alarms import Alarm, Alarms, ServerAlarm
from robopolicy.operators.assistance import Assistance, Turn
from robopolicy.serving.console.fleet import Fleet

VIEW = "view"
"""Name of the simulator's own view of a robot that has no cameras."""
VIEW_SIZE = 180, 240
"""Height and width of it."""


def frames_of(observation: Observation, row: int) -> dict[str, Any]:
    """Return the newest frames of a row of an observation [B, H, ...], and its instruction."""
    return {key: value[row] if key == TASK else value[row, -1] for key, value in observation.items()}


class SharedRobots:
    """Robots with a driver each, under shared control.

    alarms: in addition to those of the server; fleet: what the console shows, None without one; world: is drawn for
    people where the robots have no cameras.
    """

    def __init__(self, world: World, assistance: Assistance, alarms: Sequence[Alarm] = (), fleet: Fleet | None = None):
        self.assistance, self.fleet = assistance, fleet
        self._server = ServerAlarm(world.batch_size)
        self._alarms = Alarms([self._server, *alarms], world.batch_size)
        self._world: Renders | None = None if world.spec.cameras or not can_render(world) else world
        self._seen: list[object] = [None] * world.batch_size
        self._drawn = 0
        self.turn = Turn(np.zeros(world.batch_size, np.int64), np.zeros(world.batch_size, np.int64))

    def start(self, seeds: Array, count: int) -> None:
        """Begin episodes with `seeds` [B], of which the first `count` run."""
        rows = np.arange(len(seeds))
        self.assistance.start(seeds, rows)
        self._alarms.start(rows, seeds)
        self._alarms.live = rows < count
        if self.fleet is not None:
            for row in range(count):
                self.fleet.begin(row)

    def actions(self, observation: Observation, drivers: Sequence[Driver], running: Array) -> Array:
        """Return every robot's next control step [B, A], zero where `running` [B] is False.

        observation: of all robots [B, H, ...]. Raises a driver's error once its server is away for too long, unless an
        operator or nobody acts.
        """
        self._alarms.live &= running
        acting, resumed = self.assistance.next(self._alarms.raised())
        if resumed.any():
            self._alarms.resume(np.flatnonzero(resumed))
        rows = np.flatnonzero(running)
        for row in rows:
            drivers[row].look(frames_of(observation, row), ask=bool(acting[row]))
        planned_actions = np.zeros((len(drivers), *drivers[0].policy.shape))
        for row in rows[acting[rows]]:
            planned_actions[row] = drivers[row].act()
            drivers[row].require_server()
        actions, self.turn = self.assistance.actions(observation, planned_actions)
        for row in rows:
            if not acting[row]:
                by = {"actor": int(self.turn.actor[row]), "segment": int(self.turn.segment[row])}
                still = self.turn.actor[row] == ActingAgent.NOBODY
                operator = self.assistance.control.operator_of(row) or ""
                actions[row] = drivers[row].override(None if still else actions[row], operator=operator, **by)
            self._read(row, drivers[row], observation, actions[row])
        actions[~running] = 0.0
        return actions

    def _read(self, row: int, driver: Driver, observation: Observation, action: Array) -> None:
        """Take what the server's last answer to a robot says, and show it on the console."""
        answer, seconds = driver.answer
        index: dict[str, float] = {}
        alarms: tuple[str, ...] = ()
        failure = answer.get(FAILURE)
        if is_mapping(failure):
            alarms = tuple(map(str, failure.get("alarms", ())))
            if answer is not self._seen[row]:
                index = {str(name): float(value) for name, value in dict(failure.get("index", {})).items()}
                self._server.answered(row, index, alarms)
        self._seen[row] = answer
        if self.fleet is None:
            return
        images = {
            key.removeprefix(IMAGE_PREFIX): value[row, -1]
            for key, value in observation.items()
            if key.startswith(IMAGE_PREFIX)
        }
        if self.fleet.watched and self._world is not None and row == self._drawn % len(self._seen):
            images = {VIEW: self._world.render([row], None, *VIEW_SIZE)[0]}
        latency = None if seconds is None else 1000 * seconds
        self.fleet.show(
            row, images=images, plan=driver.plan, action=action, index=index, alarms=alarms, latency_ms=latency
        )

    def watch(self, step: Step, running: Array) -> None:
        """Take the results of a control step; running: [B] bool, rows that ran in it."""
        rewards = step.reward[:, 0] if step.rewards else np.zeros(len(running))
        self._alarms.watch(rewards, self.turn.actor, running, step.ended)
        self._drawn += 1
        if (ended := np.flatnonzero(running & step.ended)).size:
            self.assistance.end(ended)

    def figures(self) -> dict[str, float | int | None]:
        """Return the number of requests, of takeovers, and the mean wait for an operator, in the clock's unit."""
        requests = self.assistance.control.finished
        waits = [each.waited for each in requests if each.waited is not None]
        return {
            "requests": len(requests),
            "takeovers": len(waits),
            "mean_wait": float(np.mean(waits)) if waits else None,
        }
