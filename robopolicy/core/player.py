"""`Player`: the one loop in which an actor acts in a world; who collects, records, evaluates or serves is its body.

    player = Player(world, actor_of(policy, EpisodeGenerator(seed)))
    player.start(seeds)
    for played in player:
        ...  # keep what is wanted of played.step; where played.chunk_done, rows that ended may go on:
        player.start(more_seeds, rows=np.flatnonzero(played.ended))

Rows that end are left alone unless the body gives them another episode. Axes: B row, C chunk step, A action dimension.
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
from robopolicy.core.history import newest
from robopolicy.core.origin import about
from robopolicy.core.policy import Decision, Policy, Resumes, TensorObservation, is_policy, to_tensors
from robopolicy.core.randomness import EpisodeGenerator
from robopolicy.core.spec import Observation, check_finite, require_fit, validate_observation
from robopolicy.core.world import Controller, Rows, Snapshot, Snapshots, Step, World, begin_episodes


@runtime_checkable
class Actor[Info](Protocol):
    """Whatever turns a world's observation into action chunks, and can tell how it came to them."""

    def reset(self, rows: Rows = None) -> None:
        """Forget what was remembered about `rows` [R], all of them for None."""
        ...

    def choose(self, observation: Observation) -> tuple[Array, Info]:
        """Return the next chunk of every row, [B, C, A] in the world's units, and what is to be kept of the choice."""
        ...


@dataclass(frozen=True)
class Decided:
    """A policy's decision, and the tensors [B, H, ...] that it saw."""

    seen: TensorObservation
    decision: Decision


class PolicyActor:
    """A policy as an actor.

    generator: its noise, on the device where it computes; of an `EpisodeGenerator` every row draws what belongs to its
    episode, of any other the batch draws together; deterministic: no exploration noise (a denoising policy's initial
    noise remains); scored: log-probabilities must be finite too. kept: set before a decision, what it goes on from:
    latents [B, ...] and how many steps of them each row keeps [B], for a policy that `Resumes`.
    """

    def __init__(
        self, policy: Policy, generator: torch.Generator, *, deterministic: bool = False, scored: bool = False
    ):
        self.policy, self.generator = policy, generator
        self.deterministic, self.scored = deterministic, scored
        self.kept: tuple[Mapping[str, Tensor], Tensor] | None = None

    def reset(self, rows: Rows = None) -> None:
        """Let the policy forget `rows` [R], all of them for None."""
        self.policy.reset(rows)

    def begin(self, seeds: Array, rows: Rows = None) -> None:
        """Let the noise of `rows` [R], all of them for None, be that of episodes with `seeds` [R]."""
        if isinstance(self.generator, EpisodeGenerator):
            self.generator.begin(seeds, rows)

    def choose(self, observation: Observation, rows: Array | None = None) -> tuple[Array, Decided]:
        """Return the next chunk [B, C, A] float64, and the decision.

        rows: whose decision it is, [B] bool or indices; the noise of the others stays at their last one. None: all.
        Raises SpecError and NonFiniteError on an observation that does not fit, NonFiniteError on a bad decision.
        """
        spec = self.policy.spec
        observation = newest(observation, spec.observation, spec.history)
        validate_observation(observation, spec.observation, history=spec.history)
        seen = to_tensors(observation, self.generator.device)
        generator = self.generator
        with generator.decision(rows) if isinstance(generator, EpisodeGenerator) else nullcontext():
            if self.kept is not None and isinstance(self.policy, Resumes):
                decision = self.policy.resume(seen, *self.kept, generator)
            else:
                decision = self.policy.act(seen, generator, deterministic=self.deterministic)
        check_finite("actions", decision.actions)
        if self.scored:
            check_finite("log-probabilities", decision.logp)
        actions = cast(Array, decision.actions.detach().cpu().numpy())  # pyright: ignore[reportUnknownMemberType]
        return actions.astype(np.float64), Decided(seen, decision)


class ControllerActor:
    """A controller as an actor: its chunks are one step long. One that draws may have `begin`: see `BeginsEpisodes`."""

    def __init__(self, controller: Controller):
        self.controller = controller

    def reset(self, rows: Rows = None) -> None:
        """Let the controller forget `rows` [R], all of them for None."""
        self.controller.reset(rows)

    def begin(self, seeds: Array, rows: Rows = None) -> None:
        """Give the controller the seeds [R] of the episodes in `rows` [R], if it wants them."""
        begin_episodes(self.controller, seeds, rows)

    def choose(self, observation: Observation) -> tuple[Array, None]:
        """Return the next control step as a chunk, [B, 1, A] float64."""
        return np.asarray(self.controller.act(observation), dtype=np.float64)[:, None], None


