"""Value ranges of settings, declared in their type: `episodes: Count = 200`; checked by `core.structured`.

A setting declared as plain int or float is only checked for NaN, infinity and values beyond 64 bits.
"""

import math
from collections.abc import Sized
from dataclasses import dataclass
from typing import Annotated

from robopolicy.core.former_names import keep_former_names

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


@dataclass(frozen=True)
class NonEmpty:
    """Lists with at least one entry."""

    def wrong(self, value: Sized) -> str:
        """Return the requirement that `value` violates, "" if it is valid."""
        return "" if len(value) else "it must have at least one entry, [A,B]"


@dataclass(frozen=True)
class Amount:
    """Strings that may be numbers; a number must be at least 0."""

    def wrong(self, value: str) -> str:
        """Return the requirement that `value` violates, "" if it is valid or not a number."""
        try:
            number = float(value)
        except ValueError:
            return ""
        return "" if 0 <= number < math.inf else "a number must be finite and at least 0"


NoiseLevel = Annotated[str, Amount()]
"""Noise of an expert: a name, or the standard deviation as a fraction of half the action range."""
Count = Annotated[int, Range(1, 2**31)]
"""Number of things of which there is at least one: episodes, steps, units."""
Natural = Annotated[int, Range(0, 2**31)]
"""A count; 0 disables the feature or requests none."""
Seed = Annotated[int, Range(0, LARGEST)]
"""Seed of a random number generator."""
Pixels = Annotated[int, Range(1, 4096)]
"""Pixels along one side of an image."""
Positive = Annotated[float, Range(0.0, including=False)]
"""Positive number: a rate, a width, a duration."""
NonNegative = Annotated[float, Range(0.0)]
"""Non-negative number: a weight or an amount, 0 for none."""
Fraction = Annotated[float, Range(0.0, 1.0)]
"""Number from 0 to 1: a probability, a fraction, a discount."""


keep_former_names(__name__, {"Share": "Fraction", "Filled": "NonEmpty"})
