"""Rollout loop (`Player`): the one loop in which an actor acts in a world, for collecting, recording, evaluating and
serving.

    player = Player(world, actor_of(policy, EpisodeGenerator(seed)))
    player.start(seeds)
    for played in player:
        ...  # keep what is wanted of played.step; where played.chunk_done, rows that ended may go on:
        player.start(more_seeds, rows=np.flatnonzero(played.ended))

Ended rows stay idle unless the loop body starts another episode in them. Axes: B row, C chunk step, A action dimension.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.arrays import Array
from robopolicy.core.errors import SpecError
from robopolicy.core.former_names import FormerName, keep_former_names
from robopolicy.core.history import newest_window
from robopolicy.core.origin import prefix_errors
from robopolicy.core.policy import Decision, Policy, ResumesDecision, TensorObservation, is_policy, to_tensors
from robopolicy.core.randomness import EpisodeGenerator
from robopolicy.core.spec import Observation, check_finite, require_fit, validate_observation
from robopolicy.core.world import Controller, Rows, Snapshot, Snapshots, Step, World, begin_episodes


@runtime_checkable
class Actor[Info](Protocol):
    """Maps a world's observation to action chunks and returns details of the policy call."""

    def reset(self, rows: Rows = None) -> None:
        """Clear the memory of `rows` [R]; None clears all rows."""
        ...

    def choose(self, observation: Observation) -> tuple[Array, Info]:
        """Return the next chunk of every row, [B, C, A] in world units, and details of the policy call."""
        ...


@dataclass(frozen=True)
class PolicyOutput:
    """A policy's `Decision` and the observation tensors [B, H, ...] that it was computed from."""

    seen: TensorObservation
    decision: Decision


class PolicyActor:
    """Adapts a policy to `Actor`.

    generator: random generator for the policy's noise, on its compute device; with an `EpisodeGenerator` every row
    draws the numbers of its episode, with any other the batch draws jointly; deterministic: no exploration noise (a
    denoising policy's initial noise remains); scored: also require finite log-probabilities. kept: set before a
    decision to resume it from: latents [B, ...] and the number of their steps to keep per row [B], for a policy that
    `ResumesDecision`.
    """

    def __init__(
        self, policy: Policy, generator: torch.Generator, *, deterministic: bool = False, scored: bool = False
    ):
        self.policy, self.generator = policy, generator
        self.deterministic, self.scored = deterministic, scored
        self.kept: tuple[Mapping[str, Tensor], Tensor] | None = None

    def reset(self, rows: Rows = None) -> None:
        """Clear the policy's memory of `rows` [R]; None clears all rows."""
        self.policy.reset(rows)

    def begin(self, seeds: Array, rows: Rows = None) -> None:
        """Use the noise of episodes with `seeds` [R] in `rows` [R] (None: all)."""
        if isinstance(self.generator, EpisodeGenerator):
            self.generator.begin(seeds, rows)

    def choose(self, observation: Observation, rows: Array | None = None) -> tuple[Array, PolicyOutput]:
        """Return the next chunk [B, C, A] float64 and the `Decision`.

        rows: rows that make a decision, [B] bool or indices; the noise of the others does not advance. None: all.
        Raises SpecError and NonFiniteError on an observation that does not match the spec, NonFiniteError on a
        non-finite decision.
        """
        spec = self.policy.spec
        observation = newest_window(observation, spec.observation, spec.history)
        validate_observation(observation, spec.observation, history=spec.history)
        tensors = to_tensors(observation, self.generator.device)
        generator = self.generator
        with generator.decision(rows) if isinstance(generator, EpisodeGenerator) else nullcontext():
            if self.kept is not None and isinstance(self.policy, ResumesDecision):
                decision = self.policy.resume(tensors, *self.kept, generator)
            else:
                decision = self.policy.act(tensors, generator, deterministic=self.deterministic)
        check_finite("actions", decision.actions)
        if self.scored:
            check_finite("log-probabilities", decision.logp)
        actions = cast(Array, decision.actions.detach().cpu().numpy())  # pyright: ignore[reportUnknownMemberType]
        return actions.astype(np.float64), PolicyOutput(tensors, decision)


class RunningRows:
    """Actor that asks a policy without memory for the rows of a player that are running, not for those that have ended.

    Their number is halved as often as the running ones allow, and ended rows fill it up: policies meet few different
    batch sizes. Its details of a decision are None. actor: draws from an `EpisodeGenerator`.
    """

    def __init__(self, actor: PolicyActor, player: "Player[Any]"):
        self.actor, self.player = actor, player

    def reset(self, rows: Rows = None) -> None:
        """Clear the policy's memory of `rows` [R]; None clears all rows."""
        self.actor.reset(rows)

    def begin(self, seeds: Array, rows: Rows = None) -> None:
        """Use the noise of episodes with `seeds` [R] in `rows` [R] (None: all)."""
        self.actor.begin(seeds, rows)

    def choose(self, observation: Observation) -> tuple[Array, None]:
        """Return the next chunk [B, C, A] float64, zero in rows that were not asked; raises as `PolicyActor.choose`."""
        running = self.player.running
        count = size = len(running)
        while size // 2 >= max(1, running.sum()):
            size //= 2
        rows = np.sort(np.argsort(~running, kind="stable")[:size])
        generator = self.actor.generator
        assert isinstance(generator, EpisodeGenerator)
        with generator.only(rows):
            chosen, _ = self.actor.choose({key: value[rows] for key, value in observation.items()})
        actions = np.zeros((count, *chosen.shape[1:]))
        actions[rows] = chosen
        return actions, None


