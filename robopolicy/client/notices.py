"""Messages for the user of a robot before and while it moves, repeated at intervals.

A robot far outside of its policy's training data, and one whose answers all come too late, look like a bad policy. Each
is reported in one line, repeated at most every `EVERY` seconds while it lasts. Axes: N element.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

import numpy as np

from .policy_description import DescribedPolicy

EVERY = 10.0
"""Minimum seconds between two messages of one kind."""

FAR = 0.25
"""Distance beyond an element's training range that counts as far, as a fraction of that range."""


class Notices:
    """Messages about one driven robot, or several.

    say: function that receives the messages, None for the logger `robopolicy.driver`; every: minimum seconds between
    two messages of one kind.
    """

    def __init__(
        self,
        say: Callable[[str], None] | None = None,
        every: float = EVERY,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._say = logging.getLogger("robopolicy.driver").warning if say is None else say
        self._every, self._clock = every, clock
        self._said: dict[str, float] = {}

    def say(self, kind: str, text: str) -> None:
        """Issue a message, unless one of its kind was issued recently."""
        now = self._clock()
        if kind not in self._said or now - self._said[kind] >= self._every:
            self._said[kind] = now
            self._say(text)


def far_from_training_data(policy: DescribedPolicy, frames: Mapping[str, np.ndarray]) -> str:
    """Return the elements of a robot's frames, field -> [*shape], that lie far outside of the policy's training data,
    or "".
    """
    elements: list[tuple[float, str]] = []
    for key, (low, high) in policy.known.items():
        if key not in frames:
            continue
        values = np.asarray(frames[key], dtype=np.float64).reshape(-1)
        width = high - low
        beyond = np.maximum(low - values, values - high)
        limits = FAR * np.where(width > 0, width, np.maximum(np.abs(low), 1e-3))
        names = policy.elements.get(key) or tuple(f"{key}[{place}]" for place in range(values.size))
        for place in np.flatnonzero(beyond > limits):
            description = (
                f"{names[place]} is {values[place]:.4g} (training data: {low[place]:.4g} to {high[place]:.4g})"
            )
            elements.append((float(beyond[place] / limits[place]), description))
    elements.sort(reverse=True)
    rest_text = f" and {len(elements) - 3} more" if len(elements) > 3 else ""
    return ", ".join(text for _, text in elements[:3]) + rest_text
