"""Experimental controllers of the imitation weight and of the learning rate; for the returned factors see
`robopolicy.rl.controllers`.
"""

import math
from collections.abc import Mapping
from typing import Any

from robopolicy.rl.context import Context
from robopolicy.rl.controllers import Stateless
from robopolicy.rl.registry import Need, Slot, mechanism


@mechanism(Slot.CONTROLLER, "imitation_mix", source="DataMind, arXiv:2509.25084", needs=(Need.EXPERTS, Need.IMITATION))
class ImitationMix(Stateless):
    """Move from imitation of experts to RL: loss = g L_experts + (1 - g) L_RL, with g decreasing along a cosine.

    g is `first` at the start and `last` once the fraction `until` of the run is completed, as in the authors' settings
    (.9 to .05). L_experts is auxiliaries=[experts]; options.experts.weight=1 leaves it unscaled.
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
    """Keep the KL of an iteration near `target`: divide the learning rate by `factor` if it is above 1.5 times the
    target, multiply it if below 2/3, within `least` and `most` of its initial value. PPO's penalty doubles and halves
    at these bounds.
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
        """Restore the scale."""
        self.scale = state["scale"]
