"""Algorithm configuration: the mechanisms chosen by the settings, resolved slot by slot."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from robopolicy.core.errors import ConfigError, did_you_mean
from robopolicy.core.registry import is_dotted
from robopolicy.core.structured import FormerNames
from robopolicy.rl.presets import PRESETS, RatioLevel
from robopolicy.rl.registry import (
    SEVERAL,
    Mechanism,
    Need,
    Slot,
    declared_at,
    get_mechanism,
    mechanisms,
    require,
    setting_for,
)

ORDER = (
    *(Slot.ADVANTAGE, Slot.COEFFICIENT, Slot.WEIGHT, Slot.REWARD, Slot.CREDIT, Slot.SELECTION, Slot.AUXILIARY),
    *(Slot.CONTROLLER, Slot.SAMPLER, Slot.ALLOCATOR, Slot.MODEL, Slot.REPLAY, Slot.HINT),
)
"""Order in which slots are resolved and checked for incompatible choices."""
DEFAULTS = {
    Slot.ADVANTAGE: "gae",
    Slot.COEFFICIENT: "ppo",
    Slot.WEIGHT: "step_mean",
    Slot.SAMPLER: "uniform",
    Slot.ALLOCATOR: "uniform",
}
"""Default mechanisms of required slots that neither the settings nor the preset fill."""


@dataclass(frozen=True)
class Part:
    """A mechanism in its slot, with its non-default options."""

    entry: Mechanism
    options: Mapping[str, Any]

    def bound(self) -> Callable[..., Any]:
        """Return the mechanism's function or class with bound options; imports its module."""
        return partial(self.entry.function, **self.options)

    @property
    def file(self) -> str:
        """Path of the mechanism's source file, relative to the folder that contains its package."""
        return self.entry.path.partition(":")[0].replace(".", "/") + ".py"


@dataclass(frozen=True)
class Resolved:
    """Resolved settings of an algorithm: the mechanisms in every slot, and the ratio level.

    name: name of the preset; own_needs: needs of the preset, independent of its mechanisms.
    """

    name: str
    slots: Mapping[Slot, tuple[Part, ...]]
    ratio_level: RatioLevel
    own_needs: frozenset[Need]

    @property
    def entries(self) -> tuple[Mechanism, ...]:
        """All mechanisms, by slot."""
        return tuple(part.entry for parts in self.slots.values() for part in parts)

    @property
    def needs(self) -> frozenset[Need]:
        """Needs of the preset and its mechanisms."""
        needs = self.own_needs.union(*(entry.needs for entry in self.entries))
        return needs | {Need.WHOLE_EPISODES} if self.ratio_level.whole_episodes else needs

    def check(self, have: frozenset[Need]) -> None:
        """Raise ConfigError naming the first mechanism whose needs are not met."""
        for need in sorted(self.own_needs - have, key=lambda item: item.name):
            raise ConfigError(f"algorithm={self.name} needs {need.value}, which this combination does not have.")
        per_step = self.ratio_level is RatioLevel.STEP
        require(list(self.entries), have | {Need.STEP_RATIOS} if per_step else have - {Need.STEP_RATIOS})


@dataclass(frozen=True)
class AlgorithmConfig(FormerNames):
    """Choice of mechanisms: a preset, and per slot an override (null: the preset's).

    `robopolicy algorithms` lists all presets and mechanisms.
    """

    algorithm: str = "dppo"
    """Algorithm preset: ppo, dppo, grpo, gspo and many more."""
    advantage: str | None = None
    """Advantage estimator."""
    credit: tuple[str, ...] | None = None
    """Credit assignment: distribution of a chunk's advantage over its steps, and factors on it."""
    coefficient: str | None = None
    """Factor on a step's log-probability in the loss: PPO's clipped ratio, DPO's, and so on."""
    weight: str | None = None
    """Averaging of the per-step losses."""
    ratio_level: RatioLevel | None = None
    """Unit of one probability ratio: a step (PPO), an action, a decision (action chunk; ReinFlow, FPO) or an episode
    (GSPO), with the sum or the mean over its steps.
    """
    rewards: tuple[str, ...] | None = None
    """Reward functions that change rewards before advantages are computed."""
    selection: tuple[str, ...] | None = None
    """Selection of collected episodes to learn from."""
    auxiliaries: tuple[str, ...] | None = None
    """Auxiliary losses, such as bc, which keeps the policy close to its base."""
    controllers: tuple[str, ...] | None = None
    """Controllers that adapt settings to diagnostics during training."""
    sampler: str | None = None
    """Sampler that chooses the next initial states from the pool."""
    allocator: str | None = None
    """Allocator of the number of episodes per initial state."""
    models: tuple[str, ...] | None = None
    """Models trained together with the policy: process rewards, progress, action values."""
    replay: str | None = None
    """Replay of episodes from earlier iterations."""
    hint: str | None = None
    """Position in a demonstration from which episodes start."""
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    """Options of mechanisms, by name, such as options.grpo.epsilon=1e-6."""

    def of(self, name: str, default: Any) -> Any:
        """Return the choice for a slot: this configuration's, else the preset's, else `default`.

        Raises ConfigError if the preset is needed and its name is unknown.
        """
        value = getattr(self, name)
        if value is not None:
            return value
        if self.algorithm not in PRESETS:
            raise ConfigError(f"algorithm={self.algorithm} is {_no_preset(self.algorithm)}")
        return PRESETS[self.algorithm].get(name, default)

    def resolved(self) -> Resolved:
        """Resolve these settings, the preset and the defaults to mechanisms in every slot, without importing them.

        Raises ConfigError for unknown names, options and owners of options.
        """
        preset = PRESETS.get(self.algorithm, {})
        options: Mapping[str, Mapping[str, Any]] = preset.get("options", {})

        def part(slot: Slot, name: str) -> Part:
            entry = get_mechanism(slot, name)
            all_options = {**options.get(entry.name, {}), **self.options.get(entry.name, {})}
            entry.require_options(all_options)
            return Part(entry, all_options)

        slots: dict[Slot, tuple[Part, ...]] = {}
        for slot in ORDER:
            setting = self.of(slot.value, () if slot in SEVERAL else DEFAULTS.get(slot))
            names = setting if slot in SEVERAL else () if setting is None else (setting,)
            slots[slot] = tuple(part(slot, name) for name in names)
        level = self.of("ratio_level", RatioLevel.STEP)
        resolved = Resolved(self.algorithm, slots, level, frozenset(preset.get("needs", ())))
        mechanism_names = {entry.name for entry in resolved.entries}
        for name in self.options:
            if name not in mechanism_names:
                raise ConfigError(
                    f"options.{name}: '{name}' is not part of this algorithm.{did_you_mean(name, mechanism_names)} "
                    f"It uses: {', '.join(sorted(mechanism_names))}."
                )
        return resolved


def _no_preset(name: str) -> str:
    """Return the reason why a name is not a preset: it is a mechanism, which belongs in its slot, or unknown."""
    candidates = declared_at(name) if is_dotted(name) else [entry for entry in mechanisms() if entry.name == name]
    if candidates:
        settings = " or ".join(setting_for(entry.slot, name) for entry in candidates)
        return f"not a preset but a mechanism, which belongs in a slot: write {settings} next to the name of a preset."
    if is_dotted(name):
        return f"not a preset: a custom function belongs in a slot, such as {setting_for(Slot.ADVANTAGE, name)}."
    return f"not known.{did_you_mean(name, PRESETS)} `robopolicy algorithms` lists them."
