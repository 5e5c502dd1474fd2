"""A world and workers for tests of sharded collection, which another process can build as well."""

import os
import pickle
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from bandit_toys import BanditWorld, ChainPolicy, SavesRows

from robopolicy.core.randomness import uniforms
from robopolicy.core.registry import load_dotted
from robopolicy.core.structured import from_plain
from robopolicy.core.tensors import to_arrays, to_tensors
from robopolicy.nn.sharing import load_trainable_state
from robopolicy.training.collection import ShardPlayer
from robopolicy.training.configuration import FinetuneConfig


class UnevenWorld(BanditWorld):
    """Episodes of 1 to 24 steps, most of them short, by their seed."""

    def __init__(self, batch_size: int):
        super().__init__(batch_size, horizon=24)

    def reset(self, rows=None, seeds=None, options=None):
        super().reset(rows, seeds, options)
        chosen = np.arange(self.batch_size) if rows is None else np.asarray(rows)
        drawn = uniforms(np.asarray(seeds), 5)[:, 4]
        self.time[chosen] = 24 - np.ceil(drawn**3 * 24).astype(int)
        return self.observe()


class SavedWorld(SavesRows, UnevenWorld):
    """The same, with rows that can be saved."""


def player_of(job: Mapping[str, Any]) -> ShardPlayer:
    """Build the world and policy of a job."""
    world = {"saved": SavedWorld, "uneven": UnevenWorld}[job["world"]](job["rows"])
    return ShardPlayer(world, ChainPolicy(), from_plain(FinetuneConfig, job["config"], "finetune"))


_players: list[ShardPlayer] = []


def play_shard(job, weights, item):
    """Play a shard as a worker does; dies where `job` says so."""
    marker = Path(job["kill"]) if job.get("kill") else None
    if marker is not None and (item["number"], item["shard"]) == (2, 1) and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if not _players:
        _players.append(player_of(job))
    load_trainable_state(_players[0].policy, to_tensors(weights))
    return to_arrays(_players[0].play(item))


def _sent(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))  # noqa: S301


class ShuffledPool:
    """A pool in this process: each item goes through pickle to any of `workers` players, in any order."""

    def __init__(self, workers: int, seed: int = 0):
        self.workers, self.draws = workers, np.random.default_rng(seed)
        self.players: list[list[ShardPlayer]] = [[] for _ in range(workers)]

    def put(self, value: Any) -> Any:
        return _sent(value)

    def map(self, function: str, items: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Any]]:
        play = load_dotted(function, "Function")
        for index in map(int, self.draws.permutation(len(items))):
            before = _players[:]
            chosen = int(self.draws.integers(self.workers))
            _players[:] = self.players[chosen]
            reply = play(**_sent(dict(items[index])))
            self.players[chosen], _players[:] = _players[:], before
            yield index, _sent(reply)

    def close(self) -> None:
        pass
