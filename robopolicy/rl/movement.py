"""Movement of a world's rows, in units of the deviation of the states that were seen.

Few rows that are alike have no deviation of their own, so all states of a call of `EpisodePlayer.play` count.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.arrays import Array
from robopolicy.nn.normalizer import with_constants_kept


def changed_rows(
    before: Mapping[str, Any], after: Mapping[str, Any], spread: Mapping[str, Tensor], still: float = 1e-3
) -> Array:
    """Return the rows whose vector fields changed during a chunk, [B] bool, by more than `still` times their deviation
    `spread`, key -> [D].

    before, after: key -> [B, H, ...], of which the newest frames are compared; images are ignored. A stuck robot that
    repeats its actions corresponds to repeated text of a language model.
    """
    then, now = newest_vectors(before), newest_vectors(after)
    changes = [((now[key] - then[key]).abs() / spread[key] > still).any(-1) for key in then if key in now]
    return np.asarray(torch.stack(changes).any(0).cpu(), dtype=np.bool_)


def newest_vectors(observation: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the vector fields of the newest frame, key -> [B, D]."""
    return {
        key: value[:, -1].flatten(1)
        for key, value in observation.items()
        if isinstance(value, Tensor) and value.dtype.is_floating_point
    }


class StateSpread:
    """Deviation of the vector fields over all states of a call of `play` so far, by element."""

    def __init__(self):
        self.count = 0
        self.mean: dict[str, Tensor] = {}
        self.squares: dict[str, Tensor] = {}

    def add(self, observation: Mapping[str, Any], rows: list[int]) -> None:
        """Add the newest states of `rows` [n]."""
        total = self.count + len(rows)
        for key, value in newest_vectors(observation).items():
            new = value[rows].double()
            zero = torch.zeros_like(new[0])
            mean, gap = self.mean.get(key, zero), new.mean(0) - self.mean.get(key, zero)
            self.mean[key] = mean + gap * len(rows) / total
            own = (new - new.mean(0)).square().sum(0)
            self.squares[key] = self.squares.get(key, zero) + own + gap.square() * self.count * len(rows) / total
        self.count = total

    def values(self) -> dict[str, Tensor]:
        """Return the deviations, 1 where no state has differed so far (rounding errors are no movement), key -> [D]."""
        return {key: with_constants_kept((value / self.count).sqrt().float()) for key, value in self.squares.items()}
