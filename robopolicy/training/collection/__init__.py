"""Rollout collectors: one protocol, and one collector for each way of interleaving collection and learning."""

import warnings
from dataclasses import replace

import torch

from robopolicy.core import replicas
from robopolicy.core.errors import RobopolicyNote
from robopolicy.core.images import Keeping
from robopolicy.core.policy import Trainable
from robopolicy.core.world import World
from robopolicy.nn.sharing import copy_trainable
from robopolicy.rl.algorithm import Algorithm
from robopolicy.rl.preferences import Pairs
from robopolicy.rl.registry import Need, Slot
from robopolicy.training.acting import Acting, TeacherSchedule
from robopolicy.training.collection.copies import BackgroundCollector, DelayedCollector, PropsCollector
from robopolicy.training.collection.episodes import (
    EpisodeCollector,
    StreamCollector,
    ValuesOf,
    require_one_player,
    start_pool,
    teacher_takes_over,
)
from robopolicy.training.collection.protocol import BatchCollector, Collector
from robopolicy.training.collection.shards import ShardedEpisodes, ShardedStreams, ShardPlayer, Shards, ShardWorkers
from robopolicy.training.collection.shared import shared_by_replicas
from robopolicy.training.collection.stored import StoredPairs
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.demonstrations import Demonstrations
from robopolicy.training.overlap import require_overlap

__all__ = [
    "BatchCollector",
    "Collector",
    "EpisodeCollector",
    "ShardPlayer",
    "ShardWorkers",
    "StreamCollector",
    "make_collector",
    "note_idle_sampler",
    "note_idle_settings",
    "shared_by_replicas",
    "start_pool",
    "teacher_takes_over",
]

WHOLE = frozenset({Need.GROUPS, Need.EPISODES, Need.WHOLE_EPISODES, Need.WHOLE_GROUPS})
"""Needs that require whole episodes; without any of them, rollouts are continuous streams."""


def note_idle_sampler(algorithm: Algorithm, config: FinetuneConfig) -> None:
    """Note that the sampler of initial states has nothing to choose, and why."""
    name = algorithm.resolved.slots[Slot.SAMPLER][0].entry.name
    pool, groups = config.num_initial_states, config.groups
    if not algorithm.needs & WHOLE:
        reason = "this algorithm learns from streams, whose initial states are all new: choose one that compares groups"
    elif not pool:
        reason = "every iteration has new initial states: set num_initial_states to several times groups"
    elif pool <= groups and name != "stages":  # which plays those of its stage alone
        reason = f"every iteration plays all num_initial_states={pool} with groups={groups}: set it to more than that"
    else:
        return
    if name != "uniform":
        warnings.warn(f"sampler={name} has nothing to choose, since {reason}.", RobopolicyNote, stacklevel=3)


EPISODES_ONLY = (
    "num_initial_states", "branch_at", "branch_by", "branch_sampling_step", "max_idle_chunks", "overprovision",
)  # fmt: skip
"""Settings of the collection of whole episodes, which streams do not read."""


def note_idle_settings(algorithm: Algorithm, config: FinetuneConfig) -> None:
    """Note a sampler with nothing to choose, and an allocator and settings of whole episodes for an algorithm that
    learns from streams.
    """
    note_idle_sampler(algorithm, config)
    if algorithm.needs & WHOLE:
        return
    allocator, default = algorithm.resolved.slots[Slot.ALLOCATOR][0].entry.name, FinetuneConfig()
    idle = {name: getattr(config, name) for name in EPISODES_ONLY if getattr(config, name) != getattr(default, name)}
    if allocator != "uniform":
        idle["allocator"] = allocator
    for name, value in idle.items():
        warnings.warn(
            f"{name}={value} has no effect, since this algorithm learns from streams and not from whole episodes: "
            "choose one that compares groups, such as algorithm=grpo.",
            RobopolicyNote,
            stacklevel=3,
        )


def make_collector(
    world: World,
    policy: Trainable,
    algorithm: Algorithm,
    config: FinetuneConfig,
    seed: int,
    generator: torch.Generator,
    demonstrations: Demonstrations | None = None,
    acting: Acting | None = None,
    pairs: Pairs | None = None,
    *,
    images: Keeping = "plain",
    turns: TeacherSchedule | None = None,
    workers: ShardWorkers | None = None,
    values: ValuesOf | None = None,
) -> Collector:
    """Build the collector of `policy`: synchronous, in a background thread, with delayed weights, or in parts (PROPS).

    seed: root of the episodes' seeds; generator: source of the policy's random numbers; demonstrations: states that
    hints start from; acting: builds the acting policy, None for `policy` itself. All but the synchronous one act with a
    copy of the policy. pairs: stored preference pairs instead of collection; images: storage mode of camera images;
    turns: the teacher's share in `acting`; workers: of the shards, None for this process; values: V [B, T], for
    allocators that continue episodes. Raises ConfigError when the algorithm cannot learn so.
    """
    if pairs is not None:
        return StoredPairs(pairs, world.spec, policy, algorithm, config, seed, generator.device)
    require_one_player(algorithm, config)
    require_overlap(algorithm, config)
    note_idle_settings(algorithm, config)

    def in_turns(actor: Trainable, section: FinetuneConfig) -> BatchCollector:
        acts = None if acting is None else acting(actor)
        if section.shards > 1:
            player = ShardPlayer(world, actor, section, acts, turns)
            # In the background, or with other weights, the leader plays them all.
            is_divided = actor is policy and workers is None and replicas.count() > 1
            shards = Shards(player, policy, seed, workers, images=images, is_divided=is_divided)
            if algorithm.needs & WHOLE:
                return ShardedEpisodes(shards, algorithm, section, demonstrations)
            return ShardedStreams(shards, section.rollout_length)
        if algorithm.needs & WHOLE:
            arguments = demonstrations, acts
            return EpisodeCollector(
                world, actor, algorithm, section, seed, generator, *arguments, images=images, values=values
            )
        return StreamCollector(world, actor, section.rollout_length, seed, generator, acts, images=images)

    if not (config.props_parts or config.staleness or config.policy_lag):
        return in_turns(policy, config)
    # Acting with the learner's own weights would change them under a batch that is being played.
    actor = copy_trainable(policy).requires_grad_(False).eval()
    if config.props_parts:
        share = replace(
            config,
            groups=max(1, config.groups // config.props_parts),
            rollout_length=max(1, config.rollout_length // config.props_parts),
        )
        arguments = in_turns(actor, share), policy, actor, world.spec.instructions, generator, config.props_parts
        return PropsCollector(*arguments, past=config.props_past_iterations)
    if config.policy_lag:
        return DelayedCollector(in_turns(actor, config), policy, actor, config.policy_lag)
    return BackgroundCollector(
        in_turns(actor, config),
        policy,
        actor,
        config.staleness,
        restart_every=config.checkpoint_every,
        iterations=config.iterations,
        **({} if turns is None else {"begin": lambda number: turns.begin(number / config.iterations)}),
    )
