"""Sharded collection: the rows of an iteration are divided into S shards, which any process can play.

A shard's batch is a function of the policy's weights, the shard's state and the batch number. Its random numbers are
those of `derive_seed(seed, "act/<batch>/<shard>")`; its state, a snapshot of the world and the running episodes, is
passed to the batch and returned by it. So results depend on the number of shards, and neither on the number of workers,
nor on their order of arrival, nor on the death of one. Batches are merged in the order of the shards. A world whose
state cannot be passed to another process (see `plain_snapshot`) starts new episodes in every batch of a shard.
"""

import math
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from robopolicy.core import replicas
from robopolicy.core.errors import ConfigError, RobopolicyWarning
from robopolicy.core.exchange import broadcast
from robopolicy.core.images import Keeping
from robopolicy.core.policy import Policy, Trainable
from robopolicy.core.pools import Pool
from robopolicy.core.randomness import derive_seed, episode_seeds
from robopolicy.core.rollouts import Rollouts, concatenate
from robopolicy.core.tensors import bytes_of, to_arrays, to_tensors
from robopolicy.core.world import Snapshot, Snapshots, World, plain_snapshot
from robopolicy.nn.sharing import trainable_state
from robopolicy.rl.algorithm import Algorithm
from robopolicy.rl.collect import Streams, play, start_streams
from robopolicy.rl.episodes import EpisodePlayer, Request
from robopolicy.training.acting import TeacherSchedule
from robopolicy.training.collection.episodes import EpisodeCollector, branching_of
from robopolicy.training.collection.protocol import while_collecting
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.demonstrations import Demonstrations
from robopolicy.training.experience import with_executed

Item = Mapping[str, Any]
"""One batch of one shard, as plain data with tensors or arrays: seed, shard, number and version of the batch, images
(storage mode), teacher_share and state; for streams `length`; for episodes `requests`, `groups` and `part`.
"""


@dataclass(frozen=True)
class ShardWorkers:
    """Workers that play shards.

    function: import path of a function that is called with `job`, `weights` and an item, and returns the arrays of
    `ShardPlayer.play`; job: settings from which a worker builds its world and policy, or the pool's handle of them.
    """

    pool: Pool
    function: str
    job: Any


class ShardPlayer:
    """Plays batches of any shard in `world`, which has the rows of one shard.

    policy: has the weights that act; acts: acting policy, None for `policy`; turns: teacher's share in `acts`.
    """

    def __init__(
        self,
        world: World,
        policy: Trainable,
        config: FinetuneConfig,
        acts: Policy | None = None,
        turns: TeacherSchedule | None = None,
    ):
        self.world = world
        self.policy = policy
        self.config = config
        self.acts: Policy = policy if acts is None else acts
        self.turns = turns
        self.device = next(policy.parameters()).device
        self._episodes: EpisodePlayer | None = None
        self._has_started = False

    def play(self, item: Item) -> dict[str, Any]:
        """Return `rollouts` (tree, None if there is nothing to play), the next `state`, the `held` groups, and
        `restarted`: 1 if the shard started new episodes because its state could not be saved.
        """
        if self.turns is not None:
            self.turns.share = item["teacher_share"]
        return self._play_streams(item) if "length" in item else self._play_episodes(item)

    def _generator(self, item: Item) -> torch.Generator:
        name = "/".join(str(item[key]) for key in ("number", "shard", "part") if key in item)
        return torch.Generator(self.device).manual_seed(derive_seed(item["seed"], f"act/{name}"))

    def _play_streams(self, item: Item) -> dict[str, Any]:
        state = item["state"]
        self.acts.reset()
        if state:
            streams = self._resumed(item["seed"], state)
        else:
            streams = start_streams(self.world, self.acts, item["seed"], f"finetune/{item['number']}/{item['shard']}")
            self._has_started = True
        version, draws = item["version"], self._generator(item)
        rollouts = play(self.world, self.acts, item["length"], draws, streams, version=version, images=item["images"])
        rollouts = with_executed(rollouts, self.policy, self.world.spec.instructions)
        snapshot = plain_snapshot(self.world)
        next_state: dict[str, Any] = {}
        if snapshot is not None:
            next_state = {
                "snapshot": dict(snapshot.arrays),
                "name": streams.name,
                "episodes": streams.episodes,
                "returns": streams.returns,
            }
        restarted = int(state is not None and not state)
        return {"rollouts": rollouts.tree(), "state": next_state, "held": [], "restarted": restarted}

    def _resumed(self, seed: int, state: Mapping[str, Any]) -> Streams:
        """Restore the streams of a shard, whichever world played them before."""
        assert isinstance(self.world, Snapshots)
        if not self._has_started:  # a world's first reset allocates its state, which is then overwritten
            self.world.reset(seeds=episode_seeds(seed, "allocation", self.world.batch_size))
            self._has_started = True
        observation = self.world.restore(Snapshot(state["snapshot"]))
        return Streams(observation, seed, state["name"], state["episodes"], np.array(state["returns"]))

    def _play_episodes(self, item: Item) -> dict[str, Any]:
        if self._episodes is None:
            branching, idle = branching_of(self.config), self.config.max_idle_chunks
            self._episodes = EpisodePlayer(
                self.world, self.acts, branching, max_idle_chunks=idle, images=item["images"]
            )
        player, version = self._episodes, item["version"]
        player.clear()
        if item["state"]:
            player.restore(_on_device(item["state"], self.device))
        requests = [_request(each) for each in item["requests"]]
        if not requests and not player.held:
            return {"rollouts": None, "state": {}, "held": [], "restarted": 0}
        rollouts = player.play(requests, self._generator(item), groups=item["groups"], version=version)
        instructions = self.world.spec.instructions
        rollouts = with_executed(rollouts, self.policy, instructions, version)
        # Held episodes too: only now does the policy have the weights that acted in them.
        player.rescore(lambda held: with_executed(held, self.policy, instructions, version).logp_behaviour)
        lost_count = player.suspend()
        state = player.tree() if player.held else {}
        return {
            "rollouts": rollouts.tree(),
            "state": state,
            "held": sorted(player.held),
            "restarted": int(lost_count > 0),
        }


