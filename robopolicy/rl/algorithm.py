"""An algorithm is a choice of mechanisms, one or several a slot; presets are named choices."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from robopolicy.core.errors import ConfigError, did_you_mean
from robopolicy.core.rollouts import Rollouts
from robopolicy.rl.advantages import tree
from robopolicy.rl.configuration import AlgorithmConfig
from robopolicy.rl.context import Coefficients, Context, Scored, SideModel
from robopolicy.rl.presets import PRESETS, RatioLevel
from robopolicy.rl.registry import Mechanism, Need, Slot, choose, find, require
from robopolicy.rl.replay import Replay
from robopolicy.rl.starts.allocation import Allocator
from robopolicy.rl.starts.hints import Hints
from robopolicy.rl.starts.samplers import TaskSampler


@dataclass(frozen=True)
class Algorithm:
    """Bound mechanisms, ready to be called.

    rewards: (rollouts, context) -> rollouts; advantage: (rollouts, context) -> [B, T] or [B, T, K]; credit: (rollouts,
    A [B, T, K], context) -> A; selection: (rollouts, context) -> keep [B]; coefficient: scored -> (c, stats);
    weight: (mask, rollouts) -> [b, t, K]; auxiliaries, controllers, models: by name, the latter two to be constructed,
    as are sampler, allocator, replay and hint.
    """

    advantage: Callable[..., Tensor | tuple[Tensor, Tensor]]
    coefficient: Callable[[Scored], Coefficients]
    weight: Callable[..., Tensor]
    ratio_level: RatioLevel
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
    entries: tuple[Mechanism, ...]
    name: str = ""
    own_needs: frozenset[Need] = frozenset()
    """What the preset `name` needs, whatever its mechanisms do."""

    @property
    def needs(self) -> frozenset[Need]:
        """What it and its mechanisms need."""
        needs = self.own_needs.union(*(entry.needs for entry in self.entries))
        return needs | {Need.WHOLE_EPISODES} if self.ratio_level.whole_episodes else needs

    def check(self, have: frozenset[Need]) -> None:
        """Raise ConfigError naming the first mechanism that cannot work with what there is."""
        for need in sorted(self.own_needs - have, key=lambda item: item.name):
            raise ConfigError(f"algorithm={self.name} needs {need.value}; this combination has none.")
        alone = self.ratio_level is RatioLevel.STEP
        require(list(self.entries), have | {Need.STEP_RATIOS} if alone else have - {Need.STEP_RATIOS})

    def prepare(self, rollouts: Rollouts, context: Context) -> Rollouts:
        """Select rows, add `advantage` [B, T, K] to the extras, and drop rows that the advantage does not learn from.

        An advantage mechanism returns A [B, T] or [B, T, K], alone or with keep [B] bool: what to learn from; or keep
        [B, T, K]: what to take gradients through (the rest is `pruned` in the extras). Where episodes branch, what they
        share gets the mean of their advantages.
        """
        for choice in self.selection:
            rollouts = rollouts.take(choice(rollouts, context).nonzero().squeeze(-1))
        found = self.advantage(rollouts, context)
        advantage, keep = found if isinstance(found, tuple) else (found, None)
        advantage = tree.shared_credit(rollouts, advantage)
        if advantage.dim() == 2:
            advantage = advantage[..., None].expand(rollouts.mask.shape)
        for function in self.credit:
            advantage = function(rollouts, advantage, context)
        if keep is not None and keep.dim() == 3:
            rollouts, keep = replace(rollouts, mask=rollouts.mask & keep).with_extras(pruned=~keep), None
        scored = rollouts.mask & rollouts.alive[..., None]
        rollouts = rollouts.with_extras(
            advantage=torch.where(scored, advantage, 0.0),
            episode_steps=scored.sum((1, 2))[:, None].expand(rollouts.shape),
        )
        return rollouts if keep is None else rollouts.take(keep.nonzero().squeeze(-1))


def build_algorithm(config: AlgorithmConfig) -> Algorithm:
    """Bind the chosen mechanisms and their options; raises ConfigError for unknown names, options and option owners."""
    entries: list[Mechanism] = []
    preset = PRESETS.get(config.algorithm, {})
    options: Mapping[str, Mapping[str, Any]] = preset.get("options", {})

    def one(slot: Slot, name: str) -> Callable[..., Any]:
        entry = find(slot, name)
        entries.append(entry)
        return choose(slot, name, {**options.get(entry.name, {}), **config.options.get(entry.name, {})})

    def several(slot: Slot) -> dict[str, Callable[..., Any]]:
        return {find(slot, name).name: one(slot, name) for name in config.of(slot.value, ())}

    def maybe(slot: Slot) -> Callable[..., Any] | None:
        name = config.of(slot.value, None)
        return None if name is None else one(slot, name)

    algorithm = Algorithm(
        advantage=one(Slot.ADVANTAGE, config.of("advantage", "gae")),
        coefficient=one(Slot.COEFFICIENT, config.of("coefficient", "ppo")),
        weight=one(Slot.WEIGHT, config.of("weight", "step_mean")),
        ratio_level=config.of("ratio_level", RatioLevel.STEP),
        rewards=tuple(several(Slot.REWARD).values()),
        credit=tuple(several(Slot.CREDIT).values()),
        selection=tuple(several(Slot.SELECTION).values()),
        auxiliaries=several(Slot.AUXILIARY),
        controllers=several(Slot.CONTROLLER),
        sampler=one(Slot.SAMPLER, config.of("sampler", "uniform")),
        allocator=one(Slot.ALLOCATOR, config.of("allocator", "uniform")),
        models=several(Slot.MODEL),
        replay=maybe(Slot.REPLAY),
        hint=maybe(Slot.HINT),
        entries=tuple(entries),
        name=config.algorithm,
        own_needs=frozenset(preset.get("needs", ())),
    )
    used = {entry.name for entry in entries}
    for name in config.options:
        if name not in used:
            raise ConfigError(
                f"options.{name}: '{name}' is not part of this algorithm.{did_you_mean(name, used)} "
                f"It uses {', '.join(sorted(used))}."
            )
    return algorithm
