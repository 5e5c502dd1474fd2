"""Which mechanisms an algorithm is made of: the choices of a configuration, and what they resolve to, slot by slot."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from robopolicy.core.errors import ConfigError, did_you_mean
from robopolicy.core.registry import is_dotted
from robopolicy.rl.presets import PRESETS, RatioLevel
from robopolicy.rl.registry import (
    SEVERAL,
    Mechanism,
    Need,
    Slot,
    declared_at,
    find,
    mechanisms,
    require,
    written,
)

ORDER = (
    *(Slot.ADVANTAGE, Slot.COEFFICIENT, Slot.WEIGHT, Slot.REWARD, Slot.CREDIT, Slot.SELECTION, Slot.AUXILIARY),
    *(Slot.CONTROLLER, Slot.SAMPLER, Slot.ALLOCATOR, Slot.MODEL, Slot.REPLAY, Slot.HINT),
)
"""In which slots are resolved, and what does not fit together is looked for."""
DEFAULTS = {
    Slot.ADVANTAGE: "gae",
    Slot.COEFFICIENT: "ppo",
    Slot.WEIGHT: "step_mean",
    Slot.SAMPLER: "uniform",
    Slot.ALLOCATOR: "uniform",
}
"""What stands in a slot that has to be filled, where neither the settings nor the preset do."""


@dataclass(frozen=True)
class Part:
    """A mechanism in its slot, with those of its options that are not left at their defaults."""

    entry: Mechanism
    options: Mapping[str, Any]

    def bound(self) -> Callable[..., Any]:
        """Return its function, or its class, with the options; its module is imported now."""
        return partial(self.entry.function, **self.options)

    @property
    def file(self) -> str:
        """Where its code lies, as a path below the folder that its package is in."""
        return self.entry.path.partition(":")[0].replace(".", "/") + ".py"


@dataclass(frozen=True)
class Resolved:
    """What the settings of an algorithm come to: the parts in every slot, and what one ratio is about.

    name: of the preset; own_needs: what that needs, whatever its parts do.
    """

    name: str
    slots: Mapping[Slot, tuple[Part, ...]]
    ratio_level: RatioLevel
    own_needs: frozenset[Need]

    @property
    def entries(self) -> tuple[Mechanism, ...]:
        """Every mechanism, by slot."""
        return tuple(part.entry for parts in self.slots.values() for part in parts)

    @property
    def needs(self) -> frozenset[Need]:
        """What the preset and its mechanisms need."""
        needs = self.own_needs.union(*(entry.needs for entry in self.entries))
        return needs | {Need.WHOLE_EPISODES} if self.ratio_level.whole_episodes else needs

    def check(self, have: frozenset[Need]) -> None:
        """Raise ConfigError naming the first mechanism that cannot work with what there is."""
        for need in sorted(self.own_needs - have, key=lambda item: item.name):
            raise ConfigError(f"algorithm={self.name} needs {need.value}; this combination has none.")
        alone = self.ratio_level is RatioLevel.STEP
        require(list(self.entries), have | {Need.STEP_RATIOS} if alone else have - {Need.STEP_RATIOS})


@dataclass(frozen=True)
class AlgorithmConfig:
    """Which mechanisms: a preset, and per slot what replaces its choice (null: the preset's).

    `robopolicy algorithms` lists everything.
    """

    algorithm: str = "dppo"
    """Preset: ppo, dppo, grpo, gspo and many more."""
    advantage: str | None = None
    """How rewards become advantages."""
    credit: tuple[str, ...] | None = None
    """How a decision's advantage is shared out among its steps, and what modulates it."""
    coefficient: str | None = None
    """What a step's score is multiplied by in the loss: PPO's clipped ratio, DPO's, and so on."""
    weight: str | None = None
    """How the losses of steps are averaged."""
    ratio_level: RatioLevel | None = None
    """What one ratio is about: a step (PPO), an action, a decision (ReinFlow, FPO) or an episode (GSPO), and whether
    the steps inside share the sum or the mean.
    """
    rewards: tuple[str, ...] | None = None
    """What the policy is paid for, changed before advantages are made."""
    selection: tuple[str, ...] | None = None
    """Which of the played episodes it learns from."""
    auxiliaries: tuple[str, ...] | None = None
    """Losses on the side, such as bc, nearness to the base policy."""
    controllers: tuple[str, ...] | None = None
    """Settings that follow the diagnostics while training goes on."""
    sampler: str | None = None
    """Which starts are played next, out of the pool."""
    allocator: str | None = None
    """How many episodes every start gets."""
    models: tuple[str, ...] | None = None
    """What is learned beside the policy: process rewards, progress, action values."""
    replay: str | None = None
    """Episodes of earlier iterations that are learned from again."""
    hint: str | None = None
    """How far along a demonstration episodes begin."""
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    """Mechanism -> its options, such as options.grpo.epsilon=1e-6."""

    def of(self, name: str, default: Any) -> Any:
        """The choice for a slot: this configuration's, else the preset's, else `default`.

        Raises ConfigError where the preset is asked and there is none of that name.
        """
        value = getattr(self, name)
        if value is not None:
            return value
        if self.algorithm not in PRESETS:
            raise ConfigError(f"algorithm={self.algorithm} is {_no_preset(self.algorithm)}")
        return PRESETS[self.algorithm].get(name, default)

    def resolved(self) -> Resolved:
        """Return what these settings, the preset and the defaults put into every slot, without importing any of it.

        Raises ConfigError for unknown names, options and owners of options.
        """
        preset = PRESETS.get(self.algorithm, {})
        options: Mapping[str, Mapping[str, Any]] = preset.get("options", {})

        def part(slot: Slot, name: str) -> Part:
            entry = find(slot, name)
            chosen = {**options.get(entry.name, {}), **self.options.get(entry.name, {})}
            entry.require_options(chosen)
            return Part(entry, chosen)

        slots: dict[Slot, tuple[Part, ...]] = {}
        for slot in ORDER:
            given = self.of(slot.value, () if slot in SEVERAL else DEFAULTS.get(slot))
            names = given if slot in SEVERAL else () if given is None else (given,)
            slots[slot] = tuple(part(slot, name) for name in names)
        level = self.of("ratio_level", RatioLevel.STEP)
        resolved = Resolved(self.algorithm, slots, level, frozenset(preset.get("needs", ())))
        used = {entry.name for entry in resolved.entries}
        for name in self.options:
            if name not in used:
                raise ConfigError(
                    f"options.{name}: '{name}' is not part of this algorithm.{did_you_mean(name, used)} "
                    f"It uses {', '.join(sorted(used))}."
                )
        return resolved


def _no_preset(name: str) -> str:
    """Return why a name is no preset: a mechanism belongs into its slot, anything else is not known."""
    found = declared_at(name) if is_dotted(name) else [entry for entry in mechanisms() if entry.name == name]
    if found:
        settings = " or ".join(written(entry.slot, name) for entry in found)
        return f"no preset but a mechanism, which goes into its slot: write {settings} beside the name of a preset."
    if is_dotted(name):
        return f"no preset: a function of yours goes into a slot, such as {written(Slot.ADVANTAGE, name)}."
    return f"not known.{did_you_mean(name, PRESETS)} `robopolicy algorithms` lists them."
