"""World with action latency: an action chunk decided at one control step is executed d control steps later.

Robots keep moving while their policy computes. In a `DelayedWorld` the actions of a chunk join a queue of d actions
that are already decided. The queue is part of the observation (`observation.action_queue`), so the process stays a
Markov decision process (Katsikopoulos & Engelbrecht 2003, Markov decision processes with delays and asynchronous cost
collection). Every algorithm can train in this world and learns to predict for the time of execution. An episode starts
with a queue of hold actions. Data recorded without latency can be converted: see `delay_episodes`. Axes: B row, R
selected rows, C chunk step, A action dimension, H history frame, d steps of delay.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robopolicy.client.element_kinds import POSITIONS, keeps_value
from robopolicy.core.action_bounds import clip_if_bounded
from robopolicy.core.arrays import Array
from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError, DataError, in_one_line
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.history import initial_window, repeat_last_valid, select, shift_window
from robopolicy.core.origin import WorldOrigin, origin_of
from robopolicy.core.policy import Policy
from robopolicy.core.spec import HOLD, LATENCY, LONGEST_LATENCY, QUEUE, Field, Observation, validate_actions
from robopolicy.core.world import Rows, Snapshot, Snapshots, Step, World
from robopolicy.core.wrapped_world import WrappedSnapshots, WrappedWorld

_OURS = "latency/"


def with_latency(world: World, steps: int, hold: str = "zero") -> World:
    """Return `world` with an action latency of `steps` control steps; the world itself for 0.

    hold: action until the first chunk is executed; zero for velocities or differences, last for positions (the robot's
    first action then also stands for its current position). Raises ConfigError for other values.
    """
    _require_latency(steps, hold)
    if steps == 0:
        return world
    if QUEUE in world.spec.observation:
        raise ConfigError(
            f"'{world.spec.name}' already has an action queue ({QUEUE}), i.e. a latency: do not add another one."
        )
    world_class = DelayedSnapshots if isinstance(world, Snapshots) else DelayedWorld
    return world_class(world, steps, hold)


def with_latency_of(options: Mapping[str, Any], world: World) -> World:
    """Return `world` with the latency set in a world's options; unchanged if it already has an action queue.

    Raises ConfigError as `with_latency` does.
    """
    steps, hold = latency_in(options)
    if QUEUE in world.spec.observation:
        return world
    return with_latency(world, steps, hold)


def latency_in(options: Mapping[str, Any]) -> tuple[int, str]:
    """Return latency_steps and latency_hold from a world's options; raises ConfigError for invalid values."""
    steps, hold = options.get(LATENCY, 0), options.get(HOLD, "zero")
    _require_latency(steps, hold)
    return steps, hold


def _require_latency(steps: Any, hold: Any) -> None:
    if type(steps) is not int or not 0 <= steps <= LONGEST_LATENCY:
        raise ConfigError(
            f"{LATENCY} is {in_one_line(steps, 60)}: it must be an integer from 0 to {LONGEST_LATENCY} (latency in "
            "control steps)."
        )
    if hold not in ("zero", "last"):
        raise ConfigError(
            f"{HOLD} is {hold}: it must be zero (if actions are velocities or differences) or last (if actions "
            "are positions)."
        )


