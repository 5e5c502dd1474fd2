"""Controllers of learner settings, driven by diagnostics: classes with step(stats, context) -> scale factors of
settings, state() and restore(state).

Knobs read by the learner: lr_scale, clip_low_scale, clip_high_scale; rl_scale, a factor on the policy gradient loss,
and NAME_scale, a factor on the auxiliary loss NAME.
"""

import math
from collections.abc import Mapping
from typing import Any

from robopolicy.rl.context import Context
from robopolicy.rl.registry import Need, Slot, mechanism


class Stateless:
    """A controller without state."""

    def state(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Do nothing; there is no state."""


@mechanism(Slot.CONTROLLER, "vcpo", source="VCPO, arXiv:2602.17616", needs=(Need.SEQUENCE_RATIOS,))
class Vcpo(Stateless):
    """Scale the learning rate by sqrt(effective sample size / sample size): stale data leads to small steps.

    The sizes count complete rows, weighted by the ratio of their probability under the current policy to that under the
    behaviour policy (`sequence_ess`, measured by the trainer before the update; the paper measures every minibatch).
    least: lower bound on the scale, an addition here. VCPO's baseline of least variance is advantage=opob.
    """

    def __init__(self, *, least: float = 0.05):
        self.least = least

    def step(self, stats: Mapping[str, float], context: Context) -> dict[str, float]:
        """Return the learning rate's scale for this iteration's update."""
        share = stats.get("sequence_ess", 1.0)
        return {"lr_scale": max(self.least, math.sqrt(min(1.0, max(0.0, share))))}


@mechanism(Slot.CONTROLLER, "linear_decay", source="schedule")
class LinearDecay(Stateless):
    """Decay the learning rate linearly to `final` of its initial value at the end of the run."""

    def __init__(self, *, final: float = 0.1):
        self.final = final

    def step(self, stats: Mapping[str, float], context: Context) -> dict[str, float]:
        """Return the scale."""
        return {"lr_scale": 1 - (1 - self.final) * context.share}
