"""Episodes of earlier iterations that are learned from again: classes with mix(prepared, context) -> prepared.

They get rollouts with `advantage` among their extras and without next observations, and return those with older rows
beside them. The trainer scores the older rows again, so that clips are around the policy as it is now (`logp_proximal`)
and the probabilities they were drawn with stay known (`logp_behaviour`); coefficient=decoupled_ppo or rec corrects for
the difference.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from robopolicy.core.rollouts import Rollouts, concatenate
from robopolicy.rl.context import Context
from robopolicy.rl.registry import Need, Slot, mechanism


class Replay(Protocol):
    """See the module."""

    def mix(self, rollouts: Rollouts, context: Context) -> Rollouts:
        """Keep what is worth it of these rollouts, and return them with older ones beside them."""
        ...

    def tree(self) -> dict[str, Any]:
        """Return what `restore` needs."""
        ...

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Go on from `tree`."""
        ...


@runtime_checkable
class Reincarnates(Protocol):
    """A replay that at some iteration makes the policy its own base, from which it goes on."""

    def reincarnates(self, context: Context) -> bool:
        """Return whether that is now."""
        ...


class Buffer:
    """Rollouts of earlier iterations, each with the iteration it is from."""

    def __init__(self) -> None:
        self.kept: list[tuple[int, Rollouts]] = []

    def tree(self) -> dict[str, Any]:
        """Return all tensors."""
        return {
            "iterations": [iteration for iteration, _ in self.kept],
            "rollouts": {str(place): rollouts.tree() for place, (_, rollouts) in enumerate(self.kept)},
        }

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Go on from all tensors."""
        count = len(tree["iterations"])
        parts = [Rollouts.of(tree["rollouts"][str(place)]).without(following=True) for place in range(count)]
        self.kept = list(zip(tree["iterations"], parts, strict=True))


def _older(rollouts: Rollouts) -> Rollouts:
    """Give rows of the past no lineage (their prefixes stay masked)."""
    alone = torch.full_like(rollouts.parent, -1)
    return replace(rollouts, parent=alone, branch_decision=alone, logp_proximal=None)


def joined(rollouts: Rollouts, older: list[Rollouts]) -> Rollouts:
    """Return today's rows and behind them older ones, in groups of their own; as they are where there are none."""
    parts = [replace(rollouts, logp_proximal=None).without(following=True)]  # advantages are made: nothing looks ahead
    parts += [_older(part.without(following=True)) for part in older if len(part.group)]
    return concatenate(parts) if len(parts) > 1 else rollouts


@mechanism(Slot.REPLAY, "spear", source="SPEAR, arXiv:2509.22601", needs=(Need.GROUPS,))
class Spear(Buffer):
    """Self-imitation: good episodes of the past come back with an advantage against how good the policy is by now.

    Kept are episodes whose advantage was positive, the best `capacity` of them, for `age` iterations. At each use their
    advantage is R minus the median of the recent groups' mean returns, over the spread of returns, and those that are
    no longer positive are left out. Their weight grows along a cosine over the first `warmup` of the run to `weight`.
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
        """Return today's episodes and, beside them, at most `share` times as many of the past's good ones."""
        today = context.iteration
        past = [part for iteration, part in self.kept if today - iteration <= self.age]
        self._keep(rollouts, today)
        returns = rollouts.row_return
        if not past or not context.history:
            return rollouts
        # The median: one lucky group does not move what counts as usual by now.
        middle, spread = _median(context.history[-64:]), float(returns.std(unbiased=False)) + 1e-6
        replayed: list[Rollouts] = []
        for part in past:
            advantage = (part.row_return - middle) / spread
            part = part.take((advantage > 0).nonzero().squeeze(-1))
            if len(part.group):
                gain = (part.row_return - middle) / spread
                replayed.append(with_advantage(part, self._grown(context) * gain))
        if not replayed:
            return rollouts
        older = joined(replayed[0], replayed[1:])
        allowed = int(self.share * len(returns))
        if len(older.group) > allowed:
            order = torch.randperm(len(older.group), generator=context.generator, device=context.generator.device)
            older = older.take(order[:allowed].sort().values)
        return joined(rollouts, [older])

    def _grown(self, context: Context) -> float:
        """The weight by now."""
        done = min(1.0, context.share / self.warmup) if self.warmup > 0 else 1.0
        return self.weight * 0.5 * (1 - float(torch.cos(torch.tensor(torch.pi * done))))

    def _keep(self, rollouts: Rollouts, today: int) -> None:
        played = rollouts.mask.any(-1) & rollouts.alive
        # Over own decisions only: a copied prefix belongs to its parent.
        total = torch.where(played, rollouts.extras["advantage"].mean(-1), 0.0).sum(1)
        good = (total > 0).nonzero().squeeze(-1)
        self.kept = [(iteration, part) for iteration, part in self.kept if today - iteration < self.age]
        self.kept.append((today, rollouts.take(good).compact()))
        while len(self.kept) > 1 and sum(len(part.group) for _, part in self.kept) > self.capacity:
            oldest, part = self.kept[0]
            excess = sum(len(item.group) for _, item in self.kept) - self.capacity
            best = part.row_return.argsort(descending=True)[: max(0, len(part.group) - excess)]
            self.kept[0] = (oldest, part.take(best.sort().values).compact())
            if not len(best):
                self.kept.pop(0)


def with_advantage(rollouts: Rollouts, per_row: Tensor) -> Rollouts:
    """Give every scored step of a row its advantage [B]."""
    scored = rollouts.mask & rollouts.alive[..., None]
    return rollouts.with_extras(advantage=torch.where(scored, per_row[:, None, None].float(), 0.0))


def _median(values: tuple[float, ...]) -> float:
    return float(torch.tensor(values, dtype=torch.float64).median())
