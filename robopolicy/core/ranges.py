"""Which values a setting may have, declared in its type: `episodes: Count = 200`; `core.structured` checks them.

A number that is declared as int or float alone is only kept from what no number is: NaN, infinity, 64 bits exceeded.
"""

import math
from collections.abc import Sized
from dataclasses import dataclass
from typing import Annotated

LARGEST = 2**63 - 1
"""Whole number: what a seed of torch and numpy takes, and an int64 holds."""
_SHOWN = 10_000
"""An upper bound from here on only keeps numbers from what no memory holds: it is named where it is exceeded."""


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, `low` itself only where `including`."""

    low: float = -math.inf
    high: float = math.inf
    including: bool = True

    def wrong(self, value: float) -> str:
        """Return what `value` must be, "" where it is that."""
        if self.low <= value <= self.high and (self.including or value > self.low):
            return ""
        if self.high < _SHOWN:
            return f"it must lie between {self.low:g} and {self.high:g}"
        if value > self.high:
            return f"it must be at most {self.high}"
        return f"it must be {'at least' if self.including else 'above'} {self.low:g}"


@dataclass(frozen=True)
class Filled:
    """Lists that have an entry."""

    def wrong(self, value: Sized) -> str:
        """Return what `value` must be, "" where it is that."""
        return "" if len(value) else "name at least one, [A,B]"


@dataclass(frozen=True)
class Amount:
    """Texts of which some are numbers: then of at least 0."""

    def wrong(self, value: str) -> str:
        """Return what `value` must be, "" where it is that, or no number at all."""
        try:
            number = float(value)
        except ValueError:
            return ""
        return "" if 0 <= number < math.inf else "a number there must be finite and at least 0"


NoiseLevel = Annotated[str, Amount()]
"""Of an expert: a name, or the standard deviation as a share of half the range of actions."""
Count = Annotated[int, Range(1, 2**31)]
"""Of things of which there is one at least: episodes, steps, units."""
Natural = Annotated[int, Range(0, 2**31)]
"""A count of which 0 switches something off, or asks for none."""
Seed = Annotated[int, Range(0, LARGEST)]
"""Of a random number generator."""
Pixels = Annotated[int, Range(1, 4096)]
"""Along a side of an image."""
Positive = Annotated[float, Range(0.0, including=False)]
"""A rate, a width, a duration."""
NonNegative = Annotated[float, Range(0.0)]
"""A weight or an amount, 0 for none."""
Share = Annotated[float, Range(0.0, 1.0)]
"""A probability, a share, a discount."""
