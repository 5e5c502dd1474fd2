"""Alarms that call an operator (`Alarm`): missing progress, a budget, chance, a policy server's detectors.

Detectors of a policy in this process are in `failures.alarms`. Axes: B row, R selected rows, H history frame.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from robopolicy.client.executed import ActingAgent
from robopolicy.core.arrays import Array
from robopolicy.core.spec import Observation
from robopolicy.operators.configuration import AssistConfig

PROGRESS = 1e-3
"""Minimum increase of the summed reward over its best so far that counts as progress."""


class Alarm(Protocol):
    """Watches rows while their policy acts. name: reason of the request; reads_decisions: whether `decide` does it."""

    name: str
    reads_decisions: bool

    def start(self, rows: Array, seeds: Array) -> None:
        """New episodes with `seeds` [R] begin in `rows` [R]."""
        ...

    def resume(self, rows: Array) -> None:
        """The policy acts again in `rows` [R], after an operator."""
        ...

    def decide(self, observation: Observation, rows: Array) -> None:
        """A decision is due in `rows` [R], whoever acts; observation: of all rows [B, H, ...]."""
        ...

    def step(self, rewards: Array, policy: Array) -> None:
        """A control step gave `rewards` [B]; policy: [B] bool, rows in which the policy acted."""
        ...

    def raised(self) -> Array:
        """Return the mask of rows that need an operator, [B] bool."""
        ...

    def steps_back(self, row: int) -> int | None:
        """Return the control steps by which to go back to usual states, None if unknown."""
        ...


class CountingAlarm:
    """An `Alarm` that counts control steps of rows [B]."""

    name = ""
    reads_decisions = False

    def __init__(self, rows: int):
        self.count = np.zeros(rows, dtype=np.int64)

    def start(self, rows: Array, seeds: Array) -> None:
        """Implement `Alarm.start`."""
        self.resume(rows)

    def resume(self, rows: Array) -> None:
        """Implement `Alarm.resume`."""
        self.count[rows] = 0

    def decide(self, observation: Observation, rows: Array) -> None:
        """Implement `Alarm.decide`."""

    def step(self, rewards: Array, policy: Array) -> None:
        """Implement `Alarm.step`."""
        self.count += policy

    def raised(self) -> Array:
        """Implement `Alarm.raised`."""
        raise NotImplementedError

    def steps_back(self, row: int) -> int | None:
        """Implement `Alarm.steps_back`."""
        return None


class BudgetAlarm(CountingAlarm):
    """Alarm after `steps` control steps of the policy in one turn."""

    name = "budget"

    def __init__(self, rows: int, steps: int):
        super().__init__(rows)
        self.steps = steps

    def raised(self) -> Array:
        """Implement `Alarm.raised`."""
        return self.count >= self.steps


class ProgressAlarm(BudgetAlarm):
    """Alarm after `steps` control steps without a new maximum of the summed reward."""

    name = "no progress"

    def __init__(self, rows: int, steps: int):
        super().__init__(rows, steps)
        self._earned, self._best = np.zeros(rows), np.zeros(rows)

    def start(self, rows: Array, seeds: Array) -> None:
        """Implement `Alarm.start`."""
        super().start(rows, seeds)
        self._earned[rows] = self._best[rows] = 0.0

    def step(self, rewards: Array, policy: Array) -> None:
        """Implement `Alarm.step`."""
        self._earned += rewards
        better = self._earned > self._best + PROGRESS
        self._best = np.where(better, self._earned, self._best)
        self.count = np.where(better, 0, self.count + policy)


class RandomAlarm(CountingAlarm):
    """Alarm with a probability of `rate` per control step of the policy, drawn from the episode's seed."""

    name = "random"

    def __init__(self, rows: int, rate: float):
        super().__init__(rows)
        self.rate = rate
        self._draws = [np.random.default_rng(row) for row in range(rows)]
        self._due = np.zeros(rows, dtype=np.int64)
        self.resume(np.arange(rows))

    def start(self, rows: Array, seeds: Array) -> None:
        """Implement `Alarm.start`."""
        for row, seed in zip(rows, seeds, strict=True):
            self._draws[row] = np.random.default_rng(int(seed))
        self.resume(rows)

    def resume(self, rows: Array) -> None:
        """Implement `Alarm.resume`."""
        super().resume(rows)
        for row in rows:
            self._due[row] = self._draws[row].geometric(self.rate)

    def raised(self) -> Array:
        """Implement `Alarm.raised`."""
        return self.count >= self._due


