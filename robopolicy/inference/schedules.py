"""Schedulers of block cache plans: Block-wise Adaptive Caching (BAC, arXiv:2506.13456) and its baselines.

A scheduler converts block statistics (`calibration`) into a table [B, K]: which of B blocks is computed in which of K
steps. Custom schedulers are functions with the same signature, named by their import path.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from robopolicy.core.errors import ConfigError
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.registry import Registry
from robopolicy.inference.caching import CachePlan
from robopolicy.inference.calibration import Calibration
from robopolicy.nn.branches import FEED_FORWARD

CACHE_SCHEDULERS = Registry(
    "cache scheduler",
    "robopolicy.cache_schedulers",
    {
        "uniform": "robopolicy.inference.schedules:uniform",
        "shared": "robopolicy.inference.schedules:shared",
        "bac": "robopolicy.inference.schedules:bac",
    },
)


@dataclass(frozen=True)
class CacheConfig:
    """Settings of a cache plan; raises ConfigError on invalid values."""

    scheduler: str = "bac"
    """Block cache scheduler: uniform (all blocks at evenly spaced steps), shared (all blocks at the steps that suit
    them together), bac (each block at its own steps), or an import path.
    """
    budget: int = 10
    """Number of updates S per block, including the first step; the union in BAC adds more."""
    top_blocks: int = 5
    """BAC: number of blocks, those with the largest change, that are computed whenever a later feed-forward layer is; 0
    for none.
    """
    last_steps: int = 2
    """Number of updates fixed at the last steps of the chain, whose errors no later step corrects; 0 leaves them to the
    scheduler.
    """
    order: int = 0
    """Output of a block between updates: 0 reuses the last one, 1 or 2 extrapolates it (order of TaylorSeer)."""

    def __post_init__(self) -> None:
        if min(self.top_blocks, self.last_steps, self.order) < 0:
            raise ConfigError("top_blocks, last_steps and order must not be negative.")
        if self.budget <= self.last_steps:
            raise ConfigError(
                f"budget={self.budget} is too small: the first step and the last {self.last_steps} need at least "
                f"{self.last_steps + 1} updates."
            )


type CacheScheduler = Callable[[Calibration, CacheConfig], Tensor]
"""Type of a cache scheduler: returns the blocks to compute in each step, [B, K] bool; all blocks in the first step."""


def make_plan(calibration: Calibration, config: CacheConfig) -> CachePlan:
    """Return the plan set by config; raises ConfigError if there is none."""
    if config.budget > calibration.steps:
        raise ConfigError(f"budget={config.budget} exceeds the chain's {calibration.steps} steps.")
    scheduler: CacheScheduler = CACHE_SCHEDULERS.load(config.scheduler)
    updates = scheduler(calibration, config)
    expected = (len(calibration.blocks), calibration.steps)
    if tuple(updates.shape) != expected or updates.dtype != torch.bool:
        raise ConfigError(
            f"The cache scheduler '{config.scheduler}' returned {updates.dtype} {list(updates.shape)} instead of [B, "
            f"K], here torch.bool {list(expected)}."
        )
    return CachePlan.of(calibration.blocks, updates, config.scheduler, config.budget, config.order)


def plans_to_try(
    calibration: Calibration, schedulers: Sequence[str], budgets: Sequence[int], orders: Sequence[int]
) -> dict[str, CachePlan]:
    """Return a plan for every combination by name, "bac cache 10" or "bac cache 10, order 1"; raises as `make_plan`."""
    return {
        f"{scheduler} cache {budget}{f', order {order}' if order else ''}": make_plan(
            calibration, CacheConfig(scheduler, budget, order=order)
        )
        for scheduler in schedulers
        for budget in budgets
        for order in orders
    }


def uniform(calibration: Calibration, config: CacheConfig) -> Tensor:
    """Update every block at evenly spaced steps, [B, K] bool."""
    free_steps, spaced = calibration.steps - config.last_steps, config.budget - config.last_steps
    updates = torch.zeros(len(calibration.blocks), calibration.steps, dtype=torch.bool)
    updates[:, torch.arange(spaced) * free_steps // spaced] = True
    updates[:, free_steps:] = True
    return updates


def shared(calibration: Calibration, config: CacheConfig) -> Tensor:
    """Update all blocks at the steps that are optimal for the sum of their similarities, [B, K] bool."""
    summed = calibration.similarity.sum(0, keepdim=True)
    return anchors(summed, config.budget, config.last_steps).expand(len(calibration.blocks), -1).clone()


def bac(calibration: Calibration, config: CacheConfig) -> Tensor:
    """Update each block at its own optimal steps, and additionally at those of later feed-forward layers, [B, K] bool.

    Difference from the paper's text, whose objective sums similarities of neighbouring steps and so only selects the
    lowest ones: `anchors` counts the similarity of every step to the step whose output it reuses.
    """
    own_updates = anchors(calibration.similarity, config.budget, config.last_steps)
    return bubbling_union(own_updates, calibration.surge, feed_forward_like(calibration.blocks), config.top_blocks)


def anchors(similarity: Tensor, budget: int, last: int = 0) -> Tensor:
    """Choose `budget` of K steps, such that the steps in between are most similar to the preceding chosen ones.

    similarity: [B, K, K]; last: number of chosen steps that are the last steps. Returns [B, K] bool, step 0 always
    chosen. Each of B problems is solved exactly, in O(budget K^2): with gain[a, b] = sum_{t=a..b} similarity[a, t], the
    best total of m choices before step j is best_m[j] = max_{i < j} best_{m-1}[i] + gain[i, j - 1].
    """
    problems, steps = similarity.shape[:2]
    free_steps = steps - last
    gain = similarity[:, :free_steps, :free_steps].double().triu().cumsum(-1)
    before = torch.ones(free_steps, free_steps, dtype=torch.bool, device=similarity.device).tril(
        -1
    )  # begins after it ends
    best = gain.new_full((problems, free_steps + 1), -torch.inf)
    best[:, 0] = 0.0
    choices: list[Tensor] = []
    for _ in range(budget - last):
        value, choice = (best[:, :-1, None] + gain).masked_fill(before, -torch.inf).max(1)
        best = torch.cat([torch.full_like(best[:, :1], -torch.inf), value], 1)
        choices.append(choice)
    is_chosen = torch.zeros(problems, steps, dtype=torch.bool, device=similarity.device)
    is_chosen[:, free_steps:] = True
    end = torch.full((problems, 1), free_steps, device=similarity.device)
    for choice in reversed(choices):
        end = choice.gather(1, end - 1)
        is_chosen.scatter_(1, end, True)
    return is_chosen


def bubbling_union(updates: Tensor, surge: Tensor, spreads: Tensor, top: int) -> Tensor:
    """Return updates [B, K] bool in which the `top` blocks with the largest change, surge [B], are also updated in the
    steps of later blocks that amplify errors (BAC's bubbling union).

    Blocks are in computation order; spreads: [B] bool, blocks that amplify errors. A spreading block computed from a
    stale input propagates that input's error, so its updates are added to those of the `top` blocks before it. All
    additions come from blocks further back, so the order of the unions does not matter.
    """
    after = torch.ones(len(updates), len(updates), device=updates.device).triu() * spreads  # [u, v]: v spreads, v >= u
    follow_updates = after @ updates.to(after.dtype) > 0
    is_top = torch.zeros(len(updates), dtype=torch.bool, device=updates.device)
    is_top[surge.topk(min(top, len(updates))).indices] = True
    return updates | (follow_updates & is_top[:, None])


def feed_forward_like(blocks: tuple[str, ...]) -> Tensor:
    """Return the mask of blocks that act like feed-forward layers, [B] bool.

    In a transformer these are its feed-forward layers. Networks without them have a single kind of block, hidden layers
    (MLP) or convolutions (U-Net), each of which mixes channels and amplifies errors in the same way; there it is all
    blocks.
    """
    feeds_forward = torch.tensor([name.endswith(FEED_FORWARD) for name in blocks])
    return feeds_forward if bool(feeds_forward.any()) else torch.ones_like(feeds_forward)


keep_former_names(__name__, {"spreading": "feed_forward_like"})