def without_latency(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a world's options without the latency options."""
    return {name: value for name, value in options.items() if name not in (LATENCY, HOLD)}


def queue_field(action: Field, steps: int) -> Field:
    """Return the field of an action queue of `steps` actions, [steps * A]."""
    names = tuple(f"{name}_{step}" for step in range(steps) for name in action.names)
    low, high = (_repeated(bound, action.size, steps) for bound in (action.low, action.high))
    return Field((steps * action.size,), low=low, high=high, unit=action.unit, names=names)


def steps_ahead(observation: Mapping[str, Field], action: Field) -> int:
    """Return the latency in control steps implied by `observation` (key -> field) and `action`: the length of the
    action queue, 0 without one.
    """
    queue = observation.get(QUEUE)
    return 0 if queue is None else queue.size // max(action.size, 1)


class DelayedWorld(WrappedWorld):
    """A `World` that executes chunks `steps` control steps late; create it with `with_latency`.

    After a step, a row's queue is that of its last executed control step.
    """

    def __init__(self, world: World, steps: int, hold: str):
        spec, action = world.spec, world.spec.action
        if len(action.shape) != 1:
            raise ConfigError(
                f"Actions of '{spec.name}' have shape {list(action.shape)}; a latency needs action vectors, [A]."
            )
        super().__init__(world, replace(spec, observation={**spec.observation, QUEUE: queue_field(action, steps)}))
        self.steps = steps
        rows = world.batch_size
        self._kept = np.array(keeps_value(hold, POSITIONS, action.names, action.size, action.unit))
        self._still = _still(action)
        self._queue = np.zeros((rows, steps, action.size))
        self._fresh = np.ones(rows, dtype=bool)
        self._window = np.zeros((rows, spec.history, steps * action.size), dtype=np.float32)

    def reset(
        self, rows: Rows = None, seeds: Sequence[int] | Array | None = None, options: Mapping[str, Any] | None = None
    ) -> Observation:
        """Start new episodes in `rows` [R] with a queue of hold actions; see `World.reset`."""
        observation = self.world.reset(rows, seeds, options)
        index = np.arange(self.batch_size) if rows is None else np.asarray(rows)
        self._queue[index], self._fresh[index] = self._still, True
        self._window[index] = initial_window(
            self._queue[index].reshape(len(index), 1, -1).astype(np.float32), self.spec.history
        )
        return self._seen(observation)

    def step(self, actions: Array) -> Step:
        """Append a chunk [B, C, A] to the queue and execute the first C actions of the queue; raises as the world
        does.
        """
        actions = np.asarray(actions, dtype=np.float64)
        action = self.spec.action
        validate_actions(actions, action, self.batch_size)
        actions = clip_if_bounded(self.spec, actions)
        held_still = np.where(self._kept & self._fresh[:, None, None], actions[:, :1], self._queue)
        plan = np.concatenate([held_still, actions], 1)  # [B, d + C, A]
        count = actions.shape[1]
        step = self.world.step(plan[:, :count])
        length = step.valid.sum(1)
        # Queues [B, C, d * A] after each control step; a row that had ended repeats the one that it ended with.
        after = np.stack([plan[:, end : end + self.steps] for end in range(1, count + 1)], 1)
        after = after.reshape(*after.shape[:2], -1).astype(np.float32)
        trace = np.repeat(self._window[:, -1:], count, 1)
        ran = np.flatnonzero(length)
        if len(ran):
            trace[ran] = repeat_last_valid(after[ran], length[ran])
            self._window[ran] = shift_window(self._window[ran], after[ran], length[ran])
            self._queue[ran] = select(plan[ran], length[ran, None] + np.arange(self.steps))
            self._fresh[ran] = False
        return replace(step, observation=self._seen(step.observation), trace={**step.trace, QUEUE: trace})

    def _seen(self, observation: Observation) -> Observation:
        return {**observation, QUEUE: self._window.copy()}


class DelayedSnapshots(DelayedWorld, WrappedSnapshots):
    """A `DelayedWorld` that supports `Snapshots`; they include the action queues."""

    prefix = _OURS

    @property
    def origin(self) -> str:
        """Implement `WrappedSnapshots.origin`."""
        return f"a world with {LATENCY}={self.steps}"

    @property
    def own_arrays(self) -> dict[str, Array]:
        """Implement `WrappedSnapshots.own_arrays`: arrays [B, ...]."""
        return {"queue": self._queue, "fresh": self._fresh, "window": self._window}

    def restored(self, observation: Observation, rows: Array) -> Observation:
        """Implement `WrappedSnapshots.restored`; rows: [R] -> [B, H, ...]."""
        return self._seen(observation)


def queued_actions(snapshot: Snapshot) -> Array | None:
    """Return the queued actions that are not yet executed, [R, d, A]; None for a world without latency."""
    return snapshot.arrays.get(f"{_OURS}queue")


def episodes_for_world(options: Mapping[str, Any], episodes: Episodes) -> Episodes:
    """Return episodes as they would have been recorded in a world with these options; see `delay_episodes`."""
    return delay_episodes(episodes, *latency_in(options))


def episodes_for_policy(policy: Policy, episodes: Episodes) -> Episodes:
    """Return episodes as observed by a policy that predicts ahead, unchanged for other policies; see
    `delay_episodes`.
    """
    return episodes_for_model(policy.spec.observation, origin_of(policy), episodes)


def episodes_for_model(observation: Mapping[str, Field], origin: WorldOrigin | None, episodes: Episodes) -> Episodes:
    """Return episodes as observed by a model that reads `observation` (key -> field) and was trained in the world of
    `origin`.

    Raises as `delay_episodes` does.
    """
    _, hold = latency_in({} if origin is None else origin.options)
    return delay_episodes(episodes, steps_ahead(observation, episodes.action_field), hold)


def with_latency_options(origin: WorldOrigin | None, options: Mapping[str, Any]) -> WorldOrigin | None:
    """Return the origin of a recording that was converted to the latency in a world's options."""
    latency_options = {name: options[name] for name in (LATENCY, HOLD) if name in options}
    return None if origin is None else WorldOrigin(origin.name, {**origin.options, **latency_options})


def delay_episodes(episodes: Episodes, steps: int, hold: str = "zero") -> Episodes:
    """Return recorded episodes as if every action had been decided `steps` control steps before it was executed.

    Every step contains the observation from `steps` steps earlier and the actions decided by then; an episode starts
    with `steps` steps of holding position, in which nothing moves. Actions decided in the last steps of an episode are
    never executed: the last action is repeated there. hold: as in `with_latency`. Episodes that already contain a queue
    of this length are returned unchanged. Raises DataError when their queue has another length, or actions are not
    vectors; ConfigError as `with_latency` does.
    """
    _require_latency(steps, hold)
    if not steps:
        return episodes
    field = queue_field(episodes.action_field, steps)
    old_field = episodes.observation_fields.get(QUEUE)
    if old_field is not None:
        if old_field.shape != field.shape:
            raise DataError(
                f"These episodes were recorded with {LATENCY}="
                f"{steps_ahead(episodes.observation_fields, episodes.action_field)}, not {steps}."
            )
        return episodes
    if episodes.actions.ndim != 2:
        raise DataError(f"Actions have shape {list(episodes.actions.shape[1:])}; a latency needs action vectors, [A].")
    longer = episodes.lengths + steps
    episode, place = _places(longer)
    decision_steps = episodes.starts[episode] + torch.minimum(place, episodes.lengths[episode] - 1)
    waits = place < steps
    executed_steps = episodes.starts[episode] + (place - steps).clamp_min(0)

    def led_to(value: Tensor) -> Tensor:
        return torch.where(waits, torch.zeros_like(value[:1]), value[executed_steps])

    episode_index, frame = _places(longer + 1)
    frames_seen = episodes.frame_starts[episode_index] + (frame - steps).clamp_min(0)
    success, rewards = episodes.step_success, episodes.rewards
    columns = {name: getattr(episodes, name) for name in ("actor", "segment", "labels", "label_steps")}
    return replace(
        episodes,
        observation_fields={**episodes.observation_fields, QUEUE: field},
        observation={
            **{key: value[frames_seen] for key, value in episodes.observation.items()},
            QUEUE: _queues(episodes, steps, hold, episode_index, frame),
        },
        actions=episodes.actions[decision_steps],
        lengths=longer,
        rewards=None if rewards is None else {name: led_to(value) for name, value in rewards.items()},
        step_success=None if success is None else led_to(success),
        **{name: value[decision_steps] for name, value in columns.items() if value is not None},
    )


def _places(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return episode index and step index of every entry of episodes of the given lengths [E], both [sum]."""
    episode = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    begins = lengths.cumsum(0) - lengths
    return episode, torch.arange(len(episode), device=lengths.device) - begins[episode]


def _queues(episodes: Episodes, steps: int, hold: str, episode: Tensor, frame: Tensor) -> Tensor:
    """Return the decided but not yet executed actions at every frame, [F', d * A]; episode, frame: [F'], see
    `_places`.
    """
    action, device = episodes.action_field, episodes.device
    still_action = torch.as_tensor(_still(action), dtype=torch.float32, device=device)
    # When the queue's actions are done, in recorded steps: below 0 the robot waits.
    when = frame[:, None] + torch.arange(steps, device=device) - steps
    last = (episodes.lengths - 1)[episode][:, None]
    first = episodes.starts[episode][:, None]
    actions = episodes.actions[first + torch.minimum(when.clamp_min(0), last)]
    # Before the first decision nobody knows what the robot keeps.
    keeps_mask = torch.tensor(keeps_value(hold, POSITIONS, action.names, action.size, action.unit), device=device)
    waiting = torch.where(keeps_mask & (frame > 0)[:, None, None], episodes.actions[first], still_action)
    return torch.where((when < 0)[..., None], waiting, actions).flatten(1)


def _still(action: Field) -> Array:
    """Return the action closest to zero motion within the bounds, [A]."""
    return np.clip(np.zeros(action.size), action.low, action.high)


def _repeated(bound: float | tuple[float, ...], size: int, steps: int) -> float | tuple[float, ...]:
    return bound if isinstance(bound, float | int) else tuple(bound[:size]) * steps


keep_former_names(
    __name__,
    {
        "delayed": "delay_episodes",
        "recorded_in": "episodes_for_world",
        "recorded_for": "episodes_for_policy",
        "seen_ahead": "episodes_for_model",
        "queued": "queued_actions",
    },
)