def actor_of(
    actor: Policy | Controller | Actor[None], generator: torch.Generator, *, deterministic: bool = False
) -> Actor[Decided] | Actor[None]:
    """Return a policy or a controller (which draws nothing) as an actor, see `PolicyActor`; an actor as it is."""
    if isinstance(actor, Actor):
        return actor
    if is_policy(actor):
        return PolicyActor(actor, generator, deterministic=deterministic)
    return ControllerActor(actor)


@dataclass(frozen=True)
class PlayedStep[Info]:
    """One call of the world's `step`.

    info: what the actor said of its decision; actions: [B, c, A] as handed to the world; step: what they led to;
    running: [B] bool, rows that were being played; chunk_done: the chunk is executed, or every row ended;
    rows may be started now.
    """

    info: Info
    actions: Array
    step: Step
    running: Array
    chunk_done: bool

    @property
    def ended(self) -> Array:
        """[B] bool: rows that were being played and ended in this step."""
        return self.running & self.step.ended


class Player[Info]:
    """An actor in a world; iterate over it to play until no row runs, or stop whenever enough is seen.

    actor: may be exchanged between two decisions; observation: what rows see that run on from before, None before the
    first `start`; stepwise: run chunks control step by control step, one `PlayedStep` each, instead of whole.
    running: [B] bool, rows whose episode is played. Raises SpecError where a policy does not fit the world.
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
        """The newest, key -> [B, H, ...]. Raises SpecError before the first `start`."""
        if self._observation is None:
            raise SpecError("Nothing is played yet: call start() first.")
        return self._observation

    @property
    def started(self) -> bool:
        """Whether there is an observation."""
        return self._observation is not None

    def start(
        self,
        seeds: Sequence[int] | Array,
        rows: Sequence[int] | Array | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        count: int | None = None,
    ) -> None:
        """Reset `rows` [R] (None: all) with `seeds` [R] and play them, or only the first `count` of them.

        At the first reset a world wants every row started, also those that nobody plays. options: as in `World.reset`.
        """
        self._observation = self.world.reset(rows=rows, seeds=seeds, options=options)
        self.actor.reset(rows)
        begin_episodes(self.actor, np.asarray(seeds), rows)
        self.running = self.running.copy()
        self.running[(np.arange(self.world.batch_size) if rows is None else np.asarray(rows))[:count]] = True

    def start_wave(self, seeds: Array, options: Mapping[str, Any] | None = None) -> None:
        """Reset every row and play one episode per seed, [n <= B]; spare rows repeat the seeds and are not played."""
        self.running = np.zeros(self.world.batch_size, dtype=bool)
        self.start(np.resize(seeds, self.world.batch_size), options=options, count=len(seeds))

    def restore(self, world: Snapshots, snapshot: Snapshot, rows: Array) -> None:
        """Play `rows` [R] on from `snapshot`; world: the played one, as what can restore rows."""
        self._observation = world.restore(snapshot, rows)
        self.actor.reset(rows)
        self.running = self.running.copy()
        self.running[rows] = True

    def __iter__(self) -> Iterator[PlayedStep[Info]]:
        while self.running.any():
            yield from self._decide()

    def _decide(self) -> Iterator[PlayedStep[Info]]:
        """Let the actor decide once and execute its chunk, until no row is left that runs."""
        actions, info = self.actor.choose(self.observation)
        parts = np.split(actions, actions.shape[1], axis=1) if self.stepwise else [actions]
        for place, part in enumerate(parts):
            running = self.running
            step = self.world.step(part)
            if not step.valid[running].any():
                raise SpecError(f"'{self.world.spec.name}' ran no step though episodes had not ended.")
            self._observation, self.running = step.observation, running & ~step.ended
            chunk_done = place + 1 == len(parts) or not self.running.any()
            yield PlayedStep(info, part, step, running, chunk_done)
            if chunk_done:
                return


def _require_fit(actor: object, world: World) -> None:
    """Raise SpecError where a policy reads what the world does not show, or acts otherwise."""
    if isinstance(actor, PolicyActor):
        with about(actor.policy):
            require_fit(actor.policy.spec, world.spec)
