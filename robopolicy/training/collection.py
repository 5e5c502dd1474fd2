"""Where an iteration's rollouts come from: endless streams for a critic, or groups of whole episodes to compare."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.errors import NonFiniteError
from robopolicy.core.policy import Policy
from robopolicy.core.randomness import derive, episode_seeds
from robopolicy.core.rollouts import Rollouts, concatenate
from robopolicy.core.world import Snapshot, World
from robopolicy.rl.algorithm import Algorithm
from robopolicy.rl.collect import Streams, play, start_streams
from robopolicy.rl.context import Context
from robopolicy.rl.episodes import Branching, EpisodePlayer, Request, groups_of
from robopolicy.rl.registry import Need
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.demonstrations import Demonstrations
from robopolicy.training.experience import with_executed


def start_pool(seed: int, starts: int, instructions: int = 1) -> tuple[np.ndarray, list[int]]:
    """Return the seeds of a run's pool of starts and, where there are several instructions, each start's: i mod n."""
    tasks = [start % instructions for start in range(starts)] if instructions > 1 else []
    return episode_seeds(seed, "starts", starts), tasks


class Collector:
    """Collects for one run; everything it needs after a restart is (seed, batch) and the sampler's state.

    Streams and episodes in flight are dropped by `restart`, which the trainer calls at every checkpoint whether or not
    the run was killed: so no world state has to be saved.
    """

    def __init__(
        self,
        world: World,
        policy: Policy,
        algorithm: Algorithm,
        config: FinetuneConfig,
        seed: int,
        demonstrations: Demonstrations | None = None,
    ):
        self.world, self.policy, self.config, self.seed = world, policy, config, seed
        self.grouped = bool(algorithm.needs & {Need.GROUPS, Need.EPISODES, Need.WHOLE_EPISODES, Need.WHOLE_GROUPS})
        self.sampler = algorithm.sampler()
        self.allocator = algorithm.allocator()
        self.hint = None if algorithm.hint is None else algorithm.hint()
        self.demonstrations = demonstrations
        self.depth_of: dict[int, float] = {}
        self.streams: Streams | None = None
        self.player = EpisodePlayer(
            world, policy, Branching(config.branch_at, config.branch_width, config.branch_sampling_step)
        )
        self.start_of: dict[int, int] = {}

    def restart(self) -> None:
        """Begin with fresh episodes at the next call."""
        self.streams = None
        self.player.clear()
        self.start_of, self.depth_of = {}, {}

    def collect(self, batch: int, generator: torch.Generator, version: int | None = None) -> Rollouts:
        """Return the rollouts of batch number `batch`, made by version `version` (default: batch) of the policy.

        Grouped rollouts say in extras["start"] [B, T] which start of the pool each episode had.
        """
        version = batch if version is None else version
        try:
            rollouts = (
                self._groups(batch, generator, version) if self.grouped else self._play(batch, generator, version)
            )
        except NonFiniteError as error:
            raise NonFiniteError(
                f"{error} It happened while collecting for fine-tuning iteration {batch + 1}."
            ) from error
        return with_executed(rollouts, self.policy, self.world.spec.instructions)

    def observe(self, collected: Rollouts, prepared: Rollouts) -> None:
        """Tell the sampler what came of the starts it proposed: all that was collected, and what is learned from."""
        found, place = torch.unique(collected.extras["start"][:, 0], return_inverse=True)

        def per_start(values: Tensor, index: Tensor) -> np.ndarray:
            total = torch.zeros(len(found), dtype=torch.float64, device=values.device)
            return total.index_add_(0, index, values.double()).cpu().numpy()

        episodes = per_start(torch.ones_like(place), place)
        won = per_start(collected.row_success, place)
        learned = torch.searchsorted(found, prepared.extras["start"][:, 0].contiguous())
        advantage = per_start(prepared.extras["advantage"].abs().mean((1, 2)), learned) / episodes
        starts = found.cpu().numpy()
        self.sampler.observe(starts, won, episodes, advantage)
        if self.hint is not None:
            depth = per_start(collected.extras["hint"][:, 0], place) / episodes
            self.hint.observe(starts, depth, won / episodes)

    def _play(self, batch: int, generator: torch.Generator, version: int) -> Rollouts:
        if self.streams is None:
            self.streams = start_streams(self.world, self.policy, self.seed, f"collect/{batch}")
        return play(self.world, self.policy, self.config.rollout_length, generator, self.streams, version=version)

    def _groups(self, batch: int, generator: torch.Generator, version: int) -> Rollouts:
        """Play the groups that sampler and allocator ask for, and what the allocator adds after seeing them."""
        config, first = self.config, batch * self.config.groups
        seeds, starts = self._propose(batch)
        _, pool = start_pool(self.seed, config.starts, len(self.world.spec.instructions))
        tasks = [pool[start] for start in starts] if pool else []
        self.start_of |= {first + number: int(start) for number, start in enumerate(starts)}
        states, depths = self._hinted(batch, starts)
        self.depth_of |= {first + number: depth for number, depth in enumerate(depths)}

        def requests(sizes: list[int]) -> list[Request]:
            asked = groups_of(seeds, sizes, tasks)
            return [replace(item, group=first + item.group, state=states[item.group]) for item in asked]

        sizes = self.allocator.plan(self.sampler.predict(starts), config.group_size)
        enough = None if config.unfinished == 0 else math.ceil((1 - config.unfinished) * sum(sizes))
        rollouts = self.player.play(requests(list(sizes)), generator, enough=enough, version=version)
        own = rollouts.group >= first
        won = np.bincount((rollouts.group[own] - first).cpu(), rollouts.row_success[own].cpu(), len(seeds))
        played = np.bincount((rollouts.group[own] - first).cpu(), minlength=len(seeds))
        more = self.allocator.extend(won / np.maximum(played, 1), played)
        if sum(more):
            added = self.player.play(requests(list(more)), generator, version=version)
            rollouts = concatenate([rollouts, added])
        groups, device = rollouts.group.tolist(), rollouts.group.device
        start = torch.tensor([self.start_of[group] for group in groups], device=device)
        depth = torch.tensor([self.depth_of[group] for group in groups], device=device)
        shape = rollouts.shape
        return rollouts.with_extras(start=start[:, None].expand(shape), hint=depth[:, None].expand(shape))

    def _hinted(self, batch: int, starts: np.ndarray) -> tuple[list[Snapshot | None], list[float]]:
        """Return the demonstrated state that each start's group begins in (None: the start), and how far that is."""
        if self.hint is None or self.demonstrations is None:
            return [None] * len(starts), [0.0] * len(starts)
        context = Context(torch.Generator(), iteration=batch, iterations=self.config.iterations)
        draws = np.random.default_rng(derive(self.seed, f"hints/{batch}"))
        depths = self.hint.depth(starts, self.sampler.predict(starts), context, draws)
        found = [
            self.demonstrations.state(int(start), float(depth)) for start, depth in zip(starts, depths, strict=True)
        ]
        return [state for state, _ in found], [depth for _, depth in found]

    def _propose(self, batch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return seeds and numbers of the starts to play."""
        config = self.config
        if not config.starts:
            return episode_seeds(self.seed, f"collect/{batch}", config.groups), np.arange(config.groups)
        draws = np.random.default_rng(derive(self.seed, f"starts/{batch}"))
        starts = self.sampler.propose(config.groups, config.starts, draws)
        return start_pool(self.seed, config.starts)[0][starts], starts

    def tree(self) -> dict[str, Any]:
        """Return the sampler's state, and the hints'."""
        return {"sampler": self.sampler.state(), "hint": {} if self.hint is None else self.hint.state()}

    def restore(self, tree: dict[str, Any]) -> None:
        """Go on from `tree`."""
        self.sampler.restore(tree["sampler"])
        if self.hint is not None:
            self.hint.restore(tree["hint"])
