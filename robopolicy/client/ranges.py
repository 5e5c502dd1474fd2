"""Ranges of numbers in settings, declared in their type: `blend: Natural = 0`; checked by `core.structured`."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

LARGEST = 2**63 - 1
"""Largest integer accepted as a seed by torch and numpy, and by int64."""
_SHOWN = 10_000
"""Upper bounds from here on only guard against sizes that exceed memory; the message names them only when exceeded."""


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`; `low` itself is allowed only if `including`."""

    low: float = -math.inf
    high: float = math.inf
    including: bool = True

    def wrong(self, value: float) -> str:
        """Return the requirement that `value` violates, "" if it is valid."""
        if self.low <= value <= self.high and (self.including or value > self.low):
            return ""
        if self.high < _SHOWN:
            return f"it must lie between {self.low:g} and {self.high:g}"
        if value > self.high:
            return f"it must be at most {self.high}"
        return f"it must be {'at least' if self.including else 'above'} {self.low:g}"


if sys.version_info >= (3, 9):
    from typing import Annotated

    Natural = Annotated[int, Range(0, 2**31)]
    """A count; 0 disables the feature or requests none."""
    Positive = Annotated[float, Range(0.0, including=False)]
    """Positive number: a rate, a width, a duration."""
    NonNegative = Annotated[float, Range(0.0)]
    """Non-negative number: a weight or an amount, 0 for none."""
else:  # a robot's computer, where no settings are read from files
    Natural, Positive = int, float
    NonNegative = float
