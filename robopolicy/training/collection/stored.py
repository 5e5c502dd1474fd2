"""Collector of stored preference pairs: learning from preferences without stepping the world."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from robopolicy.core.errors import ConfigError, DataError
from robopolicy.core.policy import Trainable
from robopolicy.core.randomness import derive_seed
from robopolicy.core.rollouts import Rollouts
from robopolicy.core.segments import Segments
from robopolicy.core.spec import PolicySpec, WorldSpec
from robopolicy.rl.algorithm import Algorithm
from robopolicy.rl.preferences import Pairs
from robopolicy.rl.registry import Need
from robopolicy.training.configuration import FinetuneConfig
from robopolicy.training.experience import conditions_of


class StoredPairs:
    """A `Collector` that samples `config.groups` groups of stored episodes per iteration, or all when there are fewer.

    Sampling depends on seed and iteration alone. The reward of an episode is its preference label, 1 or -1, so
    algorithms that compare returns follow it. Raises ConfigError when the algorithm does not compare episodes or the
    configuration contains collection settings. Raises DataError when the episodes do not match the policy or the world.
    """

    def __init__(
        self,
        pairs: Pairs,
        world: WorldSpec,
        policy: Trainable,
        algorithm: Algorithm,
        config: FinetuneConfig,
        seed: int,
        device: torch.device,
    ):
        if Need.WHOLE_GROUPS not in algorithm.needs:
            raise ConfigError("Stored pairs need an algorithm that compares the episodes of a group, such as grape.")
        plain = FinetuneConfig()
        playing = [
            f"{name}={str(default).lower()}"
            for name in ("shards", "staleness", "policy_lag", "props_parts", "overprovision", "overlap_update")
            if getattr(config, name) != (default := getattr(plain, name))
        ]
        if playing:
            raise ConfigError(f"Training on stored pairs collects no rollouts: set {' and '.join(playing)}.")
        self.rollouts = _paid_by_verdict(pairs.following(world.instructions).to(device))
        _require_scorable(self.rollouts, policy.spec)
        self.policy, self.instructions = policy, world.instructions
        self.groups, self.seed = config.groups, seed

    def collect(self, iteration: int) -> Rollouts:
        """Return complete groups, marked as replayed and as not collected by this run's policy.

        A frozen encoder's features of their images are added for this iteration.
        """
        groups = Segments.of(self.rollouts.group)
        # On the CPU and of the iteration's number: the same groups on any device, and after a resume.
        draws = torch.Generator().manual_seed(derive_seed(self.seed, f"pairs/{iteration}"))
        indices = torch.randperm(groups.count, generator=draws)[: self.groups].to(groups.index.device)
        group_rollouts = self.rollouts.take(torch.isin(groups.index, indices).nonzero().squeeze(1))
        latents = {**group_rollouts.latents, **conditions_of(group_rollouts, self.policy, self.instructions)}
        return replace(
            group_rollouts, latents=latents, policy_version=torch.full_like(group_rollouts.policy_version, -1)
        ).with_extras(replayed=torch.ones_like(group_rollouts.alive))

    def observe(self, collected: Rollouts, prepared: Rollouts) -> None:
        """Do nothing; no initial states are sampled."""

    def restart(self) -> None:
        """Do nothing; no episode is running."""

    def close(self) -> None:
        """Do nothing; no background work exists."""

    def tree(self) -> dict[str, Any]:
        """Return an empty tree; the stored pairs do not change."""
        return {}

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Do nothing."""


def _paid_by_verdict(rollouts: Rollouts) -> Rollouts:
    """Replace the rewards by the preference label, given at the end of each episode."""
    # The last executed step of the last decision: rewards are summed per step, and padding pays nothing.
    length, last = rollouts.alive.sum(1, keepdim=True), (rollouts.duration - 1).clamp(min=0)[..., None]
    final = torch.zeros_like(rollouts.alive).scatter(1, (length - 1).clamp(min=0), True)
    verdict = torch.where(final, rollouts.extras["preferred"], 0)[..., None].float()
    zeros = torch.zeros(rollouts.valid.shape, device=rollouts.valid.device)
    return replace(rollouts, rewards={"preference": zeros.scatter(-1, last, verdict)})


def _require_scorable(rollouts: Rollouts, policy: PolicySpec) -> None:
    """Raise DataError naming each observation or action field in which policy and stored episodes differ."""
    steps = rollouts.mask.shape[2]
    if steps != policy.scored_steps:
        raise DataError(
            f"Stored chunks have {steps} denoising steps with log-probabilities, the policy has "
            f"{policy.scored_steps}: train on pairs with the policy that collected them, or with one with the same "
            "steps (finetune.finetuned_steps)."
        )
    chunk, size = rollouts.actions.shape[2:]
    if (chunk, size) != (policy.chunk, policy.action.size):
        raise DataError(
            f"Stored action chunks have {chunk} steps of dimension {size}, the policy's have {policy.chunk} "
            f"steps of dimension {policy.action.size}."
        )
    for key, field in policy.observation.items():
        shape = (policy.history, *field.shape)
        stored_shape = rollouts.shown.get(key)
        if stored_shape != shape:
            raise DataError(
                f"Shape of '{key}' in the stored pairs: {stored_shape or 'nothing'}; in the policy: {shape}."
            )