def _on_device(state: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the state of an `EpisodePlayer` as tensors: chunks on `device`, snapshots of the world on the CPU."""
    tensors: dict[str, Any] = to_tensors(state)
    return {**tensors, **{name: to_tensors(tensors[name], device) for name in ("parts", "shared", "frames")}}


def _plain(request: Request) -> dict[str, Any]:
    """Return a request as plain data, which `_request` reads."""
    state = None if request.state is None else dict(request.state.arrays)
    return {"seed": request.seed, "group": request.group, "task": request.task, "state": state, "limit": request.limit}


def _request(plain: Mapping[str, Any]) -> Request:
    state = None if plain["state"] is None else Snapshot(plain["state"])
    return Request(plain["seed"], plain["group"], plain["task"], state, plain["limit"])


class Shards:
    """The shards of a run: their states, and the workers that play them.

    player: plays in this process, with the weights that act; learner: the policy that is trained, whose learned weights
    are sent; workers: None to play all shards in this process, one after the other; seed: root of all random numbers;
    images: storage mode of camera images; is_divided: whether the processes of a data-parallel run each play a part of
    the shards, all at the same time. Each then has the states of its own shards of streams, and of all of episodes.
    """

    def __init__(
        self,
        player: ShardPlayer,
        learner: Trainable,
        seed: int,
        workers: ShardWorkers | None = None,
        *,
        images: Keeping = "plain",
        is_divided: bool = False,
    ):
        self.player, self.workers = player, workers
        self.is_divided = is_divided
        self.seed = seed
        self.images: Keeping = images
        self.count = player.config.shards
        self.states: list[Mapping[str, Any] | None] = [None] * self.count
        self.held: list[set[int]] = [set() for _ in range(self.count)]
        self.reports: dict[int, Counter[str]] = {}
        self._names = tuple(trainable_state(learner))
        self._has_warned = False

    def play(self, number: int, version: int, items: Sequence[Mapping[str, Any]]) -> list[Rollouts]:
        """Play a batch of every shard and return the rollouts of those that played, in the order of the shards.

        items: entries of each shard's `Item` that are not common to all shards, [S].
        """
        parts = dict(self.arrivals(number, version, items))
        return [parts[shard] for shard in sorted(parts)]

    def arrivals(self, number: int, version: int, items: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Rollouts]]:
        """Yield the number and the rollouts of every shard that played, in order of arrival; arguments as in `play`."""
        share = 0.0 if self.player.turns is None else self.player.turns.share
        common = {"seed": self.seed, "number": number, "version": version, "teacher_share": share}
        common["images"] = self.images
        complete = [
            {**common, "shard": shard, "state": state, **item}
            for shard, (state, item) in enumerate(zip(self.states, items, strict=True))
        ]
        report = self.reports.setdefault(number, Counter())
        restarted = 0
        for shard, reply in self._played(complete, report):
            self.states[shard], self.held[shard] = reply["state"], set(reply["held"])
            restarted += reply["restarted"]
            if reply["rollouts"] is not None:
                yield shard, Rollouts.of(to_tensors(reply["rollouts"], self.player.device))
        if restarted:
            report["shards_restarted"] += restarted
            self._warn()

    def _played(self, items: Sequence[Item], report: Counter[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
        workers = self.workers
        if workers is None and self.is_divided:
            yield from self._played_by_all(items)
            return
        if workers is None:
            yield from ((shard, self.player.play(item)) for shard, item in enumerate(items))
            return
        state = self.player.policy.state_dict()
        weights = to_arrays({name: state[name] for name in self._names})
        plain = [to_arrays(item) for item in items]
        shared = {"job": workers.job, "weights": workers.pool.put(weights)}
        report["bytes_sent"] += bytes_of(weights) + bytes_of(plain)
        for shard, reply in workers.pool.map(workers.function, [{**shared, "item": item} for item in plain]):
            report["bytes_received"] += bytes_of(reply)
            yield shard, reply

    def _played_by_all(self, items: Sequence[Item]) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Play every R-th shard in each of R processes of a data-parallel run; yield those of all."""
        own = {
            shard: self.player.play(item)
            for shard, item in enumerate(items)
            if shard % replicas.count() == replicas.rank()
        }
        for source in range(replicas.count()):
            replies = broadcast(partial(_sent, own, items), source)
            for shard in range(source, len(items), replicas.count()):
                yield shard, own[shard] if shard in own else {"state": {}, **replies[str(shard)]}

    def _warn(self) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        world, chunk = self.player.world.spec, self.player.policy.spec.chunk
        warnings.warn(
            f"The state of the world '{world.name}' cannot be saved, so with shards={self.count} unfinished "
            "episodes start again in every iteration (shards_restarted in metrics.jsonl). To collect complete "
            f"episodes, set rollout_length={math.ceil(world.horizon / chunk)} and overprovision=0, "
            "or shards=1.",
            RobopolicyWarning,
            stacklevel=4,
        )

    def restart(self) -> None:
        """Forget the streams of all shards; the next batch starts new ones."""
        self.states = [None] * self.count

    def report(self, number: int) -> dict[str, float]:
        """Return and forget the metrics of a batch: bytes sent and received, and shards that started again."""
        return {name: float(value) for name, value in self.reports.pop(number, Counter[str]()).items()}


def _sent(replies: Mapping[int, Mapping[str, Any]], items: Sequence[Item]) -> dict[str, Any]:
    """Return the replies of own shards as others need them: without the states of streams, which stay here."""
    return {
        str(shard): {name: to_tensors(value) for name, value in reply.items() if name != "state" or "requests" in item}
        for shard, reply in replies.items()
        for item in (items[shard],)
    }


class ShardedStreams:
    """A `BatchCollector` of streams in shards, `length` policy calls at a time."""

    def __init__(self, shards: Shards, length: int):
        self.shards, self.length = shards, length

    def collect(self, iteration: int) -> Rollouts:
        """Return [num_envs, length] action chunks of the current policy."""
        return self.batch(iteration, iteration)

    def batch(self, number: int, version: int) -> Rollouts:
        """Return the next chunks; where streams start, batch number and shard determine their seeds."""
        with while_collecting(number):
            return concatenate(self.shards.play(number, version, [{"length": self.length}] * self.shards.count))

    def observe(self, collected: Rollouts, prepared: Rollouts) -> None:
        """Do nothing; seeds do not depend on outcomes."""

    def restart(self) -> None:
        """Start new episodes at the next call."""
        self.shards.restart()

    def close(self) -> None:
        """Do nothing; whoever opened the workers closes them."""

    def report(self, number: int) -> dict[str, float]:
        """Return the metrics of a batch."""
        return self.shards.report(number)

    def tree(self) -> dict[str, Any]:
        """Return an empty tree; after a checkpoint streams restart."""
        return {}

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Do nothing; there is no state."""


class ShardedEpisodes(EpisodeCollector):
    """Collects groups of complete episodes in shards; all episodes of a group are played in the same shard.

    Sampler, allocator and hint choose groups of all shards together. With over-provisioning every shard waits for its
    own share of the groups.
    """

    def __init__(
        self, shards: Shards, algorithm: Algorithm, config: FinetuneConfig, demonstrations: Demonstrations | None = None
    ):
        player = shards.player
        unused = torch.Generator()
        super().__init__(
            player.world, player.policy, algorithm, config, shards.seed, unused, demonstrations, player.acts
        )
        if config.groups < shards.count:
            raise ConfigError(
                f"{config.groups} groups per batch cannot be divided into shards={shards.count}: set a larger "
                "finetune.groups, or fewer shards."
            )
        self.shards = shards
        self.targets = [(config.groups + shard) // shards.count for shard in reversed(range(shards.count))]
        self.shares = [math.ceil((1 + config.overprovision) * target) for target in self.targets]
        self.provision = sum(self.shares)
        self.places: dict[int, int] = {}

    @property
    def held(self) -> set[int]:
        """Groups that were requested and not yet returned, of all shards."""
        return set[int]().union(*self.shards.held)

    def arrivals(self, iteration: int) -> Iterator[tuple[int, Rollouts]]:
        """Yield the number of a shard and the episodes of its groups, of the current policy, as soon as they are
        played.

        Only for allocators that add no episodes to played groups.
        """
        with while_collecting(iteration):
            name, first = str(iteration), iteration * self.provision
            seeds, starts = self._propose(name, self.provision)
            requests = self._requests(iteration, name, first, seeds, starts)
            items = self._items(requests(list(self._sizes(starts))), None, 0)
            for shard, rollouts in self.shards.arrivals(iteration, iteration, items):
                yield shard, self._with_origins(rollouts)
            self.begun = {}

    def _play(
        self, requests: Sequence[Request], batch: int, version: int, groups: int | None = None, *, again: int = 0
    ) -> Rollouts:
        items = self._items(requests, groups, again)
        rollouts = concatenate(self.shards.play(batch, version, items), same_groups=True)
        returned = set(rollouts.group.tolist())
        if self.config.overprovision:
            self.places = {group: shard for group, shard in self.places.items() if group not in returned}
        return rollouts

    def _items(self, requests: Sequence[Request], groups: int | None, again: int) -> list[dict[str, Any]]:
        """Return the entries of each shard's `Item`; arguments as in `_play`."""
        if not again:
            self._deal(requests)
        return [
            {
                "requests": [_plain(each) for each in requests if self.places[each.group] == shard],
                "groups": None if groups is None else self.targets[shard],
                "part": again,
            }
            for shard in range(self.shards.count)
        ]

    def _deal(self, requests: Sequence[Request]) -> None:
        """Assign the groups of new requests to shards in turn, up to each shard's share."""
        if not self.config.overprovision:
            self.places = {}
        needs = [share - len(held) for share, held in zip(self.shares, self.shards.held, strict=True)]
        turns = (shard for turn in range(max(needs)) for shard, need in enumerate(needs) if turn < need)
        groups = dict.fromkeys(request.group for request in requests)
        self.places |= dict(zip(groups, turns, strict=False))

    def _finished(self, rollouts: Rollouts, version: int) -> Rollouts:
        """Return the rollouts as they are: the shards have scored the executed parts of chunks."""
        return rollouts

    def restart(self) -> None:
        """Do nothing: episodes are suspended after every batch, and resume at the next call."""

    def report(self, number: int) -> dict[str, float]:
        """Return the metrics of a batch."""
        return self.shards.report(number)

    def _player_tree(self) -> dict[str, Any]:
        states = {str(shard): to_tensors(state or {}) for shard, state in enumerate(self.shards.states)}
        return {"states": states, "held": [sorted(held) for held in self.shards.held]}

    def _restore_player(self, tree: Mapping[str, Any]) -> bool:
        if len(tree.get("states", ())) != self.shards.count:
            return False
        self.shards.states = [tree["states"][str(shard)] for shard in range(self.shards.count)]
        self.shards.held = [set(held) for held in tree["held"]]
        self.places = {group: shard for shard, held in enumerate(self.shards.held) for group in held}
        return True
