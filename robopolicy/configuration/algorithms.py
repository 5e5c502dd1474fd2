"""The `algorithms` section of the configuration: which RL algorithm the `algorithms` command explains."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AlgorithmsSection:
    """Which algorithm, or building block of algorithms, to explain."""

    name: str = ""
    """A preset (an algorithm such as grpo) or a mechanism (one building block of it), empty for a list of all."""
