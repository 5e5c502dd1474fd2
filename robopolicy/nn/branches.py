"""Residual branches of a denoiser, whose outputs may be cached between the steps of a chain.

A network requests the output of each branch instead of computing it; the provider computes it or returns a cached
output. Cache strategies are in `robopolicy.inference.caching`.
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

type Blocks = Callable[[int, Callable[[], Tensor]], Tensor]
"""Provider of residual branch outputs in one step: computes them or returns cached ones.

Called with the number of a block and what computes its output, returns that, computed now or in an earlier step.
"""


def fresh(index: int, branch: Callable[[], Tensor]) -> Tensor:
    """Compute every block in every step without caching, [..., P, width]; see `Blocks`."""
    return branch()


FEED_FORWARD = "feed_forward"
"""Suffix in the names of blocks that are a transformer's feed-forward layers."""


class Memory(Protocol):
    """Block cache of one chain, whose steps are taken in order."""

    def at(self, step: int) -> Blocks:
        """Return the provider of block outputs for step `step`."""
        ...


class Caching(Protocol):
    """Strategy for caching blocks."""

    def check(self, blocks: tuple[str, ...], steps: int) -> None:
        """Raise ConfigError unless the strategy fits a network with these blocks and this number of steps."""
        ...

    def begin(self) -> Memory:
        """Return an empty cache for a new chain."""
        ...
