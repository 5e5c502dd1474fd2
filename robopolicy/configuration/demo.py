"""What the demo runs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DemoSection:
    """What the demo runs."""

    recipe: str = "push_t"
    """Name of the recipe."""
    episodes: int = 200
    """Of its judgements."""
