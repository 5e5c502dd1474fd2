"""How the scores of several imagined futures become one; the names are in `robopolicy.nn.configuration`."""

from collections.abc import Callable

import torch
from torch import Tensor


def majority_mean(scores: Tensor) -> Tensor:
    """Return the mean of the majority of scores [..., F]: those on the side of their midrange that more are on.

    A tie goes to the high side; the result is [...].
    """
    middle = (scores.amin(-1, keepdim=True) + scores.amax(-1, keepdim=True)) / 2
    high = scores >= middle
    chosen = torch.where(2 * high.sum(-1, keepdim=True) >= scores.shape[-1], high, ~high)
    return (scores * chosen).sum(-1) / chosen.sum(-1)


AGGREGATED: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda scores: scores.mean(-1),
    "lower_bound": lambda scores: scores.mean(-1) - scores.std(-1, correction=0),
    "median": lambda scores: scores.median(-1).values,
    "majority": majority_mean,
}
"""Name -> scores [..., F] of the futures of a decision -> its score [...]."""
