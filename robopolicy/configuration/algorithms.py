"""The `algorithms` section of the configuration: which RL algorithm the `algorithms` command explains."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AlgorithmsSection:
    """Which algorithm, or building block of algorithms, to explain."""

    name: str = ""
    """A preset (an algorithm such as grpo), a mechanism (one building block of it) or a paper (such as BAPO); `papers`
    for a table of those, empty for all presets and mechanisms.
    """
