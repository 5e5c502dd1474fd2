"""How cache plans are made: Block-wise Adaptive Caching (BAC, arXiv:2506.13456), and what it must be compared with.

A scheduler turns what was seen of the blocks (`calibration`) into a table [B, K]: which of B blocks is computed in
which of K steps. A stranger's is a function like those here, named by its dotted path.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from robopolicy.core.errors import ConfigError
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
    """How a cache plan is made; raises ConfigError on what cannot be."""

    scheduler: str = "bac"
    """uniform (all blocks in evenly spaced steps), shared (all blocks in the steps that suit them together), bac (each
    block in its own steps), or a dotted path.
    """
    budget: int = 10
    """Updates S a block, the first step's included; BAC's union adds to them."""
    top_blocks: int = 5
    """BAC: so many blocks, those that change most, are computed whenever a feed-forward layer after them is; 0 for
    none.
    """
    last_steps: int = 2
    """So many of the updates are the chain's last steps, which nothing corrects any more; 0 leaves them to the
    scheduler.
    """
    order: int = 0
    """Between updates a block's output is held (0) or extrapolated (TaylorSeer of order 1 or 2)."""

    def __post_init__(self) -> None:
        if min(self.top_blocks, self.last_steps, self.order) < 0:
            raise ConfigError("top_blocks, last_steps and order cannot be negative.")
        if self.budget <= self.last_steps:
            raise ConfigError(
                f"budget is {self.budget}: the first step and the last {self.last_steps} need at least "
                f"{self.last_steps + 1} updates."
            )


type CacheScheduler = Callable[[Calibration, CacheConfig], Tensor]
"""What a scheduler's name stands for: returns which blocks are computed in which steps, [B, K] bool, in the first step
all of them.
"""


def make_plan(calibration: Calibration, config: CacheConfig) -> CachePlan:
    """Return the plan that config asks for; raises ConfigError where there can be none."""
    if config.budget > calibration.steps:
        raise ConfigError(f"budget is {config.budget}, and the chain takes {calibration.steps} steps at most.")
    scheduler: CacheScheduler = CACHE_SCHEDULERS.load(config.scheduler)
    updates = scheduler(calibration, config)
    expected = (len(calibration.blocks), calibration.steps)
    if tuple(updates.shape) != expected or updates.dtype != torch.bool:
        raise ConfigError(
            f"The cache scheduler '{config.scheduler}' returns {updates.dtype} {list(updates.shape)}: [B, K] here are "
            f"torch.bool {list(expected)}."
        )
    return CachePlan.of(calibration.blocks, updates, config.scheduler, config.budget, config.order)


def plans_to_try(
    calibration: Calibration, schedulers: Sequence[str], budgets: Sequence[int], orders: Sequence[int]
) -> dict[str, CachePlan]:
    """Return a plan of every combination by name, "bac cache 10" or "bac cache 10, order 1"; raises as `make_plan`."""
    return {
        f"{scheduler} cache {budget}{f', order {order}' if order else ''}": make_plan(
            calibration, CacheConfig(scheduler, budget, order=order)
        )
        for scheduler in schedulers
        for budget in budgets
        for order in orders
    }


def uniform(calibration: Calibration, config: CacheConfig) -> Tensor:
    """Return every block at evenly spaced steps, [B, K] bool."""
    free, spaced = calibration.steps - config.last_steps, config.budget - config.last_steps
    updates = torch.zeros(len(calibration.blocks), calibration.steps, dtype=torch.bool)
    updates[:, torch.arange(spaced) * free // spaced] = True
    updates[:, free:] = True
    return updates


def shared(calibration: Calibration, config: CacheConfig) -> Tensor:
    """Return all blocks at the steps that are best for the sum of their similarities, [B, K] bool."""
    summed = calibration.similarity.sum(0, keepdim=True)
    return anchors(summed, config.budget, config.last_steps).expand(len(calibration.blocks), -1).clone()


def bac(calibration: Calibration, config: CacheConfig) -> Tensor:
    """Return each block at its own best steps, and then at those of feed-forward layers after it, [B, K] bool.

    Deviation from the paper's text, whose objective sums similarities of neighbouring steps and so only picks the
    lowest ones: `anchors` counts the similarity of every step to the one that it is answered from.
    """
    own = anchors(calibration.similarity, config.budget, config.last_steps)
    return bubbling_union(own, calibration.surge, spreading(calibration.blocks), config.top_blocks)


def anchors(similarity: Tensor, budget: int, last: int = 0) -> Tensor:
    """Choose `budget` of K steps, such that the steps in between are most similar to the chosen ones before them.

    similarity: [B, K, K]; last: how many of the chosen ones are the last steps. Returns [B, K] bool, step 0 always
    chosen. Each of B problems is solved exactly, in O(budget K^2): with gain[a, b] = sum_{t=a..b} similarity[a, t],
    what the best m choices gain in steps before j is best_m[j] = max_{i < j} best_{m-1}[i] + gain[i, j - 1].
    """
    problems, steps = similarity.shape[:2]
    free = steps - last
    gain = similarity[:, :free, :free].double().triu().cumsum(-1)
    before = torch.ones(free, free, dtype=torch.bool, device=similarity.device).tril(-1)  # begins after it ends
    best = gain.new_full((problems, free + 1), -torch.inf)
    best[:, 0] = 0.0
    choices: list[Tensor] = []
    for _ in range(budget - last):
        value, choice = (best[:, :-1, None] + gain).masked_fill(before, -torch.inf).max(1)
        best = torch.cat([torch.full_like(best[:, :1], -torch.inf), value], 1)
        choices.append(choice)
    chosen = torch.zeros(problems, steps, dtype=torch.bool, device=similarity.device)
    chosen[:, free:] = True
    end = torch.full((problems, 1), free, device=similarity.device)
    for choice in reversed(choices):
        end = choice.gather(1, end - 1)
        chosen.scatter_(1, end, True)
    return chosen


def bubbling_union(updates: Tensor, surge: Tensor, spreads: Tensor, top: int) -> Tensor:
    """Return updates [B, K] bool in which the blocks of the greatest surge [B] also are updated where others are.

    Blocks are in the order of their computation; spreads: [B] bool, those that make errors surge. A spreading block
    that is computed from a stale input spreads that input's error, so its updates bubble up to the `top` blocks before
    it. What they get from a block after them, that one has got from nowhere else but blocks after itself: the order of
    the unions does not matter.
    """
    after = torch.ones(len(updates), len(updates), device=updates.device).triu() * spreads  # [u, v]: v spreads, v >= u
    asked = after @ updates.to(after.dtype) > 0
    chosen = torch.zeros(len(updates), dtype=torch.bool, device=updates.device)
    chosen[surge.topk(min(top, len(updates))).indices] = True
    return updates | (asked & chosen[:, None])


def spreading(blocks: tuple[str, ...]) -> Tensor:
    """Return which blocks play the part of feed-forward layers, [B] bool.

    Of a transformer these are its feed-forward layers. Networks without any have one kind of block only, hidden layers
    (MLP) or convolutions (U-Net), each of which mixes channels and so makes errors surge like them: there it is all.
    """
    named = torch.tensor([name.endswith(FEED_FORWARD) for name in blocks])
    return named if bool(named.any()) else torch.ones_like(named)
