"""Which mechanisms an algorithm is made of, with the defaults."""

from dataclasses import dataclass, field
from typing import Any

from robopolicy.core.errors import ConfigError, did_you_mean
from robopolicy.core.registry import is_dotted
from robopolicy.rl.presets import PRESETS, RatioLevel
from robopolicy.rl.registry import Slot, declared_at, mechanisms, written


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


def _no_preset(name: str) -> str:
    """Return why a name is no preset: a mechanism belongs into its slot, anything else is not known."""
    found = declared_at(name) if is_dotted(name) else [entry for entry in mechanisms() if entry.name == name]
    if found:
        settings = " or ".join(written(entry.slot, name) for entry in found)
        return f"no preset but a mechanism, which goes into its slot: write {settings} beside the name of a preset."
    if is_dotted(name):
        return f"no preset: a function of yours goes into a slot, such as {written(Slot.ADVANTAGE, name)}."
    return f"not known.{did_you_mean(name, PRESETS)} `robopolicy algorithms` lists them."
