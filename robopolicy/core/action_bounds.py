"""Count actions outside a world's declared bounds and report them by element.

Some environments declare bounds that are not physical limits: ALOHA declares -1 to 1 but accepts joint angles of up to
3.1 rad. A world may therefore execute actions unclipped (`WorldSpec.clips_actions` is False); the rollout loop counts
and reports them.
"""

from dataclasses import replace

import numpy as np

from robopolicy.core.arrays import Array
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.spec import Field, WorldSpec

TOLERANCE = 1e-5
"""Tolerance for float32 rounding, as a fraction of the range."""
LISTED = 3
"""Maximum number of elements named in the report."""


class OutsideBounds:
    """Counter of actions outside the bounds of a world with spec `spec`, by element.

    counts: [1 + A] int64, number of control steps in which any element was outside, then one count per element; steps:
    total number of control steps.
    """

    def __init__(self, spec: WorldSpec) -> None:
        self._action, self._clipped = spec.action, spec.clips_actions
        self.low, self.high = bounds_of(spec.action)
        span = np.where(np.isfinite(self.high - self.low), self.high - self.low, 1.0)
        self._slack = TOLERANCE * np.maximum(span, TOLERANCE)
        self.counts, self.steps = np.zeros(1 + spec.action.size, dtype=np.int64), 0

    def add(self, actions: Array, executed: Array) -> None:
        """Count actions [B, C, A] where the mask `executed` [B, C] bool is True."""
        flat = np.asarray(actions, dtype=np.float64)[executed].reshape(-1, len(self.counts) - 1)
        outside_mask = (flat < self.low - self._slack) | (flat > self.high + self._slack)
        self.steps += len(flat)
        if outside_mask.any():
            self.counts += np.concatenate([[outside_mask.any(1).sum()], outside_mask.sum(0)])

    @property
    def text(self) -> str:
        """Report the fraction of actions out of bounds, by element, and whether they were clipped; "" if there were
        none.
        """
        if not self.counts[0]:
            return ""
        order = np.argsort(-self.counts[1:], kind="stable")
        worst = [element for element in order.tolist() if self.counts[1 + element]]
        parts = [
            f"{self._named(element)} {self._share(1 + element)} outside {self.low[element]:g} to {self.high[element]:g}"
            for element in worst[:LISTED]
        ]
        rest_text = f", and {len(worst) - LISTED} more" if len(worst) > LISTED else ""
        became = (
            "they were clipped to these bounds"
            if self._clipped
            else "they were executed unclipped (set world.options.clip_actions=true to clip them)"
        )
        return (
            f"{self._share(0)} of actions were outside the declared bounds ({', '.join(parts)}{rest_text}); {became}."
        )

    def _share(self, place: int) -> str:
        percent = 100 * self.counts[place] / self.steps
        return f"{percent:.0f} %" if percent >= 2 else f"{percent:.2g} %"

    def _named(self, element: int) -> str:
        return f"'{self._action.names[element]}'" if self._action.names else f"element {element}"


def bounds_of(action: Field) -> tuple[Array, Array]:
    """Return the lower and upper bound of each element of an action, [A] float64 each; infinite where it is
    unbounded.
    """
    low, high = (np.broadcast_to(np.asarray(bound, np.float64), action.shape) for bound in (action.low, action.high))
    return low.reshape(-1), high.reshape(-1)


def widen_bounds(action: Field, *actions: Array) -> Field:
    """Return the field with bounds widened to contain all of `actions`, [N, A] each; unchanged if they already do."""
    low, high = bounds_of(action)
    batches = [each for each in actions if len(each)]
    lowest, highest = low, high
    for each in batches:
        lowest, highest = np.minimum(lowest, each.min(0)), np.maximum(highest, each.max(0))
    slack = TOLERANCE * np.where(np.isfinite(high - low), high - low, 1.0)
    if (lowest >= low - slack).all() and (highest <= high + slack).all():
        return action
    return replace(action, low=tuple(map(float, lowest)), high=tuple(map(float, highest)))


def union_of_bounds(first: Field, *others: Field) -> Field:
    """Return the first of several fields of one action, with bounds widened to contain the bounds of all of them."""
    return widen_bounds(first, *(np.stack(bounds_of(other)) for other in others))


def clip_if_bounded(spec: WorldSpec, actions: Array) -> Array:
    """Return the actions that a world with spec `spec` executes when given [..., A], as float64: clipped if it clips
    actions.
    """
    actions = np.asarray(actions, dtype=np.float64)
    return np.clip(actions, *bounds_of(spec.action)) if spec.clips_actions else actions


keep_former_names(__name__, {"widened": "widen_bounds", "hull": "union_of_bounds", "executed": "clip_if_bounded"})
