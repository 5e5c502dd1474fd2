"""What is explained."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AlgorithmsSection:
    """What to explain."""

    name: str = ""
    """A preset or mechanism, empty for a list of all."""
