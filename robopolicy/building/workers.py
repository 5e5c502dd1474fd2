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
from robopolicy.core.progress import progress
from robopolicy.core.registry import load_dotted
from robopolicy.core.structured import from_plain, to_plain
from robopolicy.core.world import Controller, World
from robopolicy.data.record import Recorder
from robopolicy.evaluation.episode_batches import EpisodeBatch, play_episode_batch
from robopolicy.evaluation.success import Evaluation, EvaluationResult

PLAY = "robopolicy.building.workers:play_batch"
"""Function that workers run for a batch of an evaluation."""
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
        note_idle(self.pool, batches)
        for place, played in self.pool.map(PLAY, self.items(batches, noise_seed, deterministic)):
            yield place, EpisodeBatch(**played["wave"]), float(played["seconds"])

    def items(self, batches: Sequence[np.ndarray], noise_seed: int, deterministic: bool) -> list[dict[str, Any]]:
        """Return the item of every batch of seeds [n], for the function `PLAY`."""
        shared = self.pool.put(dict(self.job))
        common = {"job": shared, "noise_seed": int(noise_seed), "deterministic": deterministic}
        return [{**common, "seeds": seeds} for seeds in batches]


def play_together(
    asked: Sequence[tuple[BatchPlayers, Evaluation]], noise_seed: int, label: str
) -> list[EvaluationResult]:
    """Play several evaluations at once, so that no worker waits for the end of one; return their results in order.

    Batches of all evaluations are sent together, one evaluation after the other.
    """
    if not asked:
        return []
    pool, batches = asked[0][0].pool, [part for _, evaluation in asked for part in evaluation.parts]
    note_idle(pool, batches)
    items = [
        item
        for players, evaluation in asked
        for item in players.items(evaluation.parts, noise_seed, evaluation.deterministic)
    ]
    places = [(number, place) for number, (_, each) in enumerate(asked) for place in range(len(each.batches))]
    played: list[dict[int, EpisodeBatch]] = [{} for _ in asked]
    seconds = [0.0] * len(asked)
    with progress(label, sum(map(len, batches))) as advance:
        for index, reply in pool.map(PLAY, items):
            number, place = places[index]
            played[number][place] = EpisodeBatch(**reply["wave"])
            seconds[number] += float(reply["seconds"])
            advance(len(batches[index]))
    return [each.result(waves, spent) for (_, each), waves, spent in zip(asked, played, seconds, strict=True)]


@dataclass(frozen=True)
class BatchRecorders:
    """Records batches of episodes on the workers of `pool`; see `robopolicy.data.record.Recorders`.

    job: as in `BatchPlayers`, but its builder returns a `Recorder`.
    """

    pool: Pool
    job: Mapping[str, Any]

    def record(self, seeds: np.ndarray, batches: Sequence[np.ndarray]) -> Iterator[Mapping[str, Any]]:
        """Yield the episodes of every batch of positions [n] in `seeds` [E], in order of arrival."""
        note_idle(self.pool, batches)
        shared = self.pool.put(dict(self.job))
        items = [{"job": shared, "seeds": seeds[positions], "positions": positions} for positions in batches]
        for _, recorded in self.pool.map("robopolicy.building.workers:record_batch", items):
            yield recorded


def note_idle(pool: Pool, batches: Sequence[np.ndarray]) -> None:
    """Print a note if there are fewer batches of episodes than workers."""
    if 0 < len(batches) < pool.workers:
        warnings.warn(
            f"{sum(map(len, batches))} episodes are {len(batches)} batches, so that only {len(batches)} of "
            f"{pool.workers} workers have work: set a smaller world.batch_size.",
            RobopolicyNote,
            stacklevel=4,
        )


@dataclass(frozen=True)
class Workers:
    """The workers of a verb; pool: None if it plays in its own process."""

    config: Config
    pool: Pool | None

    def players(self, builder: str, **arguments: Any) -> BatchPlayers | None:
        """Return the object that plays batches on the workers, None without workers; see `BatchPlayers`."""
        return None if self.pool is None else BatchPlayers(self.pool, self._job(builder, arguments))

    def recorders(self, builder: str, **arguments: Any) -> BatchRecorders | None:
        """Return the object that records episodes on the workers, None without workers; see `BatchRecorders`."""
        return None if self.pool is None else BatchRecorders(self.pool, self._job(builder, arguments))

    def _job(self, builder: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        sections = {name: to_plain(part) for name, part in vars(self.config).items() if is_dataclass(part)}
        return {"builder": builder, "config": sections, "arguments": to_plain(dict(arguments))}


@contextmanager
def open_workers(config: Config) -> Generator[Workers]:
    """Open the workers set in `config.workers` and end them afterwards, also after an error or Ctrl-C."""
    section = config.workers
    if section.pool == "local" and section.count == 1:
        yield Workers(config, None)
        return
    settings = PoolSettings(
        section.count,
        section.address,
        section.allow_unauthenticated,
        section.options,
        config.run.root / "workers",
    )
    with open_pool(section.pool, settings) as pool:
        yield Workers(config, pool)


_built: dict[str, Any] = {}
"""Objects that this worker built last, by job."""


def built(job: Mapping[str, Any]) -> Any:
    """Return the result of the builder of a job; it is built once for successive batches of one job."""
    key = json.dumps(job, sort_keys=True)
    if key not in _built:
        for earlier in _built.values():
            (earlier if isinstance(earlier, Recorder) else earlier[0]).close()
        _built.clear()
        kinds = {name: type(getattr(Config(), name)) for name in job["config"]}
        config = Config(**{name: from_plain(kinds[name], part, name) for name, part in job["config"].items()})
        _built[key] = load_dotted(job["builder"], "Builder")(config, **job["arguments"])
    return _built[key]


def play_batch(job: Mapping[str, Any], seeds: np.ndarray, noise_seed: int, deterministic: bool) -> dict[str, Any]:
    """Play one batch of episodes in a worker; return its outcomes (the fields of `EpisodeBatch`) and seconds."""
    world, policy, device = built(job)
    start = time.perf_counter()
    wave = play_episode_batch(world, policy, np.asarray(seeds), noise_seed, deterministic=deterministic, device=device)
    return {"wave": asdict(wave), "seconds": time.perf_counter() - start}


def record_batch(job: Mapping[str, Any], seeds: np.ndarray, positions: np.ndarray) -> dict[str, Any]:
    """Record one batch of episodes in a worker; return what `Recorder.record` returns."""
    recorder: Recorder = built(job)
    return recorder.record(np.asarray(seeds), np.asarray(positions))
