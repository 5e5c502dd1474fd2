"""A world in which operators take a policy's robots over, for learning online with interventions (`OperatedWorld`).

Whoever plays it sends whole action chunks; where an alarm has called an operator, what the operator does in each
control step is executed instead (after HIL-SERL, Luo et al. 2024, arXiv:2410.21845). Axes: B row, R selected rows, C
chunk step, A action dimension.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from robopolicy.client.executed import ActingAgent
from robopolicy.core.arrays import Array
from robopolicy.core.errors import SpecError
from robopolicy.core.spec import Observation, validate_actions
from robopolicy.core.world import Rows, Step, World
from robopolicy.core.wrapped_world import WrappedWorld, join_steps
from robopolicy.operators.alarms import Alarms, counting_alarms
from robopolicy.operators.assistance import assisted
from robopolicy.operators.configuration import AssistConfig
from robopolicy.operators.operator import Operator


class OperatedWorld(WrappedWorld):
    """`world` with operators, who are called as `config` says and act control step by control step.

    executed: [B, C, A], the last chunk as it was executed; operated: [B, C] bool, its steps in which an operator acted.
    A robot that waits for an operator holds still. A policy that gets its robot back goes on with the present chunk.
    """

    def __init__(self, world: World, operator: Operator, config: AssistConfig):
        super().__init__(world, world.spec)
        rows = world.batch_size
        self.assistance = assisted(config, world.spec.action, rows, operator)
        self.alarms = Alarms(counting_alarms(config, rows), rows)
        self.executed = np.zeros((rows, 0, world.spec.action.size))
        self.operated = np.zeros((rows, 0), dtype=bool)
        self._observation: Observation = {}

    def reset(
        self, rows: Rows = None, seeds: Sequence[int] | Array | None = None, options: Mapping[str, Any] | None = None
    ) -> Observation:
        """Start new episodes in `rows` [R] with the policy in control; raises SpecError without seeds."""
        if seeds is None:
            raise SpecError("Episodes with operators need seeds, from which their alarms follow.")
        index = np.arange(self.batch_size) if rows is None else np.asarray(rows)
        self._observation = self.world.reset(rows, seeds, options)
        self.assistance.start(np.asarray(seeds), index)
        self.alarms.start(index, np.asarray(seeds))
        self.alarms.live[index] = False
        return self._observation

    def step(self, actions: Array) -> Step:
        """Execute a chunk [B, C, A], or what operators do instead; raises as the world does."""
        actions = np.asarray(actions, dtype=np.float64)
        validate_actions(actions, self.spec.action, self.batch_size)
        self.executed = actions.copy()
        self.operated = np.zeros(actions.shape[:2], dtype=bool)
        steps: list[Step] = []
        for place in range(actions.shape[1]):
            _, resumed = self.assistance.next(self.alarms.raised())
            if resumed.any():
                self.alarms.resume(np.flatnonzero(resumed))
            self.executed[:, place], turn = self.assistance.actions(self._observation, actions[:, place])
            step = self.world.step(self.executed[:, place : place + 1])
            running = step.valid[:, 0]
            self.operated[:, place] = running & np.isin(turn.actor, (ActingAgent.HUMAN, ActingAgent.SCRIPT))
            self.alarms.watch(step.reward[:, 0], turn.actor, running, step.ended)
            if (ended := running & step.ended).any():
                self.assistance.end(np.flatnonzero(ended))
            self._observation = step.observation
            steps.append(step)
        return join_steps(steps)

    def close(self) -> None:
        """Close the world and release the operators' devices."""
        self.assistance.close()
        super().close()
