"""A world in which decisions take time: what is decided at a control step is done so many steps later.

Robots go on while their policy thinks. In a `DelayedWorld` the actions of a chunk join a queue of d actions that are
already decided, and the queue is part of what is seen (`observation.action_queue`), so it stays a Markov decision
process (Katsikopoulos & Engelbrecht 2003, Markov decision processes with delays and asynchronous cost collection).
Whatever learns in a world learns in this one, and learns to decide for the moment at which its decision counts.
An episode begins with a queue of holding still. What was recorded without a delay can be read as if it had been seen
late: see `delayed`. Axes: B row, R selected rows, C chunk step, A action dimension, H history frame, d steps of delay.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.action_bounds import executed
from robopolicy.core.arrays import Array
from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError, DataError, SpecError, in_one_line
from robopolicy.core.history import begin, held, move, select
from robopolicy.core.holding import POSITIONS, keeps_value
from robopolicy.core.origin import WorldOrigin, origin_of
from robopolicy.core.policy import Policy
from robopolicy.core.spec import HOLD, LATENCY, LONGEST_LATENCY, QUEUE, Field, Observation, WorldSpec, validate_actions
from robopolicy.core.stages import Stage
from robopolicy.core.world import Renders, Rows, Snapshot, Snapshots, Step, World, can_render

_OURS = "latency/"


def with_latency(world: World, steps: int, hold: str = "zero") -> World:
    """Return `world` where decisions take `steps` control steps; the world itself where they take none.

    hold: zero, where actions are velocities or differences; last, where they are positions: then the robot's first
    decision also stands for where it is. Raises ConfigError for other values.
    """
    _require_latency(steps, hold)
    if steps == 0:
        return world
    if QUEUE in world.spec.observation:
        raise ConfigError(f"'{world.spec.name}' shows {QUEUE} already: its decisions take time as they are.")
    made = DelayedSnapshots if isinstance(world, Snapshots) else DelayedWorld
    return made(world, steps, hold)


def with_latency_of(options: Mapping[str, Any], world: World) -> World:
    """Return `world` with the latency among the options of a world, as it is where its decisions take time already.

    Raises ConfigError as `with_latency` does.
    """
    steps, hold = latency_in(options)
    if QUEUE in world.spec.observation:
        return world
    return with_latency(world, steps, hold)


def latency_in(options: Mapping[str, Any]) -> tuple[int, str]:
    """Return latency_steps and latency_hold of a world's options; raises ConfigError for what they cannot be."""
    steps, hold = options.get(LATENCY, 0), options.get(HOLD, "zero")
    _require_latency(steps, hold)
    return steps, hold


def _require_latency(steps: Any, hold: Any) -> None:
    if type(steps) is not int or not 0 <= steps <= LONGEST_LATENCY:
        raise ConfigError(
            f"{LATENCY} is {in_one_line(steps, 60)}: a decision takes 0 control steps or more, a whole number of "
            f"control steps, at most {LONGEST_LATENCY}."
        )
    if hold not in ("zero", "last"):
        raise ConfigError(f"{HOLD} is {hold}: zero (actions are velocities or differences) or last (positions).")


