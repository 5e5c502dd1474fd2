"""What is to be played: single episodes in groups, where they branch, and how such trees grow.

How trees grow, which of the running episodes get more branches and which are stopped early, is TreePO's,
arXiv:2508.17445. A segment there is a decision here. Its third heuristic, to fall back to a random place of a finished
path where no path runs and branches are left over, is not built: it needs every state kept.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.arrays import Array
from robopolicy.core.errors import ConfigError
from robopolicy.core.world import Snapshot


@dataclass(frozen=True)
class Request:
    """One episode to play. seed: of its start; group: whose outcomes it is compared with; task: index of the
    instruction, -1: whatever the seed says; state: one row's state to begin in instead.
    """

    seed: int
    group: int
    task: int = -1
    state: Snapshot | None = None


@dataclass(frozen=True)
class Branching:
    """at: decisions (from 0) at which every running episode splits; width: into how many, itself among them.

    step: how many steps of the decision the branches share (BranchGRPO's tree over the denoising chain; 0 shares the
    initial noise), several for a split after each of so many, at which every branch splits again; None: they split
    before the decision and share nothing of it. uncertain: the branches due to a group's episodes that stand at a
    decision together are shared out among them by how surprising their last decisions were (TreePO). Raises ConfigError
    unless width is at least 2 and decisions and steps are distinct and from 0.
    """

    at: tuple[int, ...] = ()
    width: int = 2
    step: int | tuple[int, ...] | None = None
    uncertain: bool = False

    def __post_init__(self):
        if self.width < 2 or any(step < 0 for step in self.at) or len(set(self.at)) != len(self.at):
            raise ConfigError(
                f"branch_width is {self.width}, branch_at {list(self.at)}: split in 2 or more, at 0 or later."
            )
        if isinstance(self.step, tuple) and (not self.step or len(set(self.step)) != len(self.step)):
            raise ConfigError(f"branch_sampling_step is {list(self.step)}: name distinct steps, or null for none.")

    @property
    def steps(self) -> tuple[int, ...]:
        """How many steps of the decision are shared at each split there, in order; -1: it is made afresh."""
        if self.step is None:
            return (-1,)
        return (self.step,) if isinstance(self.step, int) else tuple(sorted(self.step))

    @property
    def leaves(self) -> int:
        """Episodes that one root becomes, if none ends before the last split."""
        return self.width ** (len(self.at) * len(self.steps))


def groups_of(seeds: Sequence[int] | Array, sizes: int | Sequence[int], tasks: Sequence[int] = ()) -> list[Request]:
    """Return requests for one group per seed, `sizes` episodes each (ragged where a sequence is given).

    seeds: [G] of G groups; sizes: for all of them, or [G]; tasks: indices of instructions [G], or none. Raises
    ValueError where their numbers differ.
    """
    counts = [sizes] * len(seeds) if isinstance(sizes, int) else list(sizes)
    chosen = list(tasks) or [-1] * len(seeds)
    return [
        Request(int(seed), group, task)
        for group, (seed, count, task) in enumerate(zip(seeds, counts, chosen, strict=True))
        for _ in range(count)
    ]


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
    # 1e-9: a share of 2.9999999, which is 3 but for rounding, must not lose a branch.
    counts = np.floor(exact + 1e-9).astype(int)
    # counts - exact is minus the remainder, so the largest remainders come first.
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
