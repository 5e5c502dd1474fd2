"""How trees of episodes grow: which of the running ones get more branches, and which are stopped early.

Source: TreePO, arXiv:2508.17445. A segment there is a decision here. Its third heuristic, to fall back to a random
place of a finished path where no path runs and branches are left over, is not built: it needs every state kept.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.arrays import Array


def surprise(logp: Tensor, mask: Tensor) -> Array:
    """Return how unlikely each decision's steps were, [B]: the mean of -logp over masked steps [B, K], nats; 0 of none.

    A policy that is unsure says it by rating what it chose low.
    """
    return np.asarray(-(torch.where(mask, logp, 0.0).sum(-1) / mask.sum(-1).clamp(min=1)).cpu(), dtype=np.float64)


def shared_out(surprises: Sequence[float], branches: int) -> list[int]:
    """Return how many of so many `branches` each of n episodes gets, [n]: in proportion to exp(surprise).

    Rounded to whole ones by largest remainders (equal ones: the first), so that they add up to `branches`.
    """
    exact = np.exp(np.array(surprises) - max(surprises))
    exact = branches * exact / exact.sum()
    counts = np.floor(exact + 1e-9).astype(int)
    counts[np.argsort(counts - exact, kind="stable")[: branches - counts.sum()]] += 1
    return [int(count) for count in counts]


def shared_in_groups(groups: Sequence[int], surprises: Sequence[float], each: int) -> list[int]:
    """Return how many branches each of n episodes gets, [n]: a group's share out `each` times their number."""
    found = [each] * len(groups)
    for group in set(groups):
        some = [place for place, other in enumerate(groups) if other == group]
        counts = shared_out([surprises[place] for place in some], each * len(some))
        for place, count in zip(some, counts, strict=True):
            found[place] = count
    return found


def moved(before: Mapping[str, Any], after: Mapping[str, Any], still: float = 1e-3) -> Array:
    """Return which rows' vector fields changed in a decision, [B] bool, by `still` of their spread over the rows.

    before, after: key -> [B, H, ...], of which the newest frames are compared; images are not. What a stuck robot does
    over and over is what text repeated over and over is to a language model.
    """
    found: list[Tensor] = []
    for key, seen in before.items():
        now = after.get(key)
        if isinstance(seen, Tensor) and isinstance(now, Tensor) and seen.dtype.is_floating_point:
            then, newest = seen[:, -1].flatten(1), now[:, -1].flatten(1)
            spread = then.std(0, unbiased=False).clamp(min=1e-6)
            found.append(((newest - then).abs() / spread > still).any(-1))
    return np.asarray(torch.stack(found).any(0).cpu(), dtype=np.bool_)
