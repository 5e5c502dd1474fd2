"""What the user of a robot has to know before it moves and while it does: said once, then now and then.

A robot far from all that its policy knows, and one whose every answer comes too late, look like a bad policy. Both are
said on one line, which comes again every `EVERY` seconds at most while it lasts. Axes: N element.
"""

import logging
import time
from collections.abc import Callable, Mapping

import numpy as np

from robopolicy.serving.described import DescribedPolicy

EVERY = 10.0
"""Seconds between two lines about one thing."""

FAR = 0.25
"""By which share of the range of an element, as its policy knows it, a robot is beyond it when that is far."""


class Notices:
    """Lines about a robot that is driven, or about several at once.

    say: where they go, None for the logger `robopolicy.driver`; every: seconds between two lines of one kind.
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
        """Say a line, unless one of its kind was said just now."""
        now = self._clock()
        if kind not in self._said or now - self._said[kind] >= self._every:
            self._said[kind] = now
            self._say(text)


def far_from_known(policy: DescribedPolicy, frames: Mapping[str, np.ndarray]) -> str:
    """Return which elements of a robot's frames, field -> [*shape], lie far beyond what the policy knows, or ""."""
    found: list[tuple[float, str]] = []
    for key, (low, high) in policy.known.items():
        if key not in frames:
            continue
        values = np.asarray(frames[key], dtype=np.float64).reshape(-1)
        width = high - low
        beyond = np.maximum(low - values, values - high)
        allowed = FAR * np.where(width > 0, width, np.maximum(np.abs(low), 1e-3))
        names = policy.elements.get(key) or tuple(f"{key}[{place}]" for place in range(values.size))
        for place in np.flatnonzero(beyond > allowed):
            said = f"{names[place]} is {values[place]:.4g} (known: {low[place]:.4g} to {high[place]:.4g})"
            found.append((float(beyond[place] / allowed[place]), said))
    found.sort(reverse=True)
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return ", ".join(text for _, text in found[:3]) + more