def without_latency(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the other options of a world."""
    return {name: value for name, value in options.items() if name not in (LATENCY, HOLD)}


def queue_field(action: Field, steps: int) -> Field:
    """Return the field of a queue of `steps` actions, [steps * A]."""
    names = tuple(f"{name}_{step}" for step in range(steps) for name in action.names)
    low, high = (_repeated(bound, action.size, steps) for bound in (action.low, action.high))
    return Field((steps * action.size,), low=low, high=high, unit=action.unit, names=names)


def steps_ahead(observation: Mapping[str, Field], action: Field) -> int:
    """Return how many control steps ahead one decides that reads `observation`, key -> field, and acts by `action`."""
    queue = observation.get(QUEUE)
    return 0 if queue is None else queue.size // max(action.size, 1)


class DelayedWorld:
    """A `World` whose chunks are executed `steps` control steps late; make one with `with_latency`.

    A row's queue at the end of a step is that of the last control step that was taken.
    """

    def __init__(self, world: World, steps: int, hold: str):
        self.world, self.steps = world, steps
        spec, action = world.spec, world.spec.action
        if len(action.shape) != 1:
            raise ConfigError(f"Actions of '{spec.name}' have shape {list(action.shape)}; a delay needs vectors, [A].")
        self._spec = replace(spec, observation={**spec.observation, QUEUE: queue_field(action, steps)})
        rows = world.batch_size
        self._kept = np.array(keeps_value(hold, POSITIONS, action.names, action.size, action.unit))
        self._still = _still(action)
        self._queue = np.zeros((rows, steps, action.size))
        self._fresh = np.ones(rows, dtype=bool)
        self._window = np.zeros((rows, spec.history, steps * action.size), dtype=np.float32)

    @property
    def spec(self) -> WorldSpec:
        """The world's, with the queue among what is seen."""
        return self._spec

    @property
    def batch_size(self) -> int:
        """Number of rows B."""
        return self.world.batch_size

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The world's, none where it does not say."""
        return getattr(self.world, "stages", ())

    @property
    def draws(self) -> bool:
        """Whether the world can be looked at."""
        return can_render(self.world)

    def reset(
        self, rows: Rows = None, seeds: Sequence[int] | Array | None = None, options: Mapping[str, Any] | None = None
    ) -> Observation:
        """Start new episodes in `rows` [R], whose robots hold still at first; see `World.reset`."""
        observation = self.world.reset(rows, seeds, options)
        index = np.arange(self.batch_size) if rows is None else np.asarray(rows)
        self._queue[index], self._fresh[index] = self._still, True
        self._window[index] = begin(self._queue[index].reshape(len(index), 1, -1).astype(np.float32), self.spec.history)
        return self._seen(observation)

    def step(self, actions: Array) -> Step:
        """Queue a chunk [B, C, A], and execute the C actions that are first in the queue; raises as the world does."""
        actions = np.asarray(actions, dtype=np.float64)
        action = self.spec.action
        validate_actions(actions, action, self.batch_size)
        actions = executed(self.spec, actions)
        held_still = np.where(self._kept & self._fresh[:, None, None], actions[:, :1], self._queue)
        planned = np.concatenate([held_still, actions], 1)  # [B, d + C, A]
        count = actions.shape[1]
        step = self.world.step(planned[:, :count])
        length = step.valid.sum(1)
        # Queues [B, C, d * A] after each control step; a row that had ended repeats the one that it ended with.
        after = np.stack([planned[:, taken : taken + self.steps] for taken in range(1, count + 1)], 1)
        after = after.reshape(*after.shape[:2], -1).astype(np.float32)
        trace = np.repeat(self._window[:, -1:], count, 1)
        ran = np.flatnonzero(length)
        if len(ran):
            trace[ran] = held(after[ran], length[ran])
            self._window[ran] = move(self._window[ran], after[ran], length[ran])
            self._queue[ran] = select(planned[ran], length[ran, None] + np.arange(self.steps))
            self._fresh[ran] = False
        return replace(step, observation=self._seen(step.observation), trace={**step.trace, QUEUE: trace})

    def render(self, rows: Rows = None, camera: str | None = None, height: int = 240, width: int = 240) -> Array:
        """Return uint8 images [R, height, width, 3]; raises ConfigError where the world cannot be looked at."""
        if not isinstance(self.world, Renders):
            raise ConfigError(f"'{self.spec.name}' cannot be looked at: it has no render().")
        return self.world.render(rows, camera, height, width)

    def close(self) -> None:
        """Close the world."""
        self.world.close()

    def _seen(self, observation: Observation) -> Observation:
        return {**observation, QUEUE: self._window.copy()}


class DelayedSnapshots(DelayedWorld):
    """A `DelayedWorld` with `Snapshots`."""

    def snapshot(self, rows: Rows = None) -> Snapshot:
        """Copy the state of `rows` [R], queues among it: arrays [R, ...]; see `Snapshots`."""
        assert isinstance(self.world, Snapshots)
        index = slice(None) if rows is None else np.asarray(rows)
        own = {_OURS + name: array[index].copy() for name, array in self._arrays.items()}
        return Snapshot({**self.world.snapshot(rows).arrays, **own})

    def restore(self, snapshot: Snapshot, rows: Rows = None) -> Observation:
        """Overwrite `rows` [R] with `snapshot`; returns the observation of all rows, [B, H, ...].

        Raises SpecError for a snapshot of another delay, and as the world does.
        """
        assert isinstance(self.world, Snapshots)
        arrays = dict(snapshot.arrays)
        own = {name: arrays.pop(_OURS + name, None) for name in self._arrays}
        if any(array is None or array.shape[1:] != self._arrays[name].shape[1:] for name, array in own.items()):
            raise SpecError(f"This snapshot is not of a world with {LATENCY}={self.steps}.")
        observation = self.world.restore(Snapshot(arrays), rows)
        index = slice(None) if rows is None else np.asarray(rows)
        for name, array in own.items():
            self._arrays[name][index] = array
        return self._seen(observation)

    @property
    def _arrays(self) -> dict[str, Array]:
        return {"queue": self._queue, "fresh": self._fresh, "window": self._window}


def queued(snapshot: Snapshot) -> Array | None:
    """Return the actions that are decided and not yet done, [R, d, A], None where decisions take no time."""
    return snapshot.arrays.get(f"{_OURS}queue")


def recorded_in(options: Mapping[str, Any], episodes: Episodes) -> Episodes:
    """Return episodes as they would have been recorded in a world with such options; see `delayed`."""
    return delayed(episodes, *latency_in(options))


def recorded_for(policy: Policy, episodes: Episodes) -> Episodes:
    """Return episodes as a policy sees them that decides ahead, unchanged for others; see `delayed`."""
    return seen_ahead(policy.spec.observation, origin_of(policy), episodes)


def seen_ahead(observation: Mapping[str, Field], origin: WorldOrigin | None, episodes: Episodes) -> Episodes:
    """Return episodes as one sees them who reads `observation`, key -> field, and was trained in the world of `origin`.

    Raises as `delayed` does.
    """
    _, hold = latency_in({} if origin is None else origin.options)
    return delayed(episodes, steps_ahead(observation, episodes.action_field), hold)


def with_latency_options(origin: WorldOrigin | None, options: Mapping[str, Any]) -> WorldOrigin | None:
    """Return the world of a recording that was read as if decisions had taken what a world's options say."""
    given = {name: options[name] for name in (LATENCY, HOLD) if name in options}
    return None if origin is None else WorldOrigin(origin.name, {**origin.options, **given})


def delayed(episodes: Episodes, steps: int, hold: str = "zero") -> Episodes:
    """Return recorded episodes as if every decision had been made `steps` control steps before it was executed.

    Every step shows what was seen so many steps before it, and the actions that had been decided by then; an episode
    begins with `steps` steps of holding still, in which nothing moves. What is decided in an episode's last steps is
    never done: there the last action stands. hold: as in `with_latency`. Episodes that show a queue of this length are
    returned as they are. Raises DataError where it is another, or actions are no vectors; ConfigError as `with_latency`
    does.
    """
    _require_latency(steps, hold)
    if not steps:
        return episodes
    field = queue_field(episodes.action_field, steps)
    known = episodes.observation_fields.get(QUEUE)
    if known is not None:
        if known.shape != field.shape:
            raise DataError(
                f"These episodes were recorded with {LATENCY}="
                f"{steps_ahead(episodes.observation_fields, episodes.action_field)}, not {steps}."
            )
        return episodes
    if episodes.actions.ndim != 2:
        raise DataError(f"Actions have shape {list(episodes.actions.shape[1:])}; a delay needs vectors, [A].")
    longer = episodes.lengths + steps
    episode, place = _places(longer)
    decided = episodes.starts[episode] + torch.minimum(place, episodes.lengths[episode] - 1)
    waits = place < steps
    played = episodes.starts[episode] + (place - steps).clamp_min(0)

    def led_to(value: Tensor) -> Tensor:
        return torch.where(waits, torch.zeros_like(value[:1]), value[played])

    within, frame = _places(longer + 1)
    seen = episodes.frame_starts[within] + (frame - steps).clamp_min(0)
    success, rewards = episodes.step_success, episodes.rewards
    columns = {name: getattr(episodes, name) for name in ("actor", "segment", "labels", "label_steps")}
    return replace(
        episodes,
        observation_fields={**episodes.observation_fields, QUEUE: field},
        observation={
            **{key: value[seen] for key, value in episodes.observation.items()},
            QUEUE: _queues(episodes, steps, hold, within, frame),
        },
        actions=episodes.actions[decided],
        lengths=longer,
        rewards=None if rewards is None else {name: led_to(value) for name, value in rewards.items()},
        step_success=None if success is None else led_to(success),
        **{name: value[decided] for name, value in columns.items() if value is not None},
    )


def _places(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return of every entry of so long [E] episodes the episode that it is in and its place there, both [sum]."""
    episode = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    begins = lengths.cumsum(0) - lengths
    return episode, torch.arange(len(episode), device=lengths.device) - begins[episode]


def _queues(episodes: Episodes, steps: int, hold: str, episode: Tensor, frame: Tensor) -> Tensor:
    """Return what is decided and not yet done at every frame, [F', d * A]; episode, frame: [F'], see `_places`."""
    action, device = episodes.action_field, episodes.device
    still = torch.as_tensor(_still(action), dtype=torch.float32, device=device)
    # When the queue's actions are done, in recorded steps: below 0 the robot waits.
    when = frame[:, None] + torch.arange(steps, device=device) - steps
    last = (episodes.lengths - 1)[episode][:, None]
    first = episodes.starts[episode][:, None]
    actions = episodes.actions[first + torch.minimum(when.clamp_min(0), last)]
    # Before the first decision nobody knows what the robot keeps.
    kept = torch.tensor(keeps_value(hold, POSITIONS, action.names, action.size, action.unit), device=device)
    waiting = torch.where(kept & (frame > 0)[:, None, None], episodes.actions[first], still)
    return torch.where((when < 0)[..., None], waiting, actions).flatten(1)


def _still(action: Field) -> Array:
    """Return the action that is nearest to no motion, [A]."""
    return np.clip(np.zeros(action.size), action.low, action.high)


def _repeated(bound: float | tuple[float, ...], size: int, steps: int) -> float | tuple[float, ...]:
    return bound if isinstance(bound, float | int) else tuple(bound[:size]) * steps
