"""Fine-tuning on workers: each builds worlds and policy from settings and a checkpoint, collects shards and evaluates.

Only settings, learned weights, states of shards, rollouts and outcomes cross, as plain data with numpy arrays.
"""

import json
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from robopolicy.building.guidance import acting_guidance_of
from robopolicy.building.policies import choose_device, load_policy, trainable
from robopolicy.building.workers import Workers
from robopolicy.building.worlds import build_collection_world, build_world
from robopolicy.configuration import Config
from robopolicy.core.errors import ConfigError, RobopolicyNote
from robopolicy.core.modules import Weights
from robopolicy.core.policy import Policy, RecordsMeans, SupportsLora, Trainable
from robopolicy.core.pools import Pool
from robopolicy.core.run import grounds
from robopolicy.core.structured import from_plain, narrowed, to_plain
from robopolicy.core.tensors import to_arrays, to_tensors
from robopolicy.core.world import World
from robopolicy.evaluation.episode_batches import EpisodeBatch, play_episode_batch
from robopolicy.nn.micro_batches import in_micro_batches
from robopolicy.nn.precision import training_precision
from robopolicy.nn.sharing import load_trainable_state, trainable_state
from robopolicy.rl.algorithm import build_algorithm
from robopolicy.rl.registry import Need
from robopolicy.training.collection import ShardPlayer, ShardWorkers
from robopolicy.training.configuration import FinetuneConfig


def prepared(config: Config, policy: Trainable) -> Trainable:
    """Return `policy`, prepared for fine-tuning: its denoising steps, frozen encoders and LoRA adapters."""
    section = config.finetune
    policy.prepare_finetuning(section.finetuned_steps, train_encoder=section.train_encoder)
    add_lora(policy, section.lora_rank)
    return policy


def add_lora(policy: Policy, rank: int) -> None:
    """Train LoRA adapters of this rank instead of the policy's weights; ConfigError for policies without adapters."""
    if not rank:
        return
    if not isinstance(policy, SupportsLora):
        raise ConfigError(
            f"finetune.lora_rank={rank}: {type(policy).__name__} does not support LoRA adapters. Token policies do."
        )
    policy.add_lora(rank)


@dataclass(frozen=True)
class TuningWorkers:
    """Workers of one fine-tuning run: they collect and evaluate with the current weights.

    pool: None if the run collects and evaluates in its own process; job: handle of the settings from which a worker
    builds worlds and policy.
    """

    pool: Pool | None
    job: Any = None

    @staticmethod
    def of(workers: Workers, policy: Path) -> "TuningWorkers":
        """Return the workers that fine-tune the checkpoint `policy`."""
        config = workers.config
        if workers.pool is None:
            return TuningWorkers(None)
        count, shards = workers.pool.workers, config.finetune.shards
        if shards < count:
            warnings.warn(
                f"Only {shards} of {count} workers collect: set finetune.shards={count}; results depend on it.",
                RobopolicyNote,
                stacklevel=3,
            )
        sections = {name: to_plain(part) for name, part in vars(config).items() if is_dataclass(part)}
        pool = OneAtATime(workers.pool)
        return TuningWorkers(pool, pool.put({"config": sections, "policy": str(policy), "grounds": grounds()}))

    @property
    def collecting(self) -> ShardWorkers | None:
        """The workers that play shards, None for this process."""
        return None if self.pool is None else ShardWorkers(self.pool, f"{__name__}:play_shard", self.job)

    def players(self, policy: Policy) -> "TunedPlayers | None":
        """Return the workers that evaluate `policy`, the policy of this run or a copy, with its current weights; None
        for this process.
        """
        return None if self.pool is None else TunedPlayers(self.pool, self.job, policy)


@dataclass(frozen=True)
class TunedPlayers:
    """Plays batches of a policy that is being fine-tuned; see `robopolicy.evaluation.success.Players`."""

    pool: Pool
    job: Any
    policy: Policy

    def play(
        self, batches: Sequence[np.ndarray], noise_seed: int, deterministic: bool
    ) -> Iterator[tuple[int, EpisodeBatch, float]]:
        """Yield place in `batches`, outcomes and seconds of every batch of seeds [n], in order of arrival."""
        common = {"job": self.job, "weights": self.pool.put(to_arrays(trainable_state(cast(Weights, self.policy))))}
        common |= {"noise_seed": int(noise_seed), "deterministic": deterministic}
        items = [{**common, "seeds": seeds} for seeds in batches]
        for place, played in self.pool.map(f"{__name__}:play_tuned", items):
            yield place, EpisodeBatch(**played["wave"]), float(played["seconds"])


