"""Demonstrated states to begin from: an expert plays every start of a pool once, and its states are kept."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from robopolicy.core.errors import ConfigError
from robopolicy.core.progress import progress
from robopolicy.core.world import Controller, Snapshot, Snapshots, World


@dataclass(frozen=True)
class Demonstrations:
    """The states of one successful demonstration per start, in order of time; starts without one are missing."""

    states: dict[int, list[Snapshot]]

    def state(self, start: int, share: float) -> tuple[Snapshot | None, float]:
        """Return the state after about `share` of the start's demonstration, None for 0, and the share it is."""
        path = self.states.get(start, [])
        place = min(int(share * len(path)), len(path) - 1)
        return (path[place], place / len(path)) if place > 0 else (None, 0.0)


def demonstrate(
    world: World, expert: Controller, seeds: Sequence[int] | np.ndarray, tasks: Sequence[int] = (), every: int = 1
) -> Demonstrations:
    """Let the expert play from each of `seeds` (with instruction tasks[i], if given), keeping every n-th state.

    The world is left in some state; reset it. Raises ConfigError if its rows cannot be saved or the expert never
    succeeds.
    """
    if not isinstance(world, Snapshots):
        raise ConfigError(f"The world '{world.spec.name}' cannot save its rows, so no demonstrated state can be kept.")
    states: dict[int, list[Snapshot]] = {}
    with progress("Demonstrations", len(seeds)) as advance:
        for first in range(0, len(seeds), world.batch_size):
            chosen = np.arange(first, first + world.batch_size) % len(seeds)
            options = {"task": np.array([tasks[int(index)] for index in chosen])} if len(tasks) else None
            observation = world.reset(seeds=[int(seeds[int(index)]) for index in chosen], options=options)
            expert.reset()
            running = np.arange(world.batch_size) + first < len(seeds)
            paths: list[list[Snapshot]] = [[] for _ in chosen]
            count = 0
            while running.any():
                if count % every == 0:
                    rows = np.flatnonzero(running)
                    saved = world.snapshot(rows)
                    for place, row in enumerate(rows):
                        paths[row].append(saved.take([place]))
                step = world.step(expert.act(observation)[:, None])
                observation, count = step.observation, count + 1
                for row in np.flatnonzero(running & step.ended):
                    if step.success[row]:
                        states[int(chosen[row])] = paths[row]
                    advance()
                running &= ~step.ended
    if not states:
        raise ConfigError(f"The expert of '{world.spec.name}' succeeded from none of {len(seeds)} starts.")
    return Demonstrations(states)
