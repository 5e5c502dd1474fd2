"""Scripted interventions: an expert takes over when the policy is stuck, recovers, corrects, and the episode ends.

Follows the RaC protocol (Hu et al. 2025, arXiv:2509.07953): recover to familiar states, then correct, then end the
episode; control never returns to the policy. A scripted expert replaces the human: it detects missing progress in
reward, undoes the last actions, and finishes the task. Axes: B row, A action dimension.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from robopolicy.core.arrays import Array
from robopolicy.core.errors import ConfigError
from robopolicy.core.interventions import ActingAgent, Segment
from robopolicy.core.origin import prefix_errors
from robopolicy.core.player import PlayedStep, PolicyActor
from robopolicy.core.policy import Policy
from robopolicy.core.spec import Field, Observation, WorldSpec, require_fit
from robopolicy.core.world import Controller, Rows, begin_episodes
from robopolicy.data.configuration import CorrectConfig

PROGRESS = 1e-3
"""Minimum increase of the summed reward over its best so far that counts as progress."""


@dataclass(frozen=True)
class Turn:
    """Actor and kind of segment of every row's action: [B] int64 each."""

    actor: Array
    segment: Array


class Operator:
    """A policy corrected by a controller, as an actor with single control steps; `watch` reports the rewards to it.

    policy: executes its chunks as usual; expert: corrects, starting with cleared memory; generator: random generator of
    the policy's noise. Raises ConfigError if actions to be undone have no finite range, SpecError if policy and world
    do not fit.
    """

    def __init__(
        self,
        spec: WorldSpec,
        rows: int,
        policy: Policy,
        expert: Controller,
        config: CorrectConfig,
        generator: torch.Generator,
    ):
        with prefix_errors(policy):
            require_fit(policy.spec, spec)
        self.policy = PolicyActor(policy, generator)
        self.expert = expert
        self.config = config
        self._middle, self._kept = _undoing(spec.action, config.rewind)
        self._chunk = np.zeros((rows, policy.spec.chunk, spec.action.size))
        self._done = np.zeros((rows, spec.horizon, spec.action.size))
        self._time, self._undone, self._idle, self._seeds = (np.zeros(rows, np.int64) for _ in range(4))
        self._taken = np.full(rows, -1)  # the control step at which the operator took over, -1 before
        self._earned, self._best = np.zeros(rows), np.zeros(rows)

    def reset(self, rows: Rows = None) -> None:
        """Start new episodes in `rows` [R] (None: all), with the policy in control."""
        index = np.arange(len(self._time)) if rows is None else np.asarray(rows)
        for values in (self._time, self._undone, self._idle, self._earned, self._best):
            values[index] = 0
        self._taken[index] = -1
        self.policy.reset(rows)
        self.expert.reset(rows)

    def begin(self, seeds: Array, rows: Rows = None) -> None:
        """Pass the seeds [R] of the episodes in `rows` [R] (None: all) to policy and expert."""
        self._seeds[slice(None) if rows is None else np.asarray(rows)] = seeds
        self.policy.begin(seeds, rows)
        begin_episodes(self.expert, seeds, rows)

    def choose(self, observation: Observation) -> tuple[Array, Turn]:
        """Return the next control step of every row, [B, 1, A], and its actor and segment."""
        config, rows = self.config, np.arange(len(self._time))
        stuck = np.zeros(len(rows), bool)
        if config.no_progress_steps:
            stuck |= self._idle >= config.no_progress_steps
        if config.max_policy_steps:
            stuck |= self._time >= config.max_policy_steps
        new = (self._taken < 0) & stuck
        self._taken[new] = self._time[new]
        taken_over = self._taken >= 0
        back = taken_over & (self._undone < np.minimum(config.rewind, self._taken))
        place = self._time % self._chunk.shape[1]
        if (new_chunks := ~taken_over & (place == 0)).any():
            self._chunk[new_chunks] = self.policy.choose(observation, new_chunks)[0][new_chunks]
        actions = self._chunk[rows, place]
        if back.any():
            # A row that has ended counts on until it is given another episode.
            undo_step = np.clip(self._taken - 1 - self._undone, 0, self._done.shape[1] - 1)
            before = self._done[rows, undo_step]
            actions = np.where(back[:, None], np.where(self._kept, before, 2 * self._middle - before), actions)
            self._undone[back] += 1
        if (forward := taken_over & ~back).any():
            began = forward & (self._time == self._taken + self._undone)
            if began.any():
                index = began.nonzero()[0]
                self.expert.reset(index)
                begin_episodes(self.expert, self._seeds[index], index)  # until now it was asked for other rows alone
            actions = np.where(forward[:, None], np.asarray(self.expert.act(observation), np.float64), actions)
        self._done[rows, np.minimum(self._time, self._done.shape[1] - 1)] = actions
        self._time += 1
        segment = np.where(back, Segment.RECOVER, np.where(forward, Segment.CORRECT, Segment.AUTONOMOUS))
        return actions[:, None], Turn(np.where(taken_over, ActingAgent.SCRIPT, ActingAgent.POLICY), segment)

    def watch(self, played: PlayedStep[Any]) -> None:
        """Record the rewards of the last control step."""
        self._earned += np.where(played.running, played.step.reward[:, 0], 0.0)
        better = self._earned > self._best + PROGRESS
        self._best = np.where(better, self._earned, self._best)
        self._idle = np.where(better, 0, self._idle + 1)


def _undoing(action: Field, rewind: int) -> tuple[Array, Array]:
    """Return the midpoint of the action range [A] and the mask [A] bool of elements that are repeated (grippers)."""
    low, high = (np.broadcast_to(np.asarray(bound, np.float64), action.shape) for bound in (action.low, action.high))
    middle = (low + high) / 2
    if rewind and not np.isfinite(middle).all():
        raise ConfigError(
            "Undoing actions mirrors them in the middle of their range, but these actions are unbounded: set "
            "collect.correct.rewind=0."
        )
    names = action.names or ("",) * action.size
    return middle, np.array(["gripper" in name for name in names])
