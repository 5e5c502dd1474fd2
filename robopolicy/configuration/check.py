"""What is checked."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CheckSection:
    """What is checked against its contract."""

    target: str = ""
    """A checkpoint folder, a name, or the dotted path, package.module:Name, of a world, policy, world model or
    controller."""
