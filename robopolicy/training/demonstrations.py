"""Demonstrated states to start from: an expert plays every initial state of a pool once and its states are stored."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from robopolicy.core.errors import ConfigError
from robopolicy.core.player import ControllerActor, Player
from robopolicy.core.progress import progress
from robopolicy.core.world import Controller, Snapshot, Snapshots, World


@dataclass(frozen=True)
class Demonstrations:
    """States of one successful demonstration per initial state, in time order; states without one are missing."""

    states: dict[int, list[Snapshot]]

    def state(self, start: int, share: float) -> tuple[Snapshot | None, float]:
        """Return the state at about fraction `share` of the initial state's demonstration (None for 0), and its exact
        fraction.
        """
        path = self.states.get(start, [])
        # State i is the one after i * every steps, so place / len(path) is the share of time that is already done.
        place = min(int(share * len(path)), len(path) - 1)
        return (path[place], place / len(path)) if place > 0 else (None, 0.0)


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
    player = Player(world, ControllerActor(expert))
    with progress("Demonstrations", len(seeds)) as advance:
        for first in range(0, len(seeds), world.batch_size):
            wave = np.asarray(seeds[first : first + world.batch_size], dtype=np.int64)
            # A last wave is shorter than the world's rows; what the surplus rows are told does not matter.
            wave_tasks = np.resize(tasks[first : first + len(wave)], world.batch_size) if len(tasks) else None
            player.start_batch(wave, options=None if wave_tasks is None else {"task": wave_tasks})
            paths: list[list[Snapshot]] = [[] for _ in wave]
            _keep(world, player.running, paths)
            for count, step in enumerate(player, start=1):
                for row in np.flatnonzero(step.ended):
                    if step.step.success[row]:
                        states[first + int(row)] = paths[row]
                    advance()
                if count % every == 0:
                    _keep(world, player.running, paths)
    if not states:
        raise ConfigError(f"The expert of '{world.spec.name}' succeeded from none of {len(seeds)} initial states.")
    return Demonstrations(states)


def _keep(world: Snapshots, running: np.ndarray, paths: list[list[Snapshot]]) -> None:
    """Append the states of the running rows [B] to their trajectories."""
    rows = np.flatnonzero(running)
    if len(rows):
        snapshot = world.snapshot(rows)
        for place, row in enumerate(rows):
            paths[row].append(snapshot.take([place]))
