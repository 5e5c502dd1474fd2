"""Statistics of ragged segments of a flat axis: groups of episodes, episodes of action chunks, subtrees.

A segment is the set of all entries with the same key, at any position; group sizes may differ. Entries outside `mask`
(or non-finite ones, for statistics of rewards) are ignored. Empty segments give `empty`.
"""

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

MOST_OF_TORCH = 2**24
"""Maximum number of entries of torch.quantile, which computes ranks in single precision."""


def quantile(values: Tensor, share: float | Tensor, *, nearest: bool = False) -> Tensor:
    """Return the quantiles [...] of all entries of values [...] at levels [...] in 0..1, for any number of entries.

    As torch.quantile: linear interpolation between order statistics, or the nearest one; NaN if any entry is NaN.
    """
    flat = values.flatten()
    if len(flat) <= MOST_OF_TORCH:
        return torch.quantile(flat, share, interpolation="nearest" if nearest else "linear")
    shares = torch.as_tensor(share, dtype=torch.float64)
    is_vector = shares.numel() > 1
    flat = flat.sort().values if is_vector else flat

    def order_statistic(place: int) -> Tensor:
        return flat[place] if is_vector else flat.kthvalue(place + 1).values

    quantiles: list[Tensor] = []
    for each in cast(list[float], shares.flatten().tolist()):  # pyright: ignore[reportUnknownMemberType]
        position = each * (len(flat) - 1)
        position = round(position) if nearest else position
        low = order_statistic(math.floor(position))
        quantiles.append(low.lerp(order_statistic(math.ceil(position)), position - math.floor(position)))
    result = torch.stack(quantiles).reshape(shares.shape)
    return torch.where(flat.isnan().any(), torch.nan, result)


def entropy_level(entropy: Tensor, mask: Tensor, pivot: float) -> Tensor:
    """Compute HAPO's h in [-1, 1], shaped as entropy (nats): the log-entropy relative to the masked entries' quantile
    `pivot`, divided by the maximum distance on that side; 0 outside the mask.
    """
    level = entropy.clamp(min=1e-6).log()
    centred = torch.where(mask, level - quantile(level[mask], pivot, nearest=True), 0.0)
    above, below = centred.clamp(min=0), centred.clamp(max=0)
    return above / above.max().clamp(min=1e-6) + below / below.min().abs().clamp(min=1e-6)


def distinct(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct rows [S, ...] of [N, ...] in ascending order, and the index of each row among them, [N]
    int64.
    """
    return cast(
        tuple[Tensor, Tensor],
        torch.unique(rows, dim=0, return_inverse=True),  # pyright: ignore[reportUnknownMemberType]
    )


@dataclass(frozen=True)
class Segments:
    """Assignment of entries to segments. index: [N] int64 in [0, count), the segment of every entry; count: number of
    segments S.
    """

    index: Tensor
    count: int

    @staticmethod
    def of(*keys: Tensor) -> "Segments":
        """Build segments from equality of all `keys`, each [N] integers; segments are numbered in key order."""
        stacked = torch.stack([key.long() for key in keys], -1)
        keys_of_segments, index = distinct(stacked)
        return Segments(index, len(keys_of_segments))

    def sum(self, values: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the sums [S] of values [N]."""
        if mask is not None:
            values = torch.where(mask, values, 0)
        total = torch.zeros(self.count, dtype=values.dtype, device=values.device)
        return total.index_add_(0, self.index, values)

    def size(self, mask: Tensor | None = None) -> Tensor:
        """Return the number of counted entries in each segment, [S] int64."""
        ones = torch.ones_like(self.index) if mask is None else mask.long()
        return self.sum(ones)

    def mean(self, values: Tensor, mask: Tensor | None = None, empty: float = 0.0) -> Tensor:
        """Return the means [S]."""
        size = self.size(mask)
        mean = self.sum(values, mask) / size.clamp(min=1)
        return torch.where(size > 0, mean, torch.full_like(mean, empty))

    def std(self, values: Tensor, mask: Tensor | None = None, *, unbiased: bool = False) -> Tensor:
        """Return the standard deviations [S], 0 for segments of one; unbiased divides by n - 1."""
        centred = values - self.mean(values, mask)[self.index]
        size = self.size(mask)
        variance = self.sum(centred.square(), mask) / (size - int(unbiased)).clamp(min=1)
        return variance.sqrt()

    def maximum(self, values: Tensor, mask: Tensor | None = None, empty: float = 0.0) -> Tensor:
        """Return the maxima [S]."""
        return self._extreme(values, mask, empty, "amax")

    def minimum(self, values: Tensor, mask: Tensor | None = None, empty: float = 0.0) -> Tensor:
        """Return the minima [S]."""
        return self._extreme(values, mask, empty, "amin")

    def median(self, values: Tensor, mask: Tensor | None = None, empty: float = 0.0) -> Tensor:
        """Return the medians [S]: the middle value, or the mean of the two middle ones."""
        return self.quantile(values, 0.5, mask, empty)

    def quantile(self, values: Tensor, share: float, mask: Tensor | None = None, empty: float = 0.0) -> Tensor:
        """Return the quantiles [S] by linear interpolation between order statistics, as numpy's default."""
        size = self.size(mask)
        rank = self.rank(values, mask)
        position = (size - 1).clamp(min=0).double() * share  # single precision counts no further than 2^24
        low, high = position.floor(), position.ceil()
        counted_mask = torch.ones_like(self.index, dtype=torch.bool) if mask is None else mask
        below = self.sum(values, counted_mask & (rank == low[self.index]))
        above = self.sum(values, counted_mask & (rank == high[self.index]))
        quantiles = below + (position - low).to(values.dtype) * (above - below)
        return torch.where(size > 0, quantiles, torch.full_like(quantiles, empty))

    def rank(self, values: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return each entry's rank in its segment in ascending order, [N] from 0; ties keep the order of entries.

        Entries outside `mask` rank last.
        """
        keys = values if mask is None else torch.where(mask, values, torch.full_like(values, torch.inf))
        by_value = keys.argsort(stable=True)
        if mask is not None:
            by_value = by_value[(~mask[by_value]).long().argsort(stable=True)]
        order = by_value[self.index[by_value].argsort(stable=True)]
        size = self.size()
        starts = torch.repeat_interleave(size.cumsum(0) - size, size)
        rank = torch.empty_like(self.index)
        rank[order] = torch.arange(len(order), device=order.device) - starts
        return rank

    def _extreme(self, values: Tensor, mask: Tensor | None, empty: float, how: str) -> Tensor:
        bound = -torch.inf if how == "amax" else torch.inf
        bounded_values = values if mask is None else torch.where(mask, values, torch.full_like(values, bound))
        extremes = torch.full((self.count,), bound, dtype=values.dtype, device=values.device)
        extremes = extremes.scatter_reduce(0, self.index, bounded_values, reduce=how)
        return torch.where(self.size(mask) > 0, extremes, torch.full_like(extremes, empty))