class OneAtATime:
    """A pool for several threads, such as collection parallel to learning and evaluation: one `map` at a time."""

    def __init__(self, pool: Pool):
        self.pool, self.workers = pool, pool.workers
        self._lock = threading.Lock()

    def put(self, value: Any) -> Any:
        """Store a value in the pool; return its handle."""
        return self.pool.put(value)

    def map(self, function: str, items: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Any]]:
        """Yield (index of the item, result of `function`) as `Pool.map`, once no other thread does."""
        with self._lock:
            yield from self.pool.map(function, items)

    def close(self) -> None:
        """Close the pool."""
        self.pool.close()


@dataclass
class _Place:
    """World, policy and configuration that a worker has built for a job."""

    config: Config
    base: Policy
    player: ShardPlayer
    judging: World | None = None

    def world_for_evaluation(self) -> World:
        """Return the world of evaluations, which is built when it is first needed."""
        if self.judging is None:
            device, episodes = self.player.device, self.config.finetune.evaluate_episodes
            self.judging = build_world(self.config.world, self.base, episodes=episodes, device=device)
        return self.judging

    def close(self) -> None:
        """Close the worlds."""
        self.player.world.close()
        if self.judging is not None:
            self.judging.close()


_places: dict[str, _Place] = {}
"""The worlds and policy that this process has built last, by their job."""


def play_shard(job: Mapping[str, Any], weights: Mapping[str, Any], item: Mapping[str, Any]) -> dict[str, Any]:
    """Play one batch of one shard in a worker; see `ShardPlayer.play`. weights: learned weights, name -> array."""
    player = _place_with(job, weights).player
    with training_precision(player.config.precision), in_micro_batches(player.config.micro_batch):
        return to_arrays(player.play(item))


def play_tuned(
    job: Mapping[str, Any], weights: Mapping[str, Any], seeds: np.ndarray, noise_seed: int, deterministic: bool
) -> dict[str, Any]:
    """Play one batch of an evaluation in a worker; return its outcomes (the fields of `EpisodeBatch`) and seconds."""
    place = _place_with(job, weights)
    world, player = place.world_for_evaluation(), place.player
    options = {"deterministic": deterministic, "device": player.device}
    start = time.perf_counter()
    wave = play_episode_batch(world, player.policy, np.asarray(seeds), noise_seed, **options)
    return {"wave": asdict(wave), "seconds": time.perf_counter() - start}


def _place_with(job: Mapping[str, Any], weights: Mapping[str, Any]) -> _Place:
    """Return the worlds and policy of a job, built if necessary, with these weights."""
    key = json.dumps(job, sort_keys=True)
    if key not in _places:
        for place in _places.values():
            place.close()
        _places.clear()
        _places[key] = _built(job)
    place = _places[key]
    load_trainable_state(place.player.policy, to_tensors(weights, place.player.device))
    return place


def _built(job: Mapping[str, Any]) -> _Place:
    """Build a world with the rows of one shard, and the policy that acts in it."""
    kinds = {name: type(getattr(Config(), name)) for name in job["config"]}
    config = Config(**{name: from_plain(kinds[name], part, name) for name, part in job["config"].items()})
    device = choose_device(config.run)
    _require_same_grounds(job["grounds"])
    base = load_policy(Path(job["policy"]), device)
    world = build_collection_world(config, base, device)
    policy = prepared(config, trainable(base, config.lerobot)).eval()
    section = narrowed(FinetuneConfig, config.finetune)
    if Need.MEANS in build_algorithm(section).needs and isinstance(policy, RecordsMeans):
        policy.record_means = True
    guidance = acting_guidance_of(config, world, policy)
    turns = guidance.turns(section.teacher_fraction, section.teacher_decay_fraction)
    acting = guidance.who_acts(turns, section.teacher_episode_fraction, rows=world.batch_size)
    acts = None if acting is None else acting(policy)
    return _Place(config, base, ShardPlayer(world, policy, section, acts, turns))


def _require_same_grounds(expected: Mapping[str, Any]) -> None:
    """Raise ConfigError if this worker rounds differently from the main process."""
    here = grounds()
    differences = [f"{name} is {here[name]}, not {value}" for name, value in expected.items() if here[name] != value]
    if differences:
        raise ConfigError(
            f"A worker differs from the main process ({'; '.join(differences)}), so results would depend on it: use "
            "workers on equal machines with the same packages."
        )
