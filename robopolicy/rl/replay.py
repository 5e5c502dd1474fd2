"""Replay of episodes from earlier iterations: classes with mix(prepared, context) -> prepared.

They take rollouts with `advantage` in their extras and without next observations, and return them together with older
rows. The trainer recomputes the log-probabilities of older rows, so that clipping is relative to the current policy
(`logp_proximal`) and the recorded ones stay available (`logp_behaviour`); coefficient=decoupled_ppo or min_pro corrects
for the difference. With proximal_policy=behaviour every ratio is to the policy that acted.
"""

from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from robopolicy.core.former_names import keep_former_names
from robopolicy.core.rollouts import Rollouts, concatenate
from robopolicy.rl.context import Context
from robopolicy.rl.registry import Need, Slot, mechanism


class Replay(Protocol):
    """Protocol of replay mechanisms; see the module."""

    def mix(self, rollouts: Rollouts, context: Context) -> Rollouts:
        """Store useful rows of these rollouts, and return the rollouts together with older rows."""
        ...

    def tree(self) -> dict[str, Any]:
        """Return the state for `restore`."""
        ...

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Restore the state from `tree`."""
        ...


@runtime_checkable
class Reincarnates(Protocol):
    """A replay that at some iteration resets the base to the current policy (reincarnation)."""

    def reincarnates(self, context: Context) -> bool:
        """Return whether the base is reset in this iteration."""
        ...


@runtime_checkable
class JudgesAnew(Protocol):
    """A replay that computes values of earlier rows anew, so that `mix` takes rollouts with next observations.

    judges_anew: True.
    """

    judges_anew: bool


class Buffer:
    """Rollouts of earlier iterations, each with its iteration number."""

    def __init__(self) -> None:
        self.kept: list[tuple[int, Rollouts]] = []

    def tree(self) -> dict[str, Any]:
        """Return all tensors."""
        return {
            "iterations": [iteration for iteration, _ in self.kept],
            "rollouts": {str(place): rollouts.tree() for place, (_, rollouts) in enumerate(self.kept)},
        }

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Restore all tensors."""
        count = len(tree["iterations"])
        parts = [Rollouts.of(tree["rollouts"][str(place)]).without(following=True) for place in range(count)]
        self.kept = list(zip(tree["iterations"], parts, strict=True))


def without_lineage(rollouts: Rollouts) -> Rollouts:
    """Remove the lineage of older rows (their prefixes stay masked)."""
    no_parent = torch.full_like(rollouts.parent, -1)
    return replace(rollouts, parent=no_parent, branch_decision=no_parent, logp_proximal=None)


def append_rollouts(rollouts: Rollouts, older: list[Rollouts]) -> Rollouts:
    """Append older rows to the current ones, in separate groups; return the current ones unchanged if there are
    none.
    """
    parts = [replace(rollouts, logp_proximal=None).without(following=True)]  # advantages are made: nothing looks ahead
    parts += [without_lineage(part.without(following=True)) for part in older if len(part.group)]
    return concatenate(parts) if len(parts) > 1 else rollouts


@mechanism(Slot.REPLAY, "spear", source="SPEAR, arXiv:2509.22601", needs=(Need.GROUPS,))
class Spear(Buffer):
    """Self-imitation: replay good past episodes with an advantage relative to the policy's current performance.

    Episodes with positive advantage are stored, the best `capacity` of them, for `age` iterations. At each use their
    advantage is R minus the median of the recent groups' mean returns, divided by the standard deviation of the current
    returns, unless that is below a hundredth of the largest difference to the median; those no longer positive are left
    out. Their weight grows along a cosine to `weight` over the first `warmup` fraction of the run. In the paper nothing
    is divided, neither here nor for current episodes, and old episodes are learned from after the current ones, not in
    the same minibatches.
    """

    def __init__(
        self, *, capacity: int = 256, age: int = 20, weight: float = 0.5, warmup: float = 0.1, share: float = 0.5
    ):
        super().__init__()
        self.capacity = capacity
        self.age = age
        self.weight = weight
        self.warmup = warmup
        self.share = share

    def mix(self, rollouts: Rollouts, context: Context) -> Rollouts:
        """Return the current episodes and up to `share` times as many good past ones."""
        today = context.iteration
        past = [part for iteration, part in self.kept if today - iteration <= self.age]
        self._keep(rollouts, today)
        returns = rollouts.row_return
        if not past or not context.history:
            return rollouts
        # The median: one lucky group does not move what counts as usual by now.
        middle, spread = median(context.history[-64:]), float(returns.std(unbiased=False))
        largest = max([0.0, *(float(part.row_return.max()) - middle for part in past if len(part.group))])
        # Where all succeed or all fail there is no scale, and no end to what a past success would count.
        spread = spread if spread > 0.01 * largest else 1.0
        older_parts: list[Rollouts] = []
        for part in past:
            advantage = (part.row_return - middle) / spread
            part = part.take((advantage > 0).nonzero().squeeze(-1))
            if len(part.group):
                gain = (part.row_return - middle) / spread
                older_parts.append(with_advantage(part, self._grown(context) * gain))
        if not older_parts:
            return rollouts
        older = append_rollouts(older_parts[0], older_parts[1:])
        row_limit = int(self.share * len(returns))
        if len(older.group) > row_limit:
            order = torch.randperm(len(older.group), generator=context.generator, device=context.generator.device)
            older = older.take(order[:row_limit].sort().values)
        return append_rollouts(rollouts, [older])

    def _grown(self, context: Context) -> float:
        """Current weight."""
        done = min(1.0, context.share / self.warmup) if self.warmup > 0 else 1.0
        return self.weight * 0.5 * (1 - float(torch.cos(torch.tensor(torch.pi * done))))

    def _keep(self, rollouts: Rollouts, today: int) -> None:
        is_own = rollouts.mask.any(-1) & rollouts.alive
        # Over own decisions only: a copied prefix belongs to its parent.
        total = torch.where(is_own, rollouts.extras["advantage"].mean(-1), 0.0).sum(1)
        good_rows = (total > 0).nonzero().squeeze(-1)
        self.kept = [(iteration, part) for iteration, part in self.kept if today - iteration < self.age]
        self.kept.append((today, rollouts.take(good_rows).compact()))
        while len(self.kept) > 1 and sum(len(part.group) for _, part in self.kept) > self.capacity:
            oldest, part = self.kept[0]
            excess = sum(len(item.group) for _, item in self.kept) - self.capacity
            best = part.row_return.argsort(descending=True)[: max(0, len(part.group) - excess)]
            self.kept[0] = (oldest, part.take(best.sort().values).compact())
            if not len(best):
                self.kept.pop(0)


def with_advantage(rollouts: Rollouts, per_row: Tensor) -> Rollouts:
    """Set the advantage of every scored step of a row to [B]."""
    scored_mask = rollouts.mask & rollouts.alive[..., None]
    return rollouts.with_extras(advantage=torch.where(scored_mask, per_row[:, None, None].float(), 0.0))


keep_former_names(__name__, {"joined": "append_rollouts"})