class ServerAlarm:
    """`Alarm` of the failure detectors of the policy server, as its answers contain them.

    The server's alarms last for an episode. After a turn of an operator, a robot asks again once an index has increased
    since then by as much as it was at the first alarm.
    """

    name = "detector"
    reads_decisions = False

    def __init__(self, robots: int):
        self._index: list[dict[str, float]] = [{} for _ in range(robots)]
        self._alarmed: list[tuple[str, ...]] = [()] * robots
        self._base: list[dict[str, float]] = [{} for _ in range(robots)]
        self._level: list[dict[str, float]] = [{} for _ in range(robots)]

    def start(self, rows: Array, seeds: Array) -> None:
        """Implement `Alarm.start`."""
        for row in rows:
            self._index[row], self._alarmed[row] = {}, ()
            self._base[row], self._level[row] = {}, {}

    def resume(self, rows: Array) -> None:
        """Implement `Alarm.resume`."""
        for row in rows:
            self._base[row] = {name: self._index[row].get(name, 0.0) for name in self._alarmed[row]}

    def decide(self, observation: Observation, rows: Array) -> None:
        """Implement `Alarm.decide`."""

    def step(self, rewards: Array, policy: Array) -> None:
        """Implement `Alarm.step`."""

    def answered(self, row: int, index: dict[str, float], alarms: tuple[str, ...]) -> None:
        """Take what the server's detectors say about a robot's last decision."""
        self._index[row], self._alarmed[row] = index, alarms
        for name in alarms:
            self._level[row].setdefault(name, index.get(name, 0.0))

    def raised(self) -> Array:
        """Implement `Alarm.raised`."""
        return np.array(
            [
                any(name not in base or index.get(name, 0.0) - base[name] > max(level[name], 0.0) for name in alarmed)
                for alarmed, index, base, level in zip(self._alarmed, self._index, self._base, self._level, strict=True)
            ]
        )

    def steps_back(self, row: int) -> int | None:
        """Implement `Alarm.steps_back`."""
        return None


def counting_alarms(config: AssistConfig, rows: int) -> list[Alarm]:
    """Return the alarms of a config that need neither detector nor server."""
    alarms: list[Alarm] = []
    if config.no_progress_steps:
        alarms.append(ProgressAlarm(rows, config.no_progress_steps))
    if config.max_policy_steps:
        alarms.append(BudgetAlarm(rows, config.max_policy_steps))
    if config.random_rate:
        alarms.append(RandomAlarm(rows, config.random_rate))
    return alarms


class Alarms:
    """Several alarms of rows [B]. live: [B] bool, rows that ran in the last control step; only their alarms count."""

    def __init__(self, alarms: Sequence[Alarm], rows: int):
        self._alarms = alarms
        self.live = np.zeros(rows, dtype=bool)

    def start(self, rows: Array, seeds: Array) -> None:
        """Begin episodes with `seeds` [R] in `rows` [R]."""
        for alarm in self._alarms:
            alarm.start(rows, seeds)

    def resume(self, rows: Array) -> None:
        """Let the policy act again in `rows` [R], after an operator."""
        for alarm in self._alarms:
            alarm.resume(rows)

    def decide(self, observation: Observation, rows: Array) -> None:
        """Show those that read decisions an observation [B, H, ...] from which a decision is due in `rows` [R]."""
        for alarm in self._alarms:
            if alarm.reads_decisions and len(rows):
                alarm.decide(observation, rows)

    def watch(self, rewards: Array, actor: Array, running: Array, ended: Array) -> None:
        """Take a control step, [B] each: rewards, who acted, rows that ran in it, and those whose episode ended."""
        for alarm in self._alarms:
            alarm.step(np.where(running, rewards, 0.0), running & (actor == ActingAgent.POLICY))
        self.live = running & ~ended

    def raised(self) -> list[tuple[int, str, int | None]]:
        """Return row, reason and steps to go back (None if unknown) of every alarm in live rows."""
        return [
            (int(row), alarm.name, alarm.steps_back(int(row)))
            for alarm in self._alarms
            for row in np.flatnonzero(alarm.raised() & self.live)
        ]
