"""Experimental replay of recent iterations, of teacher-labelled data, and of successes; see `robopolicy.rl.replay`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from robopolicy.core.arrays import integers
from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import RECENT
from robopolicy.core.rollouts import Rollouts, concatenate
from robopolicy.core.segments import Segments, distinct
from robopolicy.rl.context import Context, Tools
from robopolicy.rl.registry import Need, Slot, mechanism
from robopolicy.rl.replay import Buffer, append_rollouts, with_advantage, without_lineage


@mechanism(Slot.REPLAY, "remix", source="ReMix, arXiv:2507.06892", needs=())
class ReMix(Buffer):
    """Mix episodes of the last `keep` iterations into each batch, then reincarnate: continue on-policy from there.

    The paper's three parts: older rows with their original advantages, `share` per current row, and a higher
    update-to-data ratio (finetune.epochs); a mix of the KL penalties to the base and to the policy before the update,
    auxiliaries=[kl_convex]; and, once the fraction `until` of the run is completed, the base is replaced by the current
    policy (reincarnation), after which only current rows are used. coefficient=decoupled_ppo weights older rows by
    their recorded probabilities, capped (the paper clips each row around its own ratio to them). Fractions and weights
    are chosen here: the abstract gives none.
    """

    def __init__(self, *, keep: int = 2, share: float = 0.5, until: float = 0.7, reincarnate: bool = True):
        super().__init__()
        self.keep = keep
        self.share = share
        self.until = until
        self.reincarnate = reincarnate

    def reincarnates(self, context: Context) -> bool:
        """Return whether this is the first on-policy iteration."""
        before = (context.iteration - 1) / max(1, context.iterations)
        return self.reincarnate and before < self.until <= context.share

    def mix(self, rollouts: Rollouts, context: Context) -> Rollouts:
        """Return current rows together with older ones."""
        past = [part for _, part in self.kept]
        self.kept = [*self.kept, (context.iteration, rollouts)][-self.keep :]
        if not past or context.share >= self.until:
            return rollouts
        count = max(1, round(self.share * len(rollouts.group) / len(past)))
        older: list[Rollouts] = []
        for part in past:
            order = torch.randperm(len(part.group), generator=context.generator, device=context.generator.device)
            older.append(part.take(order[:count].sort().values))
        return append_rollouts(rollouts, older)


@mechanism(Slot.REPLAY, "partial_updates", source="ReLIC, arXiv:2410.02751", needs=())
class PartialUpdates(Buffer):
    """Learn from a long rollout in parts while it is played: `parts` - 1 updates on the newest part, then one on all.

    An iteration is a part: set finetune.rollout_length to a part's length. Episodes and trials go on from one part to
    the next, and so does a policy's memory, but the gradients of an update on one part reach no frame before it. For
    the update on all parts the values of earlier ones, and so their advantages, are computed anew with the current
    weights; the advantages of each end with its part, where the value of what follows is taken, and gradients reach
    the whole memory.
    """

    judges_anew = True

    def __init__(self, *, parts: int = 4):
        super().__init__()
        self.parts = parts

    def mix(self, rollouts: Rollouts, context: Context) -> Rollouts:
        """Return the newest part or, at the end of a rollout, all of its parts."""
        if len(self.kept) + 1 < self.parts:
            self.kept = [*self.kept, (context.iteration, rollouts)]
            return self._alone(rollouts)
        earlier, self.kept = [part for _, part in self.kept], []
        if not earlier:
            return rollouts
        parts = [replace(rollouts, logp_proximal=None), *(without_lineage(part) for part in earlier)]
        return context.judged_anew(concatenate(parts))

    def _alone(self, rollouts: Rollouts) -> Rollouts:
        """Limit the gradients of a stream's decisions to the frames of its part; whole episodes have no others."""
        if rollouts.whole or RECENT not in rollouts.latents:
            return rollouts
        before = rollouts.duration.cumsum(1) - rollouts.duration
        recent = rollouts.latents[RECENT].minimum(before + 1)
        return replace(rollouts, latents={**rollouts.latents, RECENT: recent})

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Restore all tensors."""
        rollouts = tree["rollouts"]
        parts = [Rollouts.of(rollouts[str(place)]) for place in range(len(rollouts))]
        self.kept = list(zip(tree["iterations"], parts, strict=True))


@mechanism(
    Slot.MODEL,
    "success_pool",
    source="DART-GUI, arXiv:2509.23866; anchors of DaGRPO, arXiv:2512.06337",
    needs=(Need.GROUPS, Need.STARTS),
)
class SuccessPool:
    """Keep the newest successes of every initial state; a group without any gets one in the place of a random failure.

    Before advantages are computed, so that such a group has some; a replay would come after them. It is a random one of
    the `capacity` newest; DART's authors put the newest in the place of the oldest failure. The older row keeps
    the probabilities that it was chosen with: coefficient=decoupled_ppo with limit=1 weighs by them, as in DART.
    capacity: successes per initial state. Stored rows are part of checkpoints; they do not count in metrics of success,
    nor for the sampler. It comes first among models.
    """

    def __init__(self, tools: Tools, *, capacity: int = 4):
        self.capacity = capacity
        self.kept: dict[int, Rollouts] = {}

    def annotate(self, rollouts: Rollouts, context: Context) -> Rollouts:
        """Return the rollouts with stored successes in groups without any, then store the new ones. Raises ConfigError
        if episodes branch.
        """
        if bool((rollouts.parent >= 0).any()):
            raise ConfigError(
                "models=[success_pool] replaces episodes, from which others may branch: set branch_at=[], or leave it "
                "out."
            )
        past = rollouts.extras.replayed
        rollouts = rollouts.with_extras(replayed=torch.zeros_like(rollouts.alive) if past is None else past)
        groups, success = Segments.of(rollouts.group), rollouts.row_success
        has_success = groups.sum(success.float())[groups.index] > 0
        starts = rollouts.extras["start"][:, 0]
        stays, anchors = torch.ones_like(success), list[Rollouts]()
        for group in distinct(rollouts.group[~has_success])[0]:
            members = (rollouts.group == group).nonzero().squeeze(1)
            pool = self.kept.get(int(starts[members[0]]))
            if pool is not None:
                stays[members[self._draw(len(members), context)]] = False
                anchor = pool.take(self._draw(len(pool.group), context)[None])
                anchors.append(replace(anchor, group=torch.full_like(anchor.group, int(group))))
        mixed = [rollouts.take(stays.nonzero().squeeze(1)), *anchors]
        for start in integers(distinct(starts[success])[0]):
            self._keep(start, rollouts.take((success & (starts == start)).nonzero().squeeze(1)))
        return concatenate(mixed, same_groups=True) if anchors else rollouts

    def _draw(self, count: int, context: Context) -> Tensor:
        draws = context.generator
        return torch.randint(count, (), generator=draws, device=draws.device)

    def _keep(self, start: int, successes: Rollouts) -> None:
        successes = successes.with_extras(replayed=torch.ones_like(successes.alive))
        old = self.kept.get(start)
        joined = successes if old is None else concatenate([old, successes], same_groups=True)
        newest = torch.arange(len(joined.group), device=joined.group.device)[-self.capacity :]
        self.kept[start] = joined.take(newest).compact()

    def tree(self) -> dict[str, Any]:
        """Return all tensors."""
        return {str(start): rollouts.tree() for start, rollouts in self.kept.items()}

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Restore all tensors."""
        self.kept = {int(start): Rollouts.of(rollouts) for start, rollouts in tree.items()}


