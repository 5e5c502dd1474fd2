"""Value ranges of settings, declared in their type: `episodes: Count = 200`; checked by `core.structured`.

A setting declared as plain int or float is only checked for NaN, infinity and values beyond 64 bits.
"""

import math
from collections.abc import Sized
from dataclasses import dataclass
from typing import Annotated

from robopolicy.client.ranges import LARGEST as LARGEST
from robopolicy.client.ranges import Natural as Natural
from robopolicy.client.ranges import NonNegative as NonNegative
from robopolicy.client.ranges import Positive as Positive
from robopolicy.client.ranges import Range
from robopolicy.core.former_names import keep_former_names


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
"""Noise of an expert: a name, the standard deviation as a fraction of half the action range, or a fault (aim=0.04)."""
Count = Annotated[int, Range(1, 2**31)]
"""Number of things of which there is at least one: episodes, steps, units."""
Seed = Annotated[int, Range(0, LARGEST)]
"""Seed of a random number generator."""
Pixels = Annotated[int, Range(1, 4096)]
"""Pixels along one side of an image."""
Fraction = Annotated[float, Range(0.0, 1.0)]
"""Number from 0 to 1: a probability, a fraction, a discount."""


keep_former_names(__name__, {"Share": "Fraction", "Filled": "NonEmpty"})
