"""Rows of a batch under shared control (`Assistance`): whose action each row executes in every control step.

    turns = assistance.next(observation, alarmed)       # who acts now; operators take over and hand back
    ...                                                 # the policy decides for turns.policy
    actions, turn = assistance.actions(observation, policy_actions)

Used by `collect` (data/corrections.py) and `drive` (serving/drive.py). Axes: B row, R selected rows, A action.
"""

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from robopolicy.client.executed import ActingAgent, Segment
from robopolicy.core.arrays import Array
from robopolicy.core.errors import ConfigError
from robopolicy.core.spec import Field, Observation
from robopolicy.operators.axes import AxesOperator
from robopolicy.operators.configuration import AssistConfig
from robopolicy.operators.operator import Operator
from robopolicy.operators.paths import Paths
from robopolicy.operators.recovery import RecoveringOperator
from robopolicy.operators.shared_control import Mode, SharedControl


@dataclass(frozen=True)
class Turn:
    """Actor and kind of segment of every row's action: [B] int64 each."""

    actor: Array
    segment: Array


class Team:
    """Robots and operators: the state machine, the operators by name, and the lock under which threads use both.

    operators: in the order in which they are assigned; one scripted operator may have several names. clock: times of
    the log; counts calls of `tick` by default. now: time of the last one.
    """

    def __init__(self, robots: int, operators: Mapping[str, Operator], clock: Callable[[], float] | None = None):
        self.control = SharedControl(robots, operators)
        self.operators = dict(operators)
        self.lock = threading.RLock()
        self.now = 0.0
        ticks = itertools.count()
        self._clock = (lambda: float(next(ticks))) if clock is None else clock

    def tick(self) -> float:
        """Return the present time, and remember it as `now`."""
        self.now = self._clock()
        return self.now

    def close(self) -> None:
        """Release the operators' devices."""
        for operator in dict.fromkeys(self.operators.values()):
            operator.close()


