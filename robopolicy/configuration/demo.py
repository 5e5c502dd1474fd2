"""What the demo runs."""

from dataclasses import dataclass

from robopolicy.core.ranges import Count


@dataclass(frozen=True)
class DemoSection:
    """What the demo runs."""

    recipe: str = "push_t"
    """Name of the recipe."""
    episodes: Count = 200
    """Of its judgements."""