@mechanism(Slot.REPLAY, "aggregate", source="DAgger, arXiv:1011.0686; DAgger for agents, arXiv:2605.12913", needs=())
class Aggregate(Buffer):
    """Dataset aggregation: adds rows of all iterations so far to each batch, for losses that relabel states.

    With auxiliaries=[dagger] the teacher labels them, independent of the acting policy; coefficient=none disables the
    rest of the loss. share: older rows per current row. capacity: number of stored rows, always a uniform sample
    without replacement of all rows so far. Older rows have advantage 0, so only auxiliary losses use them.
    """

    def __init__(self, *, capacity: int = 4096, share: float = 1.0):
        super().__init__()
        self.capacity, self.share = capacity, share
        self.keys: list[Tensor] = []

    def mix(self, rollouts: Rollouts, context: Context) -> Rollouts:
        """Return current rows together with older ones."""
        draws, count = context.generator, len(rollouts.group)
        past = [part for _, part in self.kept]
        indices = torch.randperm(sum(len(part.group) for part in past), generator=draws, device=draws.device)
        indices = indices[: round(self.share * count)]
        self.kept = [*self.kept, (context.iteration, rollouts.without(following=True))]
        # the rows with the largest of keys drawn once are a uniform sample of all rows that ever came (a reservoir)
        self.keys = [*self.keys, torch.rand(count, generator=draws, device=draws.device)]
        self._bound()
        older: list[Rollouts] = []
        for part in past:
            part_rows, indices = (
                indices[indices < len(part.group)],
                indices[indices >= len(part.group)] - len(part.group),
            )
            older.append(with_advantage(part.take(part_rows), torch.zeros(len(part_rows), device=part_rows.device)))
        return append_rollouts(rollouts, older)

    def _bound(self) -> None:
        """Keep the `capacity` rows with the largest keys."""
        all_keys = torch.cat(self.keys)
        if len(all_keys) <= self.capacity:
            return
        lowest_key = all_keys.topk(self.capacity).values[-1]
        stays = [(keys >= lowest_key).nonzero().squeeze(1) for keys in self.keys]
        kept_parts = [(place, index) for place, index in enumerate(stays) if len(index)]
        self.kept = [(self.kept[place][0], self.kept[place][1].take(index).compact()) for place, index in kept_parts]
        self.keys = [self.keys[place][index] for place, index in kept_parts]

    def tree(self) -> dict[str, Any]:
        """Return all tensors."""
        return {**super().tree(), "keys": {str(place): keys for place, keys in enumerate(self.keys)}}

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Restore all tensors."""
        super().restore(tree)
        self.keys = [tree["keys"][str(place)] for place in range(len(tree["keys"]))]
