"""A policy that operators correct when an alarm calls them, as an actor for recording (`AssistedPolicy`).

By default there is an operator for every row, and control never returns to the policy: the operator recovers (with
`recover_steps`), corrects, and the episode ends (RaC, Hu et al. 2025, arXiv:2509.07953). With fewer operators rows wait
in a queue, and with `operator_steps` control goes back to the policy (ARMADA, arXiv:2510.02298). Axes: B row, A action
dimension.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from robopolicy.core.arrays import Array, integers
from robopolicy.core.errors import DataError
from robopolicy.core.origin import prefix_errors
from robopolicy.core.player import PlayedStep, PolicyActor
from robopolicy.core.policy import Policy
from robopolicy.core.spec import IMAGE_PREFIX, Observation, WorldSpec, require_fit
from robopolicy.core.world import Rows
from robopolicy.data.configuration import CorrectConfig
from robopolicy.data.lerobot_format import read_dataset
from robopolicy.operators.alarms import Alarm, Alarms, counting_alarms
from robopolicy.operators.assistance import Turn, assisted
from robopolicy.operators.operator import Operator
from robopolicy.operators.recovery import FamiliarStates, RecoveringOperator
from robopolicy.operators.shared_control import Mode


class AssistedPolicy:
    """A policy with operators, as an actor with single control steps; `watch` reports the results of each to it.

    policy: executes its chunks as usual; operator: acts for all rows that were taken over; generator: random generator
    of the policy's noise; alarms: in addition to those of the config. Raises ConfigError if actions to be undone have
    no finite range, SpecError if policy and world do not fit.
    """

    def __init__(
        self,
        spec: WorldSpec,
        rows: int,
        policy: Policy,
        operator: Operator,
        config: CorrectConfig,
        generator: torch.Generator,
        alarms: Sequence[Alarm] = (),
    ):
        with prefix_errors(policy):
            require_fit(policy.spec, spec)
        self.policy = PolicyActor(policy, generator)
        self.alarms = Alarms([*counting_alarms(config, rows), *alarms], rows)
        self.assistance = assisted(config, spec.action, rows, operator)
        self._chunk = np.zeros((rows, policy.spec.chunk, spec.action.size))
        self._place = np.zeros(rows, dtype=np.int64)  # of the control step in its chunk

    def reset(self, rows: Rows = None) -> None:
        """Clear the memory of `rows` [R] (None: all)."""
        self.policy.reset(rows)
        index = self._index(rows)
        self._place[index], self.alarms.live[index] = 0, False

    def begin(self, seeds: Array, rows: Rows = None) -> None:
        """Start the episodes with `seeds` [R] in `rows` [R] (None: all), with the policy in control."""
        index = self._index(rows)
        self.policy.begin(seeds, rows)
        self.assistance.start(seeds, index)
        self.alarms.start(index, seeds)

    def _index(self, rows: Rows) -> Array:
        return np.arange(len(self._place)) if rows is None else np.asarray(rows)

    def choose(self, observation: Observation) -> tuple[Array, Turn]:
        """Return the next control step of every row, [B, 1, A], and its actor and segment."""
        moving = np.isin(self.assistance.modes, (Mode.AUTONOMOUS, Mode.OPERATED))
        self.alarms.decide(observation, np.flatnonzero((self._place == 0) & moving))
        acting, resumed = self.assistance.next(self.alarms.raised())
        if resumed.any():
            self._place[resumed] = 0
            self.alarms.resume(np.flatnonzero(resumed))
        if (deciding := acting & (self._place == 0)).any():
            self._chunk[deciding] = self.policy.choose(observation, deciding)[0][deciding]
        planned_actions = self._chunk[np.arange(len(self._place)), self._place]
        actions, turn = self.assistance.actions(observation, planned_actions)
        self._place = (self._place + 1) % self._chunk.shape[1]
        return actions[:, None], turn

    def watch(self, played: PlayedStep[Any]) -> None:
        """Take the results of the last control step."""
        step = played.step
        self.alarms.watch(step.reward[:, 0], played.info.actor, played.running, step.ended)
        if played.ended.any():
            self.assistance.end(np.flatnonzero(played.ended))


def with_recovery(
    operator: Operator, controller: object, config: CorrectConfig, spec: WorldSpec, rows: int
) -> RecoveringOperator:
    """Return the operator, before whose corrections `controller` goes back, for at most `config.recover_steps`.

    Raises ConfigError for a controller that cannot go back, DataError for demonstrations without fields of the world.
    """
    keys = tuple(key for key in spec.observation if not key.startswith(IMAGE_PREFIX))
    familiar = None
    if config.recover_data is not None:
        episodes = read_dataset(config.recover_data, cameras=())
        if missing_keys := [key for key in keys if key not in episodes.observation]:
            raise DataError(f"collect.correct.recover_data={config.recover_data} lacks '{missing_keys[0]}'.")
        frames = torch.cat([episodes.observation[key].flatten(1) for key in keys], 1)
        familiar = FamiliarStates([each.numpy() for each in frames.split(integers(episodes.lengths + 1))])
    return RecoveringOperator(operator, controller, rows, config.recover_steps, familiar, keys)
