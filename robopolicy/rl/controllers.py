"""Knobs that follow the diagnostics: classes with step(stats, context) -> knobs, state() and restore(state).

Knobs read by the learner: lr_scale, clip_low_scale, clip_high_scale; rl_scale, a factor of the policy gradient's loss,
and NAME_scale, one of the auxiliary loss NAME.
"""

import math
from collections.abc import Mapping
from typing import Any

from robopolicy.rl.context import Context
from robopolicy.rl.registry import Need, Slot, mechanism


class _Stateless:
    """A controller that remembers nothing."""

    def state(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Nothing to restore."""


@mechanism(Slot.CONTROLLER, "vcpo", source="VCPO, arXiv:2602.17616")
class Vcpo(_Stateless):
    """Scale the learning rate by sqrt(effective sample size / sample size): stale data makes small steps.

    The sizes are of whole rows, weighted by how much likelier the policy finds them now than when they were played
    (`sequence_ess`, which the trainer measures before the update). VCPO's baseline of least variance is not part of it.
    """

    def __init__(self, *, least: float = 0.05):
        self.least = least

    def step(self, stats: Mapping[str, float], context: Context) -> dict[str, float]:
        """Return the learning rate's scale for the next iteration."""
        share = stats.get("sequence_ess", 1.0)
        return {"lr_scale": max(self.least, math.sqrt(min(1.0, max(0.0, share))))}


@mechanism(Slot.CONTROLLER, "linear_decay", source="schedule")
class LinearDecay(_Stateless):
    """Let the learning rate fall linearly to `final` of its value at the end of the run."""

    def __init__(self, *, final: float = 0.1):
        self.final = final

    def step(self, stats: Mapping[str, float], context: Context) -> dict[str, float]:
        """Return the scale."""
        return {"lr_scale": 1 - (1 - self.final) * context.share}


@mechanism(Slot.CONTROLLER, "imitation_mix", source="DataMind, arXiv:2509.25084", needs=(Need.EXPERTS,))
class ImitationMix(_Stateless):
    """Go from imitating experts to reinforcement: loss = g L_experts + (1 - g) L_RL, g falling along a cosine.

    g is `first` at the beginning and `last` once `until` of the run is done, as in the authors' settings (.9 to .05).
    L_experts is auxiliaries=[experts]; with options.experts.weight=1 it counts as it stands.
    """

    def __init__(self, *, first: float = 0.9, last: float = 0.05, until: float = 1.0):
        self.first = first
        self.last = last
        self.until = until

    def step(self, stats: Mapping[str, float], context: Context) -> dict[str, float]:
        """Return the factors of the two losses."""
        done = min(1.0, context.share / self.until) if self.until > 0 else 1.0
        imitation = self.last + (self.first - self.last) * 0.5 * (1 + math.cos(math.pi * done))
        return {"experts_scale": imitation, "rl_scale": 1 - imitation}


@mechanism(Slot.CONTROLLER, "kl_target", source="adaptive KL penalty of PPO, arXiv:1707.06347, on the learning rate")
class KlTarget:
    """Hold the KL of an iteration near `target`: divide the learning rate by `factor` above 1.5 times of it, multiply
    it below 2/3, within `least` and `most` of its value. PPO's penalty doubles and halves at these bounds.
    """

    def __init__(self, *, target: float = 0.01, factor: float = 1.5, least: float = 0.1, most: float = 10.0):
        self.target = target
        self.factor = factor
        self.least = least
        self.most = most
        self.scale = 1.0

    def step(self, stats: Mapping[str, float], context: Context) -> dict[str, float]:
        """Return the scale."""
        divergence = stats.get("kl")
        if divergence is not None and divergence > 1.5 * self.target:
            self.scale = max(self.least, self.scale / self.factor)
        elif divergence is not None and divergence < self.target / 1.5:
            self.scale = min(self.most, self.scale * self.factor)
        return {"lr_scale": self.scale}

    def state(self) -> dict[str, Any]:
        """Return the scale."""
        return {"scale": self.scale}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from the scale."""
        self.scale = state["scale"]
