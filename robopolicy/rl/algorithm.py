"""Algorithms as combinations of mechanisms, one or several per slot; presets are named combinations."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from robopolicy.core.rollouts import Rollouts
from robopolicy.rl.advantages import tree
from robopolicy.rl.configuration import AlgorithmConfig, Resolved
from robopolicy.rl.context import Coefficients, Context, Scored, SideModel
from robopolicy.rl.initial_states import Allocator, Hints, TaskSampler
from robopolicy.rl.presets import RatioLevel
from robopolicy.rl.registry import Need, Slot
from robopolicy.rl.replay import Replay
from robopolicy.rl.weights import episode_sizes


@dataclass(frozen=True)
class Algorithm:
    """Mechanisms with bound options, ready to be called.

    resolved: the chosen mechanisms and their needs; rewards: (rollouts, context) -> rollouts; advantage: (rollouts,
    context) -> [B, T] or [B, T, K]; credit: (rollouts, A [B, T, K], context) -> A; selection: (rollouts, context) ->
    keep [B] or [B, 1]; coefficient: scored -> (c, stats); weight: (mask, rollouts) -> [b, t, K]; auxiliaries,
    controllers, models: by name. Controllers, models, sampler, allocator, replay and hint are constructors.
    """

    resolved: Resolved
    advantage: Callable[..., Tensor | tuple[Tensor, Tensor]]
    coefficient: Callable[[Scored], Coefficients]
    weight: Callable[..., Tensor]
    rewards: tuple[Callable[..., Rollouts], ...]
    credit: tuple[Callable[..., Tensor], ...]
    selection: tuple[Callable[..., Tensor], ...]
    auxiliaries: Mapping[str, Callable[..., Tensor]]
    controllers: Mapping[str, Callable[..., Any]]
    sampler: Callable[[], TaskSampler]
    allocator: Callable[[], Allocator]
    models: Mapping[str, Callable[..., SideModel]]
    replay: Callable[[], Replay] | None
    hint: Callable[[], Hints] | None

    @property
    def ratio_level(self) -> RatioLevel:
        """Unit of one probability ratio."""
        return self.resolved.ratio_level

    @property
    def needs(self) -> frozenset[Need]:
        """Needs of the preset and its mechanisms."""
        return self.resolved.needs

    @property
    def undivided(self) -> frozenset[str]:
        """Names of the auxiliary losses that every process of a data-parallel run computes of complete minibatches."""
        entries = (part.entry for part in self.resolved.slots[Slot.AUXILIARY])
        return frozenset(entry.name for entry in entries if Need.WHOLE_MINIBATCHES in entry.needs)

    def prepare(self, rollouts: Rollouts, context: Context) -> Rollouts:
        """Select rows, add `advantage` [B, T, K] to the extras, and drop rows that the advantage excludes.

        A selection returns keep [B] bool, or [B, 1]: then the returns of the other rows count in baselines, as they
        leave after the advantage (before it if the loss compares rows, not at all if none would be left). An advantage
        mechanism returns A [B, T] or [B, T, K], optionally with keep [B] bool (rows to learn from) or keep [B, T, K]
        (steps with a gradient). Other steps are `pruned` in the extras. In branching episodes, shared chunks get the
        mean of their advantages.
        """
        leaves = torch.zeros_like(rollouts.group, dtype=torch.bool)
        for choice in self.selection:
            kept = choice(rollouts, context)
            if kept.dim() == 2 and bool(kept.any()) and Need.WHOLE_GROUPS not in self.needs:
                leaves = leaves | ~kept[:, 0]
            elif kept.dim() == 1 or bool(kept.any()):
                # Before the advantage: baselines are made of what is kept.
                rows = kept.flatten().nonzero().squeeze(-1)
                rollouts, leaves = rollouts.take(rows), leaves[rows]
        result = self.advantage(rollouts, context)
        advantage, keep = result if isinstance(result, tuple) else (result, None)
        advantage = tree.shared_credit(rollouts, advantage)
        # Every step of a decision has the decision's advantage, until credit says otherwise.
        if advantage.dim() == 2:
            advantage = advantage[..., None].expand(rollouts.mask.shape)
        for function in self.credit:
            advantage = function(rollouts, advantage, context)
        # A pruned step leaves the mask, so it counts in no ratio and in no average of the loss.
        if keep is not None and keep.dim() == 3:
            rollouts, keep = replace(rollouts, mask=rollouts.mask & keep).with_extras(pruned=~keep), None
        scored_mask = rollouts.mask & rollouts.alive[..., None]
        rollouts = rollouts.with_extras(
            advantage=torch.where(scored_mask, advantage, 0.0), **episode_sizes(scored_mask)
        )
        # Rows leave last: their returns have counted in the baselines.
        stays = torch.ones_like(leaves) if keep is None else keep
        stays = stays & ~leaves if bool((stays & ~leaves).any()) else stays
        return rollouts if bool(stays.all()) else rollouts.take(stays.nonzero().squeeze(-1))


def build_algorithm(config: AlgorithmConfig) -> Algorithm:
    """Bind the mechanisms that the settings resolve to; raises ConfigError as `AlgorithmConfig.resolved` does."""
    resolved = config.resolved()
    bound = {slot: {part.entry.name: part.bound() for part in parts} for slot, parts in resolved.slots.items()}

    def one(slot: Slot) -> Any:
        return next(iter(bound[slot].values()), None)

    return Algorithm(
        resolved=resolved,
        advantage=one(Slot.ADVANTAGE),
        coefficient=one(Slot.COEFFICIENT),
        weight=one(Slot.WEIGHT),
        rewards=tuple(bound[Slot.REWARD].values()),
        credit=tuple(bound[Slot.CREDIT].values()),
        selection=tuple(bound[Slot.SELECTION].values()),
        auxiliaries=bound[Slot.AUXILIARY],
        controllers=bound[Slot.CONTROLLER],
        sampler=one(Slot.SAMPLER),
        allocator=one(Slot.ALLOCATOR),
        models=bound[Slot.MODEL],
        replay=one(Slot.REPLAY),
        hint=one(Slot.HINT),
    )
