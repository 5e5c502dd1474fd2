"""Pairs of episodes, one preferred to the other: stored on disk, learned from again, or from disk alone.

A folder of pairs holds whole episodes with all that scores them again (observations, images, latents, masks), as
safetensors and JSON. What a frozen encoder made of the images is not kept: whoever learns from them reads them anew, by
its own. Episodes of one group have one start; in the extra `preferred` those with 1 are preferred to those with -1.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from robopolicy.core.arrays import integers, is_mapping
from robopolicy.core.errors import ConfigError, DataError
from robopolicy.core.extras import Extras
from robopolicy.core.policy import is_condition
from robopolicy.core.rollouts import Rollouts, concatenate
from robopolicy.core.segments import Segments
from robopolicy.core.storage import recover_folder, write_folder_atomic
from robopolicy.core.tensors import load_tree, save_tree
from robopolicy.rl.coefficients import sides
from robopolicy.rl.context import Context, for_another_policy
from robopolicy.rl.registry import Slot, mechanism
from robopolicy.rl.replay import Buffer, joined

_NAME = "preferences"


@runtime_checkable
class StoresPairs(Protocol):
    """A replay whose episodes are worth keeping beyond the run."""

    def store(self, folder: Path, instructions: tuple[str, ...]) -> None:
        """Write them to `folder`, atomically; instructions: of the world, which `Rollouts.task` counts."""
        ...


@dataclass(frozen=True)
class Pairs:
    """rollouts: episodes with `preferred` among their extras; instructions: what their `task` counts."""

    rollouts: Rollouts
    instructions: tuple[str, ...]

    def following(self, instructions: tuple[str, ...]) -> Rollouts:
        """Return the episodes with `task` [B, T] counting `instructions`, without what an encoder made of their images.

        Raises DataError where one of their instructions is missing.
        """
        asked = [self.instructions[index] for index in sorted(set(integers(self.rollouts.task[:, 0])))]
        missing = [text for text in asked if text not in instructions]
        if missing:
            raise DataError(f"Stored pairs follow instructions that the world does not have: {', '.join(missing[:3])}.")
        places = [instructions.index(text) if text in instructions else -1 for text in self.instructions]
        task = torch.tensor(places, device=self.rollouts.task.device)[self.rollouts.task]
        return replace(_unread(self.rollouts), task=task)


def write_pairs(folder: Path, rollouts: Rollouts, instructions: tuple[str, ...]) -> None:
    """Write whole episodes with `preferred` [B, T] among their extras to `folder`, atomically.

    Raises DataError where they have no such verdicts, a group lacks one of its two sides, or images were left out
    because an encoder had read them.
    """
    _require_verdicts(rollouts, str(folder))
    if rollouts.images is None and any(is_condition(name) for name in rollouts.latents):
        raise DataError(
            f"{folder}: these episodes hold what an encoder made of images, and no images, which whoever learns from "
            "them reads: collect them with images."
        )
    tree = {"instructions": list(instructions), "rollouts": _bare(rollouts).tree()}
    write_folder_atomic(Path(folder), lambda inside: save_tree(inside, _NAME, tree))


def read_pairs(folder: Path | str, device: torch.device | str = "cpu") -> Pairs:
    """Read what `write_pairs` or a run of algorithm=grape wrote.

    Raises CheckpointError on missing or damaged files, and DataError where they hold no pairs.
    """
    tree = load_tree(recover_folder(Path(folder)), _NAME, device)
    if not {"instructions", "rollouts"} <= set(tree):
        raise DataError(f"{folder} holds no pairs of episodes: it lacks rollouts or instructions.")
    rollouts = Rollouts.of(tree["rollouts"])
    _require_verdicts(rollouts, str(folder))
    return Pairs(rollouts, tuple(tree["instructions"]))


@mechanism(Slot.REPLAY, "preferences", source="GRAPE, arXiv:2411.19309", needs=())
class Preferences(Buffer):
    """Keep the pairs of all rounds, learn from older ones again, and begin a round: the base becomes the policy as is.

    refresh: iterations in a round, 1 for a new reference with every batch of episodes, 0 for the policy as it came
    throughout. share: older episodes learned from per episode of today, by whole groups, 0 for none (the paper learns
    from its round's pairs). folder: stored pairs that count as older ones from the beginning. megabytes: the most that
    is kept, in memory and in the run's folder preferences/; the oldest go first. A pair keeps the verdict it was given.
    """

    def __init__(self, *, refresh: int = 1, share: float = 0.0, folder: str = "", megabytes: float = 256.0):
        super().__init__()
        if refresh < 0 or share < 0 or megabytes <= 0:
            raise ConfigError(
                f"options.preferences: refresh={refresh} and share={share:g} are at least 0, megabytes={megabytes:g} "
                "is above."
            )
        if folder and not share:
            raise ConfigError(f"options.preferences.folder={folder} is not learned from with share=0: raise share.")
        self.refresh = refresh
        self.share = share
        self.most = megabytes * 1e6
        self.given = read_pairs(folder) if folder else None

    def reincarnates(self, context: Context) -> bool:
        """Return whether a round begins."""
        return self.refresh > 0 and context.iteration % self.refresh == 0

    def mix(self, rollouts: Rollouts, context: Context) -> Rollouts:
        """Keep what has a verdict of these rollouts, and return them with older pairs beside them."""
        if self.given is not None:
            older = self.given.following(context.instructions).to(rollouts.group.device)
            version = torch.full_like(older.policy_version, -1)  # no policy of this run has made them
            self.kept, self.given = [(-1, replace(older, policy_version=version)), *self.kept], None
            self._bound()
        past = [part for _, part in self.kept]
        judged = _judged(rollouts.fresh)
        if len(judged.group):
            self.kept = [*self.kept, (context.iteration, judged)]
            self._bound()
        drawn = _drawn(past, round(self.share * len(rollouts.group)), context)
        if not drawn:
            return rollouts
        older = [_as_rows_of(part, rollouts) for part in drawn]
        read = [context.conditions(part) for part in older]
        own = {name for name in rollouts.latents if is_condition(name)}
        if any(
            set(each) != own for each in read
        ):  # a policy that cannot be asked: all rows are read as they are scored
            return joined(_unread(rollouts), older)
        older = [replace(part, latents={**part.latents, **each}) for part, each in zip(older, read, strict=True)]
        return joined(rollouts, older)

    def store(self, folder: Path, instructions: tuple[str, ...]) -> None:
        """Write all that is kept to `folder`, one dataset; nothing where there is nothing."""
        if self.kept:
            write_pairs(folder, concatenate([part for _, part in self.kept]), instructions)

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Go on from all tensors, those of the folder included."""
        super().restore(tree)
        self.kept = [(iteration, _unread(part)) for iteration, part in self.kept]
        self.given = None

    def _bound(self) -> None:
        """Forget the oldest iterations, and of the last that is left its first groups, until the rest fits."""
        while len(self.kept) > 1 and sum(_bytes(part) for _, part in self.kept) > self.most:
            self.kept.pop(0)
        if self.kept and _bytes(self.kept[0][1]) > self.most:
            iteration, part = self.kept[0]
            fits = max(2, int(self.most / (_bytes(part) / len(part.group))))
            groups = Segments.of(part.group)
            # Episodes from each group up to the last: the newest groups that fit stay.
            rows_from_here = groups.size().flip(0).cumsum(0).flip(0)
            stays = rows_from_here <= fits
            stays[-1] = True
            self.kept[0] = (iteration, part.take(stays[groups.index].nonzero().squeeze(1)).compact())


def _judged(rollouts: Rollouts) -> Rollouts:
    """Return the episodes of groups that have both sides, as `tpo` takes them, with these as verdicts."""
    if not len(rollouts.group):
        return rollouts
    advantage, groups = rollouts.extras["advantage"], Segments.of(rollouts.group)
    side = sides(advantage, rollouts.mask & (advantage != 0), rollouts.group)
    both = (groups.maximum(side) > 0) & (groups.minimum(side) < 0)
    judged = rollouts.with_extras(preferred=side.long()[:, None].expand(rollouts.shape).contiguous())
    return _bare(judged.take((both[groups.index] & (side != 0)).nonzero().squeeze(1)).compact())


def _drawn(parts: list[Rollouts], wanted: int, context: Context) -> list[Rollouts]:
    """Draw whole groups of all parts alike until there are as many as `wanted` episodes, fewer where there are less."""
    if not wanted or not parts:
        return []
    every = concatenate(parts)
    groups, draws = Segments.of(every.group), context.generator
    order = torch.randperm(groups.count, generator=draws, device=draws.device)
    # At least one group, even where the first alone has more episodes than are wanted.
    chosen = order[: max(1, int((groups.size()[order].cumsum(0) <= wanted).sum()))]
    return [every.take(torch.isin(groups.index, chosen).nonzero().squeeze(1))]


def _bare(rollouts: Rollouts) -> Rollouts:
    """Leave out all that scoring an episode again does not need; its verdict stays. Rewards become their sum.

    What an encoder made of images goes as well: it is larger than they are, and true of its weights alone.
    """
    alone = torch.full_like(rollouts.parent, -1)
    return replace(
        _unread(rollouts).without(following=True),
        rewards={"reward": torch.where(rollouts.valid, torch.stack(list(rollouts.rewards.values())).sum(0), 0.0)},
        extras=Extras(preferred=rollouts.extras["preferred"]),
        episode=torch.arange(len(alone), device=alone.device),
        parent=alone,
        branch_decision=alone,
        branch_sampling_step=None,
        logp_proximal=None,
    )


def _unread(rollouts: Rollouts) -> Rollouts:
    """Leave out what an encoder made of the images."""
    return replace(rollouts, latents=for_another_policy(rollouts.latents))


def _as_rows_of(part: Rollouts, rollouts: Rollouts) -> Rollouts:
    """Give stored episodes the rewards and extras that `rollouts` have, and their verdict as the advantage.

    Raises DataError where observations or latents are not of the same names and shapes.
    """
    _require_same(part, rollouts)
    extras = {name: value.new_zeros((*part.shape, *value.shape[2:])) for name, value in rollouts.extras.items()}
    scored = part.mask & part.alive[..., None]
    extras["advantage"] = torch.where(scored, part.extras["preferred"][..., None].float(), 0.0)
    extras["episode_steps"] = scored.sum((1, 2))[:, None].expand(part.shape)
    if "preferred" in rollouts.extras:
        extras["preferred"] = part.extras["preferred"]
    first, *others = rollouts.rewards
    nothing = torch.zeros_like(part.rewards["reward"])
    return replace(
        part,
        rewards={first: part.rewards["reward"], **dict.fromkeys(others, nothing)},
        extras=Extras.of(extras),
        observation={key: part.observation[key] for key in rollouts.observation},
        images=None if rollouts.images is None or part.images is None else part.images.only(rollouts.images.frames),
        latents={name: part.latents[name] for name in part.latents if name in (*rollouts.latents, "executed")},
        branch_sampling_step=None if rollouts.branch_sampling_step is None else torch.zeros_like(part.group),
    )


def _require_same(part: Rollouts, rollouts: Rollouts) -> None:
    """Raise DataError where stored episodes lack what today's have, or have it in another shape, naming it."""
    for name, stored, played in (
        ("observation", part.shown, rollouts.shown),
        ("latents", _shapes(part.latents), _shapes(rollouts.latents)),
    ):
        for key in sorted(key for key in played if key != "executed" and not is_condition(key)):
            own = list(stored[key]) if key in stored else None
            if own != list(played[key]):
                raise DataError(
                    f"Stored pairs do not fit this policy and world: their {name} '{key}' is {own or 'missing'}, here "
                    f"it is {list(played[key])}. Pairs are of one policy's decisions: store them anew."
                )
    if part.mask.shape[2] != rollouts.mask.shape[2]:
        raise DataError(f"Stored decisions have {part.mask.shape[2]} scored steps, here {rollouts.mask.shape[2]}.")


def _shapes(latents: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape[2:]) for name, value in latents.items()}


def _require_verdicts(rollouts: Rollouts, where: str) -> None:
    """Raise DataError unless there are groups, and each has an episode that is preferred and one that is not."""
    if "preferred" not in rollouts.extras or not len(rollouts.group):
        raise DataError(f"{where} holds no pairs: episodes need the extra 'preferred', 1 or -1.")
    groups, verdict = Segments.of(rollouts.group), rollouts.extras["preferred"][:, 0]
    lacking = (groups.sum(verdict == 1) == 0) | (groups.sum(verdict == -1) == 0)
    if bool(lacking.any()):
        raise DataError(f"{where}: {int(lacking.sum())} groups have no preferred episode, or none below it.")


def _bytes(rollouts: Rollouts) -> int:
    """How much memory nested tensors take."""
    return _size(rollouts.tree())


def _size(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(_size, value.values())) if is_mapping(value) else 0