class ControllerActor:
    """Adapts a controller to `Actor`, with chunks of one step. A controller that draws random numbers may define
    `begin`: see `BeginsEpisodes`.
    """

    def __init__(self, controller: Controller):
        self.controller = controller

    def reset(self, rows: Rows = None) -> None:
        """Clear the controller's memory of `rows` [R]; None clears all rows."""
        self.controller.reset(rows)

    def begin(self, seeds: Array, rows: Rows = None) -> None:
        """Pass the seeds [R] of the episodes in `rows` [R] to the controller, if it accepts them."""
        begin_episodes(self.controller, seeds, rows)

    def choose(self, observation: Observation) -> tuple[Array, None]:
        """Return the next control step as a chunk, [B, 1, A] float64."""
        return np.asarray(self.controller.act(observation), dtype=np.float64)[:, None], None


def actor_of(
    actor: Policy | Controller | Actor[None], generator: torch.Generator, *, deterministic: bool = False
) -> Actor[PolicyOutput] | Actor[None]:
    """Wrap a policy (see `PolicyActor`) or a controller (which ignores the generator) as an actor; actors are returned
    unchanged.
    """
    if isinstance(actor, Actor):
        return actor
    if is_policy(actor):
        return PolicyActor(actor, generator, deterministic=deterministic)
    return ControllerActor(actor)


@dataclass(frozen=True)
class PlayedStep[Info]:
    """Result of one call of the world's `step`.

    info: the actor's details of its decision; actions: [B, c, A] as passed to the world; step: result of the actions;
    running: [B] bool, rows that were running; chunk_done: the chunk is finished, or every row has ended, so rows may be
    started.
    """

    info: Info
    actions: Array
    step: Step
    running: Array
    chunk_done: bool

    @property
    def ended(self) -> Array:
        """[B] bool: rows whose episode ended in this step."""
        return self.running & self.step.ended


class Player[Info]:
    """Runs an actor in a world; iterate over it until no row is running, or stop earlier.

    actor: may be replaced between two decisions; observation: current observation of rows that are already running,
    None before the first `start`; stepwise: execute chunks one control step at a time, one `PlayedStep` each, instead
    of as a whole. running: [B] bool, rows with a running episode. Raises SpecError if a policy does not fit the world.
    """

    def __init__(
        self,
        world: World,
        actor: Actor[Info],
        observation: Observation | None = None,
        *,
        stepwise: bool = False,
    ):
        _require_fit(actor, world)
        self.world = world
        self.actor = actor
        self.stepwise = stepwise
        self._observation = observation
        self.running = np.full(world.batch_size, observation is not None)

    @property
    def observation(self) -> Observation:
        """Latest observation, key -> [B, H, ...]. Raises SpecError before the first `start`."""
        if self._observation is None:
            raise SpecError("No episode has started: call start() first.")
        return self._observation

    @property
    def started(self) -> bool:
        """Whether there is an observation yet."""
        return self._observation is not None

    def start(
        self,
        seeds: Sequence[int] | Array,
        rows: Sequence[int] | Array | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        count: int | None = None,
    ) -> None:
        """Reset `rows` [R] (None: all) with `seeds` [R] and run them, or only the first `count` of them.

        The first reset must start every row of a world, including unused ones. options: as in `World.reset`.
        """
        self._observation = self.world.reset(rows=rows, seeds=seeds, options=options)
        self.actor.reset(rows)
        begin_episodes(self.actor, np.asarray(seeds), rows)
        self.running = self.running.copy()
        self.running[(np.arange(self.world.batch_size) if rows is None else np.asarray(rows))[:count]] = True

    def start_batch(self, seeds: Array, options: Mapping[str, Any] | None = None) -> None:
        """Reset every row and run one episode per seed, [n <= B]; spare rows reuse the seeds but do not run."""
        self.running = np.zeros(self.world.batch_size, dtype=bool)
        self.start(np.resize(seeds, self.world.batch_size), options=options, count=len(seeds))

    start_wave = FormerName("start_batch")

    def restore(self, world: Snapshots, snapshot: Snapshot, rows: Array) -> None:
        """Resume `rows` [R] from `snapshot`; world: the same world, typed as `Snapshots`."""
        self._observation = world.restore(snapshot, rows)
        self.actor.reset(rows)
        self.running = self.running.copy()
        self.running[rows] = True

    def __iter__(self) -> Iterator[PlayedStep[Info]]:
        while self.running.any():
            yield from self._decide()

    def _decide(self) -> Iterator[PlayedStep[Info]]:
        """Call the policy once and execute its chunk, stopping early when no row is running."""
        actions, info = self.actor.choose(self.observation)
        parts = np.split(actions, actions.shape[1], axis=1) if self.stepwise else [actions]
        for place, part in enumerate(parts):
            running = self.running
            step = self.world.step(part)
            if not step.valid[running].any():
                raise SpecError(
                    f"'{self.world.spec.name}' executed no control step although episodes are still running "
                    "(Step.valid is False everywhere)."
                )
            self._observation, self.running = step.observation, running & ~step.ended
            chunk_done = place + 1 == len(parts) or not self.running.any()
            yield PlayedStep(info, part, step, running, chunk_done)
            if chunk_done:
                return


def _require_fit(actor: object, world: World) -> None:
    """Raise SpecError if a policy reads fields that the world does not provide, or its actions differ."""
    if isinstance(actor, PolicyActor):
        with prefix_errors(actor.policy):
            require_fit(actor.policy.spec, world.spec)


keep_former_names(__name__, {"Decided": "PolicyOutput"})
