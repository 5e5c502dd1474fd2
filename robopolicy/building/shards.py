"""Sharded collection on workers: each builds one shard's world and the policy from settings and a checkpoint.

Only settings, learned weights, states of shards and rollouts cross, as plain data with numpy arrays.
"""

import json
import warnings
from collections.abc import Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from robopolicy.building.guidance import acting_guidance_of
from robopolicy.building.policies import choose_device, load_policy, trainable
from robopolicy.building.workers import Workers
from robopolicy.building.worlds import build_world
from robopolicy.configuration import Config
from robopolicy.core.errors import ConfigError, RobopolicyNote
from robopolicy.core.policy import Policy, RecordsMeans, TakesAdapters, Trainable
from robopolicy.core.run import grounds
from robopolicy.core.structured import from_plain, narrowed, to_plain
from robopolicy.core.tensors import to_arrays, to_tensors
from robopolicy.nn.pieces import in_pieces
from robopolicy.nn.precision import learning_in
from robopolicy.nn.sharing import load_learned
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
    if not isinstance(policy, TakesAdapters):
        raise ConfigError(
            f"finetune.lora_rank={rank}: {type(policy).__name__} does not support LoRA adapters. Token policies do."
        )
    policy.add_lora(rank)


def shard_workers(workers: Workers, policy: Path) -> ShardWorkers | None:
    """Return the workers that collect for fine-tuning the checkpoint `policy`, None without workers."""
    config = workers.config
    if workers.pool is None:
        return None
    if config.finetune.shards < workers.pool.workers:
        warnings.warn(
            f"Only {config.finetune.shards} of {workers.pool.workers} workers collect: set finetune.shards="
            f"{workers.pool.workers} (results depend on it).",
            RobopolicyNote,
            stacklevel=3,
        )
    sections = {name: to_plain(part) for name, part in vars(config).items() if is_dataclass(part)}
    job = {"config": sections, "policy": str(policy), "grounds": grounds()}
    return ShardWorkers(workers.pool, "robopolicy.building.shards:play_shard", job)


_players: dict[str, ShardPlayer] = {}
"""The player that this process has built, by its job."""


def play_shard(job: Mapping[str, Any], weights: Mapping[str, Any], item: Mapping[str, Any]) -> dict[str, Any]:
    """Play one batch of one shard in a worker; see `ShardPlayer.play`. weights: learned weights, name -> array."""
    key = json.dumps(job, sort_keys=True)
    if key not in _players:
        for player in _players.values():
            player.world.close()
        _players.clear()
        _players[key] = _built(job)
    player = _players[key]
    load_learned(player.policy, to_tensors(weights, player.device))
    with learning_in(player.config.precision), in_pieces(player.config.micro_batch):
        return to_arrays(player.play(item))


def _built(job: Mapping[str, Any]) -> ShardPlayer:
    """Build a world with the rows of one shard, and the policy that acts in it."""
    kinds = {name: type(getattr(Config(), name)) for name in job["config"]}
    config = Config(**{name: from_plain(kinds[name], part, name) for name, part in job["config"].items()})
    device = choose_device(config.run)
    _require_same_grounds(job["grounds"])
    base = load_policy(Path(job["policy"]), device)
    world = build_world(config.world, base, batch_size=config.finetune.shard_envs, device=device)
    policy = prepared(config, trainable(base, config.lerobot)).eval()
    section = narrowed(FinetuneConfig, config.finetune)
    if Need.MEANS in build_algorithm(section).needs and isinstance(policy, RecordsMeans):
        policy.record_means = True
    guidance = acting_guidance_of(config, world, policy)
    turns = guidance.turns(section.teacher_fraction, section.teacher_decay_fraction)
    acting = guidance.who_acts(turns)
    acts = None if acting is None else acting(policy)
    return ShardPlayer(world, policy, section, acts, turns, images=job["images"])


def _require_same_grounds(expected: Mapping[str, Any]) -> None:
    """Raise ConfigError if this worker rounds otherwise than the process that asks."""
    here = grounds()
    differences = [f"{name} is {here[name]}, not {value}" for name, value in expected.items() if here[name] != value]
    if differences:
        raise ConfigError(
            f"A worker differs from the main process ({'; '.join(differences)}), so results would depend on it: use "
            "workers on equal machines with the same packages."
        )
