"""Demonstrated states to start from: an expert plays every initial state of a pool once and its states are stored."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from robopolicy.core.arrays import Array
from robopolicy.core.errors import ConfigError
from robopolicy.core.player import ControllerActor, Player
from robopolicy.core.progress import progress
from robopolicy.core.spec import IMAGE_PREFIX, TASK, Observation
from robopolicy.core.world import Controller, Snapshot, Snapshots, World


@dataclass(frozen=True)
class Demonstrations:
    """States of one successful demonstration per initial state, in time order; initial states without one are missing.

    vectors: the vector fields observed in these states, [D] each; every: control steps between two of them.
    """

    states: dict[int, list[Snapshot]]
    vectors: dict[int, list[Array]] = field(default_factory=dict[int, list[Array]])
    every: int = 1

    def state(self, start: int, share: float) -> tuple[Snapshot | None, float]:
        """Return the state at about fraction `share` of the initial state's demonstration (None for 0), and its exact
        fraction.
        """
        path = self.states.get(start, [])
        # State i is the one after i * every steps, so place / len(path) is the share of time that is already done.
        place = min(int(share * len(path)), len(path) - 1)
        return (path[place], place / len(path)) if place > 0 else (None, 0.0)

    def vector(self, start: int, share: float, steps: int) -> Array | None:
        """Return the vector fields [D] `steps` control steps after the state at `share`, at most the last ones; None
        without a demonstration.
        """
        path = self.vectors.get(start, [])
        place = min(int(share * len(path)), len(path) - 1) + steps // self.every
        return path[min(place, len(path) - 1)] if path else None


def reached_share(path: Array, demonstration: Array, within: float = 0.5) -> float:
    """Return the fraction of a demonstration's states [N, D] up to the last one that a path [T, D] came near to.

    Near: the root mean square of the differences, in standard deviations over the demonstration, is at most `within`.
    """
    spread = demonstration.std(0)
    counts = spread > 1e-6
    difference = (path[:, None] - demonstration[None])[..., counts] / spread[counts]
    near = (np.sqrt((difference**2).mean(-1)) <= within).any(0)
    return float(np.flatnonzero(near)[-1]) / len(near) if near.any() else 0.0


def newest_vectors(observation: Observation) -> Array:
    """Return the newest frames of the vector fields of an observation [B, H, ...], ordered by key, [B, D]."""
    fields = [
        np.asarray(value)[:, -1].reshape(len(value), -1).astype(np.float64)
        for key, value in sorted(observation.items())
        if key != TASK and not key.startswith(IMAGE_PREFIX)
    ]
    return np.concatenate(fields, 1)


def demonstrate(
    world: World, expert: Controller, seeds: Sequence[int] | np.ndarray, tasks: Sequence[int] = (), every: int = 1
) -> Demonstrations:
    """Let the expert play from each of `seeds` (with instruction tasks[i], if given), storing every n-th state.

    The world is left in an arbitrary state; reset it afterwards. Raises ConfigError if its rows cannot be saved or the
    expert never succeeds.
    """
    if not isinstance(world, Snapshots):
        raise ConfigError(
            f"The world '{world.spec.name}' does not support snapshots, so demonstrated states cannot be stored."
        )
    states: dict[int, list[Snapshot]] = {}
    vectors: dict[int, list[Array]] = {}
    player = Player(world, ControllerActor(expert))
    with progress("Demonstrations", len(seeds)) as advance:
        for first in range(0, len(seeds), world.batch_size):
            wave = np.asarray(seeds[first : first + world.batch_size], dtype=np.int64)
            # A last wave is shorter than the world's rows; what the surplus rows are told does not matter.
            wave_tasks = np.resize(tasks[first : first + len(wave)], world.batch_size) if len(tasks) else None
            player.start_batch(wave, options=None if wave_tasks is None else {"task": wave_tasks})
            paths: list[list[Snapshot]] = [[] for _ in wave]
            views: list[list[Array]] = [[] for _ in wave]
            _keep(world, player, paths, views)
            for count, step in enumerate(player, start=1):
                for row in np.flatnonzero(step.ended):
                    if step.step.success[row]:
                        states[first + int(row)], vectors[first + int(row)] = paths[row], views[row]
                    advance()
                if count % every == 0:
                    _keep(world, player, paths, views)
    if not states:
        raise ConfigError(f"The expert of '{world.spec.name}' succeeded from none of {len(seeds)} initial states.")
    return Demonstrations(states, vectors, every)


def _keep(world: Snapshots, player: Player[None], paths: list[list[Snapshot]], views: list[list[Array]]) -> None:
    """Append the states of the running rows and what is observed there to their trajectories."""
    rows = np.flatnonzero(player.running)
    if len(rows):
        snapshot, vectors = world.snapshot(rows), newest_vectors(player.observation)
        for place, row in enumerate(rows):
            paths[row].append(snapshot.take([place]))
            views[row].append(vectors[row])
