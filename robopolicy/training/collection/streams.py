"""Streams of decisions that go on over the ends of episodes, for algorithms with a critic."""

from collections.abc import Mapping
from typing import Any

import torch

from robopolicy.core.images import Keeping
from robopolicy.core.policy import Policy, Trainable
from robopolicy.core.rollouts import Rollouts
from robopolicy.core.world import World
from robopolicy.rl.collect import Streams, play, start_streams
from robopolicy.training.collection.protocol import while_collecting
from robopolicy.training.experience import with_executed


class StreamCollector:
    """Plays every row of `world` on from where the last iteration left it, `rollout_length` decisions at a time.

    seed: root of the episodes' seeds; generator: what the policy draws from; acts: who plays, None for the policy;
    images: how what cameras show is kept.
    """

    def __init__(
        self,
        world: World,
        policy: Trainable,
        rollout_length: int,
        seed: int,
        generator: torch.Generator,
        acts: Policy | None = None,
        *,
        images: Keeping = "plain",
    ):
        self.world = world
        self.policy = policy
        self.rollout_length = rollout_length
        self.seed = seed
        self.acts: Policy = policy if acts is None else acts
        self.generator = generator
        self.images: Keeping = images
        self.streams: Streams | None = None

    def collect(self, iteration: int) -> Rollouts:
        """Return [num_envs, rollout_length] decisions of the policy as it is now."""
        return self.batch(iteration, iteration)

    def batch(self, number: int, version: int) -> Rollouts:
        """Return the next decisions; where streams begin anew, the batch's number names their seeds."""
        with while_collecting(number):
            if self.streams is None:
                self.streams = start_streams(self.world, self.acts, self.seed, f"collect/{number}")
            given = self.world, self.acts, self.rollout_length, self.generator, self.streams
            found = play(*given, version=version, images=self.images)
            return with_executed(found, self.policy, self.world.spec.instructions)

    def observe(self, collected: Rollouts, prepared: Rollouts) -> None:
        """Nothing is learned from outcomes: seeds follow one another."""

    def restart(self) -> None:
        """Begin with fresh episodes at the next call."""
        self.streams = None

    def close(self) -> None:
        """Nothing runs."""

    def tree(self) -> dict[str, Any]:
        """Return nothing: after a checkpoint streams begin anew."""
        return {}

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Nothing to restore."""
