"""Messages for the user of a robot before and while it moves, repeated at intervals.

A robot far outside of its policy's training data, and one whose answers all come too late, look like a bad policy. Each
is reported in one line, repeated at most every `EVERY` seconds while it lasts. Axes: N element.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

import numpy as np

from .training_ranges import TrainingRanges

EVERY = 10.0
"""Minimum seconds between two messages of one kind."""


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


def far_from_training_data(ranges: TrainingRanges, frames: Mapping[str, np.ndarray]) -> str:
    """Return the elements of a robot's frames, field -> [*shape], that lie far outside of the policy's training data,
    farthest first, or "".
    """
    texts = list(ranges.far(frames).values())
    return ", ".join(texts[:3]) + (f" and {len(texts) - 3} more" if len(texts) > 3 else "")
