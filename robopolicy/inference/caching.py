"""Block caching: reuse outputs of a denoiser's blocks from earlier steps of a chain instead of recomputing them.

A denoiser requests the output of each residual branch from a provider (`robopolicy.nn.branches`). The provider may
cache it, either by a precomputed plan of the steps in which each block is computed, or depending on changes of the
first block. Axes: N row, K step, P predicted step, A action dimension.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from robopolicy.core.errors import CheckpointError, ConfigError
from robopolicy.nn.branches import Blocks, Caching, Memory
from robopolicy.nn.denoisers import Denoiser, TransformerDenoiser


class CachedSteps:
    """A denoiser applied to N observations with block caching, for one chain; create a new one per chain.

    times: its features of the times [K, E]; condition: of the conditions [N, F]; caching: a `CachePlan` or another
    strategy. A plan selects blocks by Python integers, never by tensor values, so the steps of a chain can be unrolled
    by torch.compile and recorded in a CUDA graph. Raises ConfigError when the plan is for another network.
    """

    def __init__(self, denoiser: Denoiser, times: Tensor, condition: Tensor, caching: Caching):
        caching.check(denoiser.block_names, len(times))
        self.denoiser = denoiser
        self.times = times
        self.condition = condition
        self.memory = caching.begin()

    def one(self, x: Tensor, step: int) -> Tensor:
        """Predict [N, P, A] for latents x [N, P, A] at the input of step `step`; call the steps in order.

        A chain may start at a later step: outputs that are not cached yet are computed, whatever the plan says.
        """
        if isinstance(self.denoiser, TransformerDenoiser) and isinstance(self.memory, _Planned):
            outputs = self.memory.all_held(step)
            if outputs is not None:
                return self.denoiser.hold(x, self.times[step], self.condition, outputs)
        return self.denoiser.denoise(x, self.times[step], self.condition, self.memory.at(step))

    def several(self, x: Tensor, chosen: Tensor | None) -> Tensor:
        """Predict [N, k, P, A] for latents x [N, k, P, A] at the input of the steps chosen [N, k], computing all
        blocks.

        Log-probabilities use the network itself, because the caches of the original chain are not available.
        """
        times = self.times if chosen is None else self.times[chosen]
        return self.denoiser.denoise(x, times, self.condition[:, None])


@dataclass(frozen=True)
class CachePlan:
    """Plan of which blocks are computed in which of K steps; in between, outputs are reused or extrapolated
    (TaylorSeer).

    blocks: their names; updates: per block, whether it is computed in each step (always in the first); scheduler,
    budget: algorithm that created the plan and its number of updates per block; order: of the extrapolation from
    computed outputs (arXiv:2503.06923), 0 reuses the last one. Raises ConfigError when these are inconsistent.
    """

    blocks: tuple[str, ...]
    updates: tuple[tuple[bool, ...], ...]
    scheduler: str = ""
    budget: int = 0
    order: int = 0

    def __post_init__(self) -> None:
        if not self.updates or len(self.updates) != len(self.blocks):
            raise ConfigError(
                f"updates must have one row per block: it has {len(self.updates)} rows for {len(self.blocks)} blocks."
            )
        if len({len(row) for row in self.updates}) != 1 or not all(row and row[0] for row in self.updates):
            raise ConfigError(
                "updates: all blocks must have the same number of steps, and each must be computed in the first step."
            )
        if self.order < 0:
            raise ConfigError(f"order={self.order} must be 0 (reuse the last output), 1 or 2 (extrapolate).")

    @staticmethod
    def of(
        blocks: tuple[str, ...], updates: Tensor, scheduler: str = "", budget: int = 0, order: int = 0
    ) -> "CachePlan":
        """Build a plan from a table `updates` [blocks, K] bool; raises ConfigError as the class does."""
        rows = tuple(tuple(bool(item) for item in row) for row in updates.tolist())
        return CachePlan(blocks, rows, scheduler, budget, order)

    @property
    def steps(self) -> int:
        """Number of steps K of the chain."""
        return len(self.updates[0])

    @property
    def share(self) -> float:
        """Fraction of block evaluations compared with a chain without cache."""
        return sum(map(sum, self.updates)) / (len(self.blocks) * self.steps)

    @property
    def masks(self) -> int:
        """Number of different sets of blocks computed in a step."""
        return len(set(zip(*self.updates, strict=True)))

    def check(self, blocks: tuple[str, ...], steps: int) -> None:
        """Raise ConfigError unless the plan was made for these blocks and this number of steps."""
        if blocks != self.blocks:
            raise ConfigError(
                f"The cache plan is for another network: its blocks are {', '.join(self.blocks)}, this network's are "
                f"{', '.join(blocks) or 'none'}. Create a plan for this network."
            )
        if steps != self.steps:
            raise ConfigError(f"The cache plan is for chains of {self.steps} steps, but this chain has {steps}.")

    def begin(self) -> Memory:
        """Return an empty cache for a new chain."""
        return _Planned(self)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary, with the steps in which each block is computed."""
        computed = [[step for step, now in enumerate(row) if now] for row in self.updates]
        names = {"blocks": list(self.blocks), "steps": self.steps, "updates": computed}
        return {**names, "scheduler": self.scheduler, "budget": self.budget, "order": self.order}

    @staticmethod
    def from_json(data: Mapping[str, Any], where: object = "The cache plan") -> "CachePlan":
        """Rebuild from `to_json`; raises CheckpointError, prefixed with `where`, on invalid data."""
        try:
            steps, rows = range(int(data["steps"])), [frozenset(map(int, row)) for row in data["updates"]]
            if not all(row <= frozenset(steps) for row in rows):
                raise ConfigError(f"updates contains steps that a chain of {len(steps)} does not have.")
            updates = tuple(tuple(step in row for step in steps) for row in rows)
            blocks = tuple(map(str, data["blocks"]))
            return CachePlan(blocks, updates, str(data["scheduler"]), int(data["budget"]), int(data["order"]))
        except (ConfigError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{where} cannot be read: {type(error).__name__}: {error}") from error


class _Planned:
    """Block cache following a plan. Stores each block's last output and its differences up to the plan's order, without
    copies.
    """

    def __init__(self, plan: CachePlan):
        self.updates, self.order = plan.updates, plan.order
        self.known: list[list[Tensor]] = [[] for _ in plan.blocks]
        self.last = [0] * len(plan.blocks)
        self.quiet = [not any(now) for now in zip(*plan.updates, strict=True)]
        self.stacks: list[Tensor] = []

    def all_held(self, step: int) -> Tensor | None:
        """Return the outputs of all blocks [N, B, ...] stacked if the step computes none; else None.

        Blocks that were computed in the same steps are extrapolated together.
        """
        if not self.quiet[step] or not all(self.known):
            return None
        if not self.stacks:
            if self.order and len({(last, len(terms)) for last, terms in zip(self.last, self.known, strict=True)}) > 1:
                return None
            self.stacks = [torch.stack(terms, 1) for terms in zip(*self.known, strict=True)]
        return _extrapolated(self.stacks, step - self.last[0])

    def at(self, step: int) -> Blocks:
        """Return the provider of block outputs in `step`."""

        def answer(index: int, branch: Callable[[], Tensor]) -> Tensor:
            if not self.known[index] or self.updates[index][step]:
                self._learn(index, step, branch())
                return self.known[index][0]
            return _extrapolated(self.known[index], step - self.last[index])

        return answer

    def _learn(self, index: int, step: int, output: Tensor) -> None:
        """Store an output [N, ...] and its divided differences.

        As diffusers' TaylorSeerState.update: difference j + 1 is the change of difference j per step since the last
        update. The number of differences grows with every update, up to the order.
        """
        before, differences = self.known[index], [output]
        for place in range(min(self.order, len(before))):
            differences.append((differences[place] - before[place]) / (step - self.last[index]))
        self.known[index] = differences
        self.last[index] = step
        self.stacks = []


def _extrapolated(terms: list[Tensor], offset: int) -> Tensor:
    """Return sum_j offset^j / j! terms_j, [N, ...] (diffusers' TaylorSeerState.predict)."""
    output, *differences = terms
    for place, difference in enumerate(differences, 1):
        output = torch.add(output, difference, alpha=offset**place / math.factorial(place))
    return output


@dataclass(frozen=True)
class FirstBlockCaching:
    """First-block caching: the first block is always computed, the others only if its output has changed.

    They are computed in steps with mean |output - cached output| > threshold mean |cached output|, for the first
    block's output in the last fully computed step (diffusers' first_block_cache, after TeaCache, arXiv:2411.19108).
    Differences from diffusers: a block is a residual branch, not a layer, and the outputs of the others are cached
    individually, not as a sum, so that gates follow the time. Every step synchronises on a tensor value, and all rows
    are decided together: suited to eager engines. Raises ConfigError for a negative threshold.
    """

    threshold: float = 0.05

    def __post_init__(self) -> None:
        if not self.threshold >= 0:
            raise ConfigError(f"threshold={self.threshold} must be at least 0: it is a relative change.")

    def check(self, blocks: tuple[str, ...], steps: int) -> None:
        """Raise ConfigError for a network without blocks."""
        if not blocks:
            raise ConfigError("The network has no blocks to cache.")

    def begin(self) -> "FirstBlockMemory":
        """Return an empty cache for a new chain."""
        return FirstBlockMemory(self.threshold)


class FirstBlockMemory:
    """First-block cache of one chain; computed: the steps that were fully computed."""

    def __init__(self, threshold: float):
        self.threshold = threshold
        self.computed: list[int] = []
        self._known: dict[int, Tensor] = {}

    def at(self, step: int) -> Blocks:
        """Return the provider of block outputs in `step`."""

        def answer(index: int, branch: Callable[[], Tensor]) -> Tensor:
            if index == 0:
                first = branch()
                if self._changed(first):
                    self.computed.append(step)
                    self._known = {0: first}
                return first
            if index not in self._known:
                self._known[index] = branch()
            return self._known[index]

        return answer

    def _changed(self, first: Tensor) -> bool:
        """Whether the first block's output [N, ...] differs from the cached one by more than the threshold."""
        if 0 not in self._known:
            return True
        cached_output = self._known[0]
        change = (first - cached_output).abs().mean() / cached_output.abs().mean()
        return not bool(change <= self.threshold)  # a change from nothing to nothing is nan: compute