class Assistance(Team):
    """Shared control of the rows of a batch.

    operators, clock: see `Team`; rewind: control steps that a row goes back after an alarm; adaptive: unless the alarm
    knows better; turn: control steps after which an operator hands back, 0 for when the operator says so.
    """

    def __init__(
        self,
        action: Field,
        rows: int,
        operators: Mapping[str, Operator],
        *,
        rewind: int = 0,
        adaptive: bool = False,
        turn: int = 0,
        clock: Callable[[], float] | None = None,
    ):
        super().__init__(rows, operators, clock)
        self.paths = Paths(action, rows, rewinds=rewind > 0 or adaptive)
        self._rewind, self._adaptive = rewind, adaptive
        self._turn = turn
        self._acting: list[str | None] = [None] * rows
        self._steps = np.zeros(rows, dtype=np.int64)

    @property
    def modes(self) -> Array:
        """Modes of the rows, [B] int64."""
        return np.array(self.control.modes, dtype=np.int64)

    def start(self, seeds: Array, rows: Array) -> None:
        """Begin episodes with `seeds` [R] in `rows` [R], with the policy in control."""
        with self.lock:
            for row in rows:
                self.control.reset(int(row), self.now)
                self._acting[row] = None
            self.paths.start(rows)
            all_rows = len(rows) == len(self._acting)
            for operator in dict.fromkeys(self.operators.values()):
                operator.start(seeds, None if all_rows else rows)

    def end(self, rows: Array) -> None:
        """Free the operators of `rows` [R], whose episodes have ended."""
        with self.lock:
            for row in rows:
                self.control.reset(int(row), self.now)

    def next(self, alarms: Sequence[tuple[int, str, int | None]] = ()) -> tuple[Array, Array]:
        """Begin a control step: take alarms (row, reason, steps to go back or None), hand back, assign operators.

        Returns the rows [B] bool in which the policy acts in this step, and those of them that resume now.
        """
        with self.lock:
            control = self.control
            self.tick()
            for row, reason, back in alarms:
                steps = min(back if back is not None and self._adaptive else self._rewind, self.paths.length(row))
                if control.alarm(row, self.now, reason, rewind=steps > 0):
                    self.paths.rewind(row, steps)
            for row, mode in enumerate(control.modes):
                if mode is Mode.REWINDING and self.paths.is_back(row):
                    control.rewound(row, self.now)
                elif mode is Mode.OPERATED and self._is_over(row):
                    control.hand_back(row, self.now)
            control.step(self.now)
            resumed = np.array([mode is Mode.HANDING_BACK for mode in control.modes])
            for row in np.flatnonzero(resumed):
                control.resumed(int(row), self.now)
            self._begin_turns()
            return self.modes == Mode.AUTONOMOUS, resumed

    def _is_over(self, row: int) -> bool:
        """Whether the operator of a row has finished."""
        name = self._acting[row]
        if name is None or name != self.control.operator_of(row):  # just taken over: not begun yet
            return False
        return bool(self._turn and self._steps[row] >= self._turn) or bool(
            self.operators[name].finished(np.array([row]))[0]
        )

    def _begin_turns(self) -> None:
        """Let operators begin with the rows that they have taken over."""
        new_rows: dict[Operator, list[int]] = {}
        for row in range(len(self._acting)):
            name = self.control.operator_of(row)
            if name is not None and name != self._acting[row]:
                new_rows.setdefault(self.operators[name], []).append(row)
                self._steps[row] = 0
            self._acting[row] = name
        for operator, rows in new_rows.items():
            operator.begin(np.array(rows))

    def actions(self, observation: Observation, policy_actions: Array) -> tuple[Array, Turn]:
        """Return this control step of every row [B, A], and who acts; policy_actions: the policy's own, [B, A]."""
        with self.lock:
            modes, actions = self.modes, np.array(policy_actions, dtype=np.float64)
            actor = np.full(len(modes), ActingAgent.NOBODY, dtype=np.int64)
            segment = np.full(len(modes), Segment.AUTONOMOUS, dtype=np.int64)
            actor[modes == Mode.AUTONOMOUS] = ActingAgent.POLICY
            for row in np.flatnonzero(modes != Mode.AUTONOMOUS):
                actions[row] = self.paths.still(row)
            for operator, rows in self._operated().items():
                operator_actions = np.asarray(
                    operator.act(observation, rows, np.stack([self.paths.last(row) for row in rows]))
                )
                given_mask = np.isfinite(operator_actions).all(1)
                actions[rows[given_mask]] = operator_actions[given_mask]
                actor[rows[given_mask]] = operator.agent
                segment[rows[given_mask]] = Segment.CORRECT
                if isinstance(operator, RecoveringOperator):
                    segment[rows[given_mask & operator.recovers(rows)]] = Segment.RECOVER
                self._steps[rows] += 1
            for row in np.flatnonzero(modes == Mode.REWINDING):
                actions[row] = self.paths.undo(row)
                actor[row], segment[row] = ActingAgent.SCRIPT, Segment.RECOVER
            forward = np.flatnonzero(modes != Mode.REWINDING)  # what is undone is no way to go back along
            self.paths.add(actions[forward], forward)
            return actions, Turn(actor, segment)

    def _operated(self) -> dict[Operator, Array]:
        """Return the rows [R] that each operator operates."""
        operated: dict[Operator, list[int]] = {}
        for row, name in enumerate(self._acting):
            if name is not None and self.control.operator_of(row) == name:
                operated.setdefault(self.operators[name], []).append(row)
        return {operator: np.array(rows) for operator, rows in operated.items()}


def assisted(
    config: AssistConfig,
    action: Field,
    rows: int,
    operator: Operator | None,
    clock: Callable[[], float] | None = None,
) -> Assistance:
    """Return the shared control of rows [B] with `config.operators` operators (0: one per row), who are all `operator`.

    operator: None for none but those who join later; clock: see `Assistance`. Raises ConfigError for an operator who
    cannot act here.
    """
    if isinstance(operator, AxesOperator):
        raise ConfigError("People in a browser need a console: set drive.console.port=8080, and no operator.")
    if operator is not None and operator.agent is ActingAgent.HUMAN and min(config.operators or rows, rows) > 1:
        raise ConfigError(f"'{config.operator}' operates one robot at a time: set operators=1.")
    count = 0 if operator is None else min(config.operators or rows, rows)
    label = "operator" if operator is None else str(operator.agent.name).lower()
    names = [label if count == 1 else f"{label} {number + 1}" for number in range(count)]
    return Assistance(
        action,
        rows,
        {} if operator is None else dict.fromkeys(names, operator),
        rewind=0 if config.rewind == "adaptive" else config.rewind,
        adaptive=config.rewind == "adaptive",
        turn=config.operator_steps,
        clock=clock,
    )
