"""Residual branches of a denoiser that somebody may remember from step to step of a chain.

A network asks for the output of each of its branches instead of computing it; whoever answers computes it, or says what
it was before. Who remembers what is decided elsewhere (`robopolicy.inference.caching`).
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

type Blocks = Callable[[int, Callable[[], Tensor]], Tensor]
"""Who answers for the residual branches of a step: they compute, or somebody remembers what they said before.

Called with the number of a block and what computes its output, returns that, computed now or in an earlier step.
"""


def fresh(index: int, branch: Callable[[], Tensor]) -> Tensor:
    """Compute every block in every step, [..., P, width]; see `Blocks`."""
    return branch()


FEED_FORWARD = "feed_forward"
"""What the names of blocks end with that are a transformer's feed-forward layers."""


class Memory(Protocol):
    """What is known of the blocks in one chain, whose steps are taken in their order."""

    def at(self, step: int) -> Blocks:
        """Return who answers for the blocks in step number `step`."""
        ...


class Caching(Protocol):
    """How blocks are remembered."""

    def check(self, blocks: tuple[str, ...], steps: int) -> None:
        """Raise ConfigError unless it fits a network of these blocks that takes so many steps."""
        ...

    def begin(self) -> Memory:
        """Return the memory of a chain that is about to begin."""
        ...
