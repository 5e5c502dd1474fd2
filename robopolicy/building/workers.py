"""Evaluation on workers: batches of episodes are the items, and policy and world are rebuilt from the configuration.

Nothing built crosses to a worker, only settings, paths of checkpoints and seeds. A verb names the function that builds
its policy in its world, which it uses in its own process as well, so results are equal byte for byte for any number of
workers.
"""

import json
import time
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

import numpy as np
import torch

from robopolicy.configuration import Config
from robopolicy.core.errors import RobopolicyNote
from robopolicy.core.policy import Policy
from robopolicy.core.pools import Pool, PoolSettings, open_pool
from robopolicy.core.registry import load_dotted
from robopolicy.core.structured import from_plain, to_plain
from robopolicy.core.world import Controller, World
from robopolicy.evaluation.waves import EpisodeBatch, play_episode_batch

Built = tuple[World, Policy | Controller, torch.device]
"""Result of a builder: a world, the policy in the form that acts there, and the policy's device."""


@dataclass(frozen=True)
class BatchPlayers:
    """Plays batches of one policy in one world on the workers of `pool`.

    job: `builder`, the import path of a function (config, **arguments) -> `Built`; `config` and `arguments` as plain
    data.
    """

    pool: Pool
    job: Mapping[str, Any]

    def play(
        self, batches: Sequence[np.ndarray], noise_seed: int, deterministic: bool
    ) -> Iterator[tuple[int, EpisodeBatch, float]]:
        """Yield place in `batches`, outcomes and seconds of every batch of seeds [n], in order of arrival."""
        if 0 < len(batches) < self.pool.workers:
            warnings.warn(
                f"{sum(map(len, batches))} episodes are {len(batches)} batches, so that only {len(batches)} of "
                f"{self.pool.workers} workers have work: set a smaller world.batch_size.",
                RobopolicyNote,
                stacklevel=3,
            )
        shared = self.pool.put(dict(self.job))
        items = [
            {"job": shared, "seeds": seeds, "noise_seed": int(noise_seed), "deterministic": deterministic}
            for seeds in batches
        ]
        for place, played in self.pool.map("robopolicy.building.workers:play_batch", items):
            yield place, EpisodeBatch(**played["wave"]), float(played["seconds"])


@dataclass(frozen=True)
class Workers:
    """The workers of a verb; pool: None if it plays in its own process."""

    config: Config
    pool: Pool | None

    def players(self, builder: str, **arguments: Any) -> BatchPlayers | None:
        """Return the object that plays batches on the workers, None without workers; see `BatchPlayers`."""
        if self.pool is None:
            return None
        sections = {name: to_plain(part) for name, part in vars(self.config).items() if is_dataclass(part)}
        return BatchPlayers(self.pool, {"builder": builder, "config": sections, "arguments": to_plain(arguments)})


@contextmanager
def open_workers(config: Config) -> Generator[Workers]:
    """Open the workers set in `config.workers` and end them afterwards, also after an error or Ctrl-C."""
    section = config.workers
    if section.pool == "local" and section.count == 1:
        yield Workers(config, None)
        return
    settings = PoolSettings(section.count, section.address)
    with open_pool(section.pool, settings) as pool:
        yield Workers(config, pool)


_built: dict[str, Built] = {}
"""Objects that this worker built last, by job."""


def play_batch(job: Mapping[str, Any], seeds: np.ndarray, noise_seed: int, deterministic: bool) -> dict[str, Any]:
    """Play one batch of episodes in a worker; return its outcomes (the fields of `EpisodeBatch`) and seconds."""
    key = json.dumps(job, sort_keys=True)
    if key not in _built:
        for world, *_ in _built.values():
            world.close()
        _built.clear()
        kinds = {name: type(getattr(Config(), name)) for name in job["config"]}
        config = Config(**{name: from_plain(kinds[name], part, name) for name, part in job["config"].items()})
        _built[key] = load_dotted(job["builder"], "Builder")(config, **job["arguments"])
    world, policy, device = _built[key]
    start = time.perf_counter()
    wave = play_episode_batch(world, policy, np.asarray(seeds), noise_seed, deterministic=deterministic, device=device)
    return {"wave": asdict(wave), "seconds": time.perf_counter() - start}
