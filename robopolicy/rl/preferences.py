"""Preference pairs of episodes: stored on disk, replayed, or used for training from disk alone.

A folder of pairs contains complete episodes with all inputs for recomputing their log-probabilities (observations,
images, latents, masks), as safetensors and JSON. Outputs of a frozen image encoder are not stored: every policy encodes
the images with its own encoder. Episodes of one group have the same initial state; those with 1 in the extra
`preferred` are preferred to those with -1.
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
from robopolicy.rl.context import Context, latents_for_other_policy
from robopolicy.rl.registry import Slot, mechanism
from robopolicy.rl.replay import Buffer, append_rollouts
from robopolicy.rl.weights import episode_sizes

_NAME = "preferences"


@runtime_checkable
class StoresPairs(Protocol):
    """A replay whose episodes are saved beyond the run."""

    def store(self, folder: Path, instructions: tuple[str, ...]) -> None:
        """Write the pairs to `folder`, atomically; instructions: of the world, indexed by `Rollouts.task`."""
        ...


@dataclass(frozen=True)
class Pairs:
    """Stored preference pairs. rollouts: episodes with `preferred` in their extras; instructions: texts indexed by
    their `task`.
    """

    rollouts: Rollouts
    instructions: tuple[str, ...]

    def following(self, instructions: tuple[str, ...]) -> Rollouts:
        """Return the episodes with `task` [B, T] as indices into `instructions`, without image encoder outputs.

        Raises DataError if one of their instructions is missing.
        """
        texts = [self.instructions[index] for index in sorted(set(integers(self.rollouts.task[:, 0])))]
        missing_texts = [text for text in texts if text not in instructions]
        if missing_texts:
            raise DataError(
                f"Stored pairs have instructions that the world does not have: {', '.join(missing_texts[:3])}."
            )
        places = [instructions.index(text) if text in instructions else -1 for text in self.instructions]
        task = torch.tensor(places, device=self.rollouts.task.device)[self.rollouts.task]
        return replace(_unread(self.rollouts), task=task)


def write_pairs(folder: Path, rollouts: Rollouts, instructions: tuple[str, ...]) -> None:
    """Write complete episodes with `preferred` [B, T] in their extras to `folder`, atomically.

    Raises DataError if labels are missing, a group lacks one of its two sides, or images were dropped because an
    encoder had processed them.
    """
    _require_verdicts(rollouts, str(folder))
    if rollouts.images is None and any(is_condition(name) for name in rollouts.latents):
        raise DataError(
            f"{folder}: these episodes contain cached encoder outputs instead of images, but the learner reads "
            "images: collect them again with images."
        )
    tree = {"instructions": list(instructions), "rollouts": _bare(rollouts).tree()}
    write_folder_atomic(Path(folder), lambda inside: save_tree(inside, _NAME, tree))


def read_pairs(folder: Path | str, device: torch.device | str = "cpu") -> Pairs:
    """Read the files of `write_pairs` or of a run of algorithm=grape.

    Raises CheckpointError on missing or damaged files, and DataError if they contain no pairs.
    """
    tree = load_tree(recover_folder(Path(folder)), _NAME, device)
    if not {"instructions", "rollouts"} <= set(tree):
        raise DataError(f"{folder} contains no pairs of episodes: rollouts or instructions are missing.")
    rollouts = Rollouts.of(tree["rollouts"])
    _require_verdicts(rollouts, str(folder))
    return Pairs(rollouts, tuple(tree["instructions"]))


@mechanism(Slot.REPLAY, "preferences", source="GRAPE, arXiv:2411.19309", needs=())
class Preferences(Buffer):
    """Store the pairs of all rounds, replay older ones, and start rounds by resetting the base to the current policy.

    refresh: iterations per round, 1 for a new reference with every batch of episodes, 0 to keep the initial policy
    throughout. share: older episodes per current episode, in complete groups, 0 for none (the paper learns from the
    current round's pairs). folder: stored pairs that count as older ones from the start. megabytes: maximum size in
    memory and in the run's folder preferences/; the oldest are dropped first. A pair keeps its original label.
    """

    def __init__(self, *, refresh: int = 1, share: float = 0.0, folder: str = "", megabytes: float = 256.0):
        super().__init__()
        if refresh < 0 or share < 0 or megabytes <= 0:
            raise ConfigError(
                f"options.preferences: refresh={refresh} and share={share:g} must be at least 0, and "
                f"megabytes={megabytes:g} above 0."
            )
        if folder and not share:
            raise ConfigError(f"options.preferences.folder={folder} has no effect with share=0: increase share.")
        self.refresh = refresh
        self.share = share
        self.most = megabytes * 1e6
        self.given = read_pairs(folder) if folder else None

    def reincarnates(self, context: Context) -> bool:
        """Return whether a round starts."""
        return self.refresh > 0 and context.iteration % self.refresh == 0

    def mix(self, rollouts: Rollouts, context: Context) -> Rollouts:
        """Store the labelled episodes of these rollouts, and return the rollouts together with older pairs."""
        if self.given is not None:
            older = self.given.following(context.instructions).to(rollouts.group.device)
            version = torch.full_like(older.policy_version, -1)  # no policy of this run has made them
            self.kept, self.given = [(-1, replace(older, policy_version=version)), *self.kept], None
            self._bound()
        past = [part for _, part in self.kept]
        labelled = _judged(rollouts.fresh)
        if len(labelled.group):
            self.kept = [*self.kept, (context.iteration, labelled)]
            self._bound()
        sampled_parts = _drawn(past, round(self.share * len(rollouts.group)), context)
        if not sampled_parts:
            return rollouts
        older = [_as_rows_of(part, rollouts) for part in sampled_parts]
        conditions = [context.conditions(part) for part in older]
        condition_names = {name for name in rollouts.latents if is_condition(name)}
        if any(
            set(each) != condition_names for each in conditions
        ):  # a policy that cannot be asked: all rows are read as they are scored
            return append_rollouts(_unread(rollouts), older)
        older = [replace(part, latents={**part.latents, **each}) for part, each in zip(older, conditions, strict=True)]
        return append_rollouts(rollouts, older)

    def store(self, folder: Path, instructions: tuple[str, ...]) -> None:
        """Write all stored pairs to `folder`, as one dataset; write nothing if there are none."""
        if self.kept:
            write_pairs(folder, concatenate([part for _, part in self.kept]), instructions)

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Restore all tensors, including those of the folder."""
        super().restore(tree)
        self.kept = [(iteration, _unread(part)) for iteration, part in self.kept]
        self.given = None

    def _bound(self) -> None:
        """Drop the oldest iterations, and the first groups of the last remaining one, until the rest fits."""
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
    """Return the episodes of groups that have both sides, as in `tpo`, labelled by side."""
    if not len(rollouts.group):
        return rollouts
    advantage, groups = rollouts.extras["advantage"], Segments.of(rollouts.group)
    side = sides(advantage, rollouts.mask & (advantage != 0), rollouts.group)
    has_both = (groups.maximum(side) > 0) & (groups.minimum(side) < 0)
    labelled = rollouts.with_extras(preferred=side.long()[:, None].expand(rollouts.shape).contiguous())
    return _bare(labelled.take((has_both[groups.index] & (side != 0)).nonzero().squeeze(1)).compact())


def _drawn(parts: list[Rollouts], wanted: int, context: Context) -> list[Rollouts]:
    """Sample complete groups uniformly from all parts, up to `wanted` episodes in total."""
    if not wanted or not parts:
        return []
    stored_pairs = concatenate(parts)
    groups, draws = Segments.of(stored_pairs.group), context.generator
    order = torch.randperm(groups.count, generator=draws, device=draws.device)
    # At least one group, even where the first alone has more episodes than are wanted.
    group_indices = order[: max(1, int((groups.size()[order].cumsum(0) <= wanted).sum()))]
    return [stored_pairs.take(torch.isin(groups.index, group_indices).nonzero().squeeze(1))]


def _bare(rollouts: Rollouts) -> Rollouts:
    """Drop everything not needed to recompute log-probabilities; the label stays. Rewards are summed.

    Image encoder outputs are dropped as well: they are larger than the images, and valid only for those encoder
    weights.
    """
    no_parent = torch.full_like(rollouts.parent, -1)
    return replace(
        _unread(rollouts).without(following=True),
        rewards={"reward": torch.where(rollouts.valid, torch.stack(list(rollouts.rewards.values())).sum(0), 0.0)},
        extras=Extras(preferred=rollouts.extras["preferred"]),
        episode=torch.arange(len(no_parent), device=no_parent.device),
        parent=no_parent,
        branch_decision=no_parent,
        branch_sampling_step=None,
        logp_proximal=None,
    )


def _unread(rollouts: Rollouts) -> Rollouts:
    """Drop the image encoder's outputs."""
    return replace(rollouts, latents=latents_for_other_policy(rollouts.latents))


def _as_rows_of(part: Rollouts, rollouts: Rollouts) -> Rollouts:
    """Give stored episodes the same reward and extra names as `rollouts`, and their label as the advantage.

    Raises DataError if observations or latents differ in names or shapes.
    """
    _require_same(part, rollouts)
    extras = {name: value.new_zeros((*part.shape, *value.shape[2:])) for name, value in rollouts.extras.items()}
    scored_mask = part.mask & part.alive[..., None]
    extras["advantage"] = torch.where(scored_mask, part.extras["preferred"][..., None].float(), 0.0)
    extras |= episode_sizes(scored_mask)
    if "preferred" in rollouts.extras:
        extras["preferred"] = part.extras["preferred"]
    first, *other_names = rollouts.rewards
    zeros = torch.zeros_like(part.rewards["reward"])
    return replace(
        part,
        rewards={first: part.rewards["reward"], **dict.fromkeys(other_names, zeros)},
        extras=Extras.of(extras),
        observation={key: part.observation[key] for key in rollouts.observation},
        images=None if rollouts.images is None or part.images is None else part.images.only(rollouts.images.frames),
        latents={name: part.latents[name] for name in part.latents if name in (*rollouts.latents, "executed")},
        branch_sampling_step=None if rollouts.branch_sampling_step is None else torch.zeros_like(part.group),
    )


def _require_same(part: Rollouts, rollouts: Rollouts) -> None:
    """Raise DataError if stored episodes lack a field of the current ones, or have it in another shape, naming it."""
    for name, stored_shapes, current_shapes in (
        ("observation", part.shown, rollouts.shown),
        ("latents", _shapes(part.latents), _shapes(rollouts.latents)),
    ):
        for key in sorted(key for key in current_shapes if key != "executed" and not is_condition(key)):
            stored_shape = list(stored_shapes[key]) if key in stored_shapes else None
            if stored_shape != list(current_shapes[key]):
                raise DataError(
                    f"Stored pairs do not fit this policy and world: their {name} '{key}' is "
                    f"{stored_shape or 'missing'}, but here it is {list(current_shapes[key])}. Pairs belong to one "
                    "policy: collect them again with this one."
                )
    if part.mask.shape[2] != rollouts.mask.shape[2]:
        raise DataError(
            f"Stored action chunks have {part.mask.shape[2]} steps with log-probabilities, but this policy has "
            f"{rollouts.mask.shape[2]}."
        )


def _shapes(latents: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape[2:]) for name, value in latents.items()}


def _require_verdicts(rollouts: Rollouts, where: str) -> None:
    """Raise DataError unless there are groups, each with a preferred and a rejected episode."""
    if "preferred" not in rollouts.extras or not len(rollouts.group):
        raise DataError(f"{where} contains no pairs: episodes need the extra column 'preferred', 1 or -1.")
    groups, verdict = Segments.of(rollouts.group), rollouts.extras["preferred"][:, 0]
    incomplete = (groups.sum(verdict == 1) == 0) | (groups.sum(verdict == -1) == 0)
    if bool(incomplete.any()):
        raise DataError(f"{where}: {int(incomplete.sum())} groups have no preferred episode, or no worse one.")


def _bytes(rollouts: Rollouts) -> int:
    """Compute the memory of nested tensors in bytes."""
    return _size(rollouts.tree())


def _size(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(_size, value.values())) if is_mapping(value) else 0
