"""Batches of seeded episodes, played until all have ended: the basis of success rates and videos.

A batch has as many episodes as the world has rows. Rows whose episode has ended are skipped and not refilled. A
policy's random numbers belong to the episode, so an outcome depends only on the policy, the seeds of episode and noise,
and the mode, not on the batch size. Returns may differ in their last digits, since matrix products with few rows round
differently. An interrupted evaluation therefore keeps its batches in its run folder and, when resumed, ends bit for bit
as an uninterrupted one. Batches from another version of the noise are played again.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from robopolicy.core.action_bounds import OutsideBounds
from robopolicy.core.errors import SpecError
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.player import PlayedStep, Player, PolicyActor, RunningRows, actor_of
from robopolicy.core.policy import Policy, is_memoryless
from robopolicy.core.randomness import NOISE_VERSION, EpisodeGenerator
from robopolicy.core.spec import TASK
from robopolicy.core.storage import read_errors, read_json_lines, storage_errors, write_atomic
from robopolicy.core.temporal import SeenFrames, specification_of
from robopolicy.core.world import Controller, Step, World


@dataclass(frozen=True)
class EpisodeBatch:
    """Outcomes of n episodes, each [n]: success, cut (imagination truncated early) bool; returns; lengths in steps; the
    instructions, as the world gave them; outside: [1 + A] counts of actions beyond the bounds, see
    `OutsideBounds.counts`, None if not counted; own_success: the world's own success [n], where a classifier supplies
    `success`; benchmark_score: the benchmark's own score [n], None if it has none; robustness: of the world's formula
    [n], see `core.temporal`, None without one.
    """

    success: np.ndarray
    returns: np.ndarray
    lengths: np.ndarray
    cut: np.ndarray
    instructions: tuple[str, ...]
    outside: np.ndarray | None = None
    own_success: np.ndarray | None = None
    benchmark_score: np.ndarray | None = None
    robustness: np.ndarray | None = None


def episode_batches(seeds: np.ndarray, batch_size: int) -> Iterator[np.ndarray]:
    """Yield indices into `seeds`, at most `batch_size` at a time, in the order of the seeds' values.

    The order in which a caller lists seeds therefore does not affect any episode.
    """
    order = np.argsort(seeds, kind="stable")
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]


def play_episode_batch(
    world: World,
    policy: Policy | Controller,
    seeds: np.ndarray,
    noise_seed: int,
    *,
    deterministic: bool = True,
    device: torch.device | str = "cpu",
    after_step: Callable[[Step | None], None] | None = None,
    watch: Callable[[PlayedStep[object] | None], None] | None = None,
) -> EpisodeBatch:
    """Play one episode per seed, [n <= B], until all have ended.

    A policy's noise depends on `noise_seed` and the episode's seed (see `EpisodeGenerator`): two policies get the same
    initial states and, if they sample alike, the same noise. Spare rows repeat the batch's seeds and are not counted.
    deterministic: no exploration noise (a denoising policy's initial noise remains); device: device of the policy;
    after_step: called with None after the reset, then after every control step (the chunk is then run step by step).
    watch: called with None before the first chunk, then with every executed chunk. Raises SpecError if the policy does
    not fit the world, or an episode outlasts the world's own horizon.
    """
    count = len(seeds)
    rows = world.batch_size
    horizon = world.spec.horizon
    actor = actor_of(policy, EpisodeGenerator(noise_seed, device), deterministic=deterministic)
    player = Player(world, actor, stepwise=after_step is not None)
    if watch is None and isinstance(actor, PolicyActor) and is_memoryless(actor.policy):
        player.actor = RunningRows(actor, player)
    player.start_batch(seeds)
    instructions = tuple(str(text) for text in player.observation[TASK][:count])
    if after_step is not None:
        after_step(None)
    if watch is not None:
        watch(None)
    outside_bounds = OutsideBounds(world.spec)
    specification = specification_of(world)
    frames = None if specification is None else SeenFrames(specification, player.observation)
    returns = np.zeros(rows)
    lengths = np.zeros(rows, dtype=np.int64)
    step = None
    for part in player:
        step = part.step
        returns += np.where(step.valid, step.reward, 0.0).sum(-1)
        lengths += step.valid.sum(-1)
        outside_bounds.add(part.actions, step.valid & (np.arange(rows) < count)[:, None])
        if frames is not None:
            frames.add(step)
        if after_step is not None:
            after_step(step)
        if watch is not None:
            watch(part)
        if lengths.max() > horizon and player.running.any():
            raise SpecError(f"'{world.spec.name}' has a horizon of {horizon} steps but did not end the episode then.")
    assert step is not None
    truncated = np.zeros(rows, dtype=bool)
    if step.horizon_end is not None:
        truncated = step.horizon_end & ~step.terminated & ~step.truncated
    return EpisodeBatch(
        step.success[:count].copy(),
        returns[:count],
        lengths[:count],
        truncated[:count],
        instructions,
        outside_bounds.counts,
        None if step.own_success is None else step.own_success[:count].copy(),
        None if step.benchmark_score is None else step.benchmark_score[:count].copy(),
        None if frames is None else frames.robustness(lengths[:count]),
    )


class BatchPlayer(Protocol):
    """Plays batches of one policy in one world elsewhere, on workers."""

    def play(
        self, batches: Sequence[np.ndarray], noise_seed: int, deterministic: bool
    ) -> Iterator[tuple[int, EpisodeBatch, float]]:
        """Yield place in `batches`, outcomes and seconds of every batch of seeds [n], in any order."""
        ...


class SavedBatches:
    """Saved batches of an evaluation in one file of JSON lines: its description, then one batch per line.

    of: everything that the outcomes depend on, JSON-serialisable; batches saved under another description are dropped.
    """

    def __init__(self, path: Path, of: Mapping[str, Any]):
        self.path = path
        of = {**of, "noise": NOISE_VERSION}
        self._known: dict[str, tuple[EpisodeBatch, float]] = {}
        records = read_json_lines(path)
        if records and records[0] == of:
            with read_errors(path, "Delete it: the episodes are then played again"):
                self._known = {each["key"]: (_read(each["wave"]), each["seconds"]) for each in records[1:]}
        lines = [json.dumps(of), *(_line(key, *entry) for key, entry in self._known.items())]
        write_atomic(path, "\n".join(lines) + "\n")

    @property
    def episodes(self) -> int:
        """Number of episodes played before this process."""
        return sum(len(wave.success) for wave, _ in self._known.values())

    def known(self, name: str, seeds: np.ndarray) -> tuple[EpisodeBatch, float] | None:
        """Return a saved batch of the evaluation `name` on these seeds [n] and its seconds; None if there is none."""
        return self._known.get(_key(name, seeds))

    def keep(self, name: str, seeds: np.ndarray, wave: EpisodeBatch, seconds: float) -> None:
        """Save a batch of the evaluation `name` on these seeds [n], which took this many seconds."""
        with storage_errors(self.path), self.path.open("a") as file:
            file.write(_line(_key(name, seeds), wave, seconds) + "\n")

    def remove(self) -> None:
        """Delete the file: the result contains everything."""
        self.path.unlink(missing_ok=True)


def _key(name: str, seeds: np.ndarray) -> str:
    return f"{name}: {' '.join(map(str, seeds.tolist()))}"


def _line(key: str, wave: EpisodeBatch, seconds: float) -> str:
    values = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in asdict(wave).items()}
    return json.dumps({"key": key, "wave": values, "seconds": seconds})


def _read(plain: Mapping[str, Any]) -> EpisodeBatch:
    arrays = {name: np.asarray(value) for name, value in plain.items() if name != "instructions" and value is not None}
    return EpisodeBatch(**arrays, instructions=tuple(plain["instructions"]))


keep_former_names(
    __name__,
    {
        "Wave": "EpisodeBatch",
        "waves": "episode_batches",
        "play_wave": "play_episode_batch",
        "KeptWaves": "SavedBatches",
        "Players": "BatchPlayer",
    },
)
