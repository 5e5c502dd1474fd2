"""Where an iteration's rollouts come from: endless streams for a critic, or groups of whole episodes to compare."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.errors import NonFiniteError
from robopolicy.core.policy import Policy
from robopolicy.core.randomness import derive, episode_seeds
from robopolicy.core.rollouts import Rollouts, concatenate
from robopolicy.core.world import World
from robopolicy.rl.algorithm import Algorithm
from robopolicy.rl.collect import Streams, play, start_streams
from robopolicy.rl.episodes import Branching, EpisodePlayer, groups_of
from robopolicy.rl.mechanisms import Need
from robopolicy.training.configuration import FinetuneConfig


class Collector:
    """Collects for one run; everything it needs after a restart is (seed, iteration) and the sampler's state.

    Streams and episodes in flight are dropped by `restart`, which the trainer calls at every checkpoint whether or not
    the run was killed: so no world state has to be saved.
    """

    def __init__(self, world: World, policy: Policy, algorithm: Algorithm, config: FinetuneConfig, seed: int):
        self.world, self.policy, self.config, self.seed = world, policy, config, seed
        self.algorithm = algorithm
        self.grouped = Need.GROUPS in algorithm.needs or Need.EPISODES in algorithm.needs
        self.sampler = algorithm.sampler()
        self.allocator = algorithm.allocator()
        self.streams: Streams | None = None
        self.player = EpisodePlayer(world, policy, Branching(config.branch_at, config.branch_width))
        self.starts = np.zeros(0, dtype=np.int64)

    def restart(self) -> None:
        """Begin with fresh episodes at the next call."""
        self.streams = None
        self.player.clear()

    def collect(self, iteration: int, generator: torch.Generator, where: str) -> Rollouts:
        """Return the rollouts of an iteration."""
        try:
            if self.grouped:
                return self._groups(iteration, generator)
            if self.streams is None:
                self.streams = start_streams(self.world, self.policy, self.seed, f"collect/{iteration}")
            return play(self.world, self.policy, self.config.decisions, generator, self.streams)
        except NonFiniteError as error:
            raise NonFiniteError(f"{error} It happened while collecting for {where}.") from error

    def observe(self, collected: Rollouts, prepared: Rollouts) -> None:
        """Tell the sampler what came of the starts it proposed: all that was collected, and what is learned from."""
        count = len(self.starts)

        def per_start(values: Tensor, group: Tensor) -> np.ndarray:
            total = torch.zeros(count, dtype=torch.float64, device=values.device)
            return total.index_add_(0, group, values.double()).cpu().numpy()

        episodes = per_start(torch.ones_like(collected.group), collected.group)
        won = per_start(collected.row_success, collected.group)
        size = prepared.extras["advantage"].abs().mean((1, 2))
        advantage = per_start(size, prepared.group) / np.maximum(episodes, 1)
        self.sampler.observe(self.starts, won, episodes, advantage)

    def _groups(self, iteration: int, generator: torch.Generator) -> Rollouts:
        """Play the groups that sampler and allocator ask for, and what the allocator adds after seeing them."""
        config = self.config
        if config.starts:
            pool = episode_seeds(self.seed, "starts", config.starts)
            draws = np.random.default_rng(derive(self.seed, f"starts/{iteration}"))
            self.starts = self.sampler.propose(config.groups, config.starts, draws)
            seeds = pool[self.starts]
        else:
            seeds = episode_seeds(self.seed, f"collect/{iteration}", config.groups)
            self.starts = np.arange(len(seeds))
        instructions = len(self.world.spec.instructions)
        tasks = (self.starts % instructions).tolist() if config.starts and instructions > 1 else []
        sizes = self.allocator.plan(self.sampler.predict(self.starts), config.group_size)
        rollouts = self.player.play(groups_of(seeds, list(sizes), tasks), generator, version=iteration)
        won = np.bincount(rollouts.group.cpu(), rollouts.row_success.cpu(), len(seeds))
        played = np.bincount(rollouts.group.cpu(), minlength=len(seeds))
        more = self.allocator.extend(won / np.maximum(played, 1), played)
        if not sum(more):
            return rollouts
        added = self.player.play(groups_of(seeds, list(more), tasks), generator, version=iteration)
        return concatenate([rollouts, added])

    def tree(self) -> dict[str, Any]:
        """Return the sampler's state."""
        return self.sampler.state()

    def restore(self, tree: dict[str, Any]) -> None:
        """Go on from `tree`."""
        self.sampler.restore(tree)
