"""`Rollouts`: what a policy did in a world, as the learner sees it.

B rows of T decisions, each with K steps that have log-probabilities. Two layouts: in a stream a row goes on over the
ends of episodes, cut by `terminated`, `truncated` or `horizon_end`; with `whole` every row is one episode from its
start (or from where it branched off its parent), padded with decisions that are not valid.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from robopolicy.core.arrays import is_mapping
from robopolicy.core.extras import Extras
from robopolicy.core.images import Images
from robopolicy.core.policy import TensorObservation
from robopolicy.core.spec import IMAGE_PREFIX, TASK

ROW_FIELDS = ("episode", "group", "parent", "branch_decision", "branch_sampling_step")
"""Those with one entry a row, [B]."""


@dataclass(frozen=True)
class Rollouts:
    """Decisions in order of time.

    observation, next_observation: key -> [B, T, H, ...], next is taken BEFORE any reset; images: what cameras showed,
    which is in neither of them, None without cameras and where nobody reads it; latents: name -> [B, T, ...]; actions:
    [B, T, C, A]; logp_behaviour: [B, T, K] fp32 under the policy that acted; mask: [B, T, K] bool, False on padding and
    on prefixes copied from a parent; rewards: name -> [B, T, C]; valid: [B, T, C]; terminated, truncated, horizon_end,
    success: [B, T] bool; task, policy_version: [B, T] int64, index of the instruction and number of updates of the
    policy that acted; extras: what else is known of them (see `Extras`). episode, group, parent, branch_decision: [B]
    int64.
    episode: identity of the row; group: episodes with the same start and task, whose outcomes are compared; parent: the
    episode that this one branched off at decision branch_decision (both -1: none), keeping the first
    branch_sampling_step of its steps there (None: 0 everywhere). logp_proximal: [B, T, K] under the policy to clip
    around, None: the behaviour's.
    """

    observation: TensorObservation
    next_observation: TensorObservation
    latents: Mapping[str, Tensor]
    actions: Tensor
    logp_behaviour: Tensor
    mask: Tensor
    rewards: Mapping[str, Tensor]
    valid: Tensor
    terminated: Tensor
    truncated: Tensor
    horizon_end: Tensor
    success: Tensor
    task: Tensor
    policy_version: Tensor
    episode: Tensor
    group: Tensor
    parent: Tensor
    branch_decision: Tensor
    branch_sampling_step: Tensor | None = None
    logp_proximal: Tensor | None = None
    extras: Extras = field(default_factory=Extras)
    whole: bool = False
    images: Images | None = None

    def __post_init__(self):
        object.__setattr__(self, "extras", Extras.of(self.extras))  # checkpoints and columns hold them as a mapping

    @property
    def shape(self) -> tuple[int, int]:
        """(B, T)."""
        return self.actions.shape[0], self.actions.shape[1]

    @property
    def shown(self) -> dict[str, tuple[int, ...]]:
        """The shape of what a decision was shown, by key, cameras included: (H, *field.shape)."""
        vectors = {key: tuple(tensor_of(self.observation, key).shape[2:]) for key in self.observation}
        return vectors if self.images is None else {**vectors, **self.images.shapes}

    @property
    def ended(self) -> Tensor:
        """[B, T]: the episode did not continue into the next column; cuts advantage chains."""
        return self.terminated | self.truncated | self.horizon_end

    @property
    def duration(self) -> Tensor:
        """[B, T]: executed control steps of each decision; bootstrapping discounts by gamma ** duration."""
        return self.valid.sum(-1)

    @property
    def alive(self) -> Tensor:
        """[B, T]: decisions of which at least one control step was executed."""
        return self.valid.any(-1)

    @property
    def played(self) -> Tensor:
        """[B, T]: decisions that were taken in this row, not copied from an ancestor; they are what is learned from."""
        taken = self.mask.any(-1)
        return self.alive & (taken if self.extras.taught is None else taken | self.extras.taught)

    @property
    def proximal(self) -> Tensor:
        """[B, T, K]: log-probabilities under the policy to clip around."""
        return self.logp_behaviour if self.logp_proximal is None else self.logp_proximal

    @property
    def reward(self) -> Tensor:
        """[B, T]: sum of all reward terms over the valid steps of each decision, undiscounted."""
        return sum_of_rewards(self.rewards, self.valid)

    @property
    def row_return(self) -> Tensor:
        """[B]: sum of rewards of each row; in the whole layout, the return of the episode."""
        return self.reward.sum(1)

    @property
    def row_success(self) -> Tensor:
        """[B] bool: the row has succeeded; in the whole layout, the episode's outcome."""
        return (self.success & self.alive).any(1)

    @property
    def fresh(self) -> "Rollouts":
        """The rows that were played for this iteration, without those of earlier ones."""
        replayed = self.extras.replayed
        return self if replayed is None else self.take((~replayed[:, 0]).nonzero().squeeze(1))

    def tree(self) -> dict[str, Any]:
        """Return what `of` needs, as nested tensors for a checkpoint."""
        found = {item.name: getattr(self, item.name) for item in fields(self)}
        images = None if self.images is None else self.images.tree()
        return {**found, "extras": dict(self.extras.items()), "images": images}

    @staticmethod
    def of(tree: Mapping[str, Any]) -> "Rollouts":
        """Return the rollouts that `tree` is of; earlier versions kept images among the observations."""
        found: dict[str, Any] = {name: value for name, value in tree.items() if name != "final_images"}
        images, seen = found.get("images"), found["observation"]
        found["images"] = Images.of(seen) if images is None else Images.from_tree(images)
        found["observation"] = {key: value for key, value in seen.items() if not key.startswith(IMAGE_PREFIX)}
        return Rollouts(**found)

    def flat(self) -> "Rollouts":
        """Merge rows and time: every [B, T, ...] becomes [B * T, 1, ...], so decisions can be drawn as minibatches."""
        rows = {name: getattr(self, name) for name in ROW_FIELDS if getattr(self, name) is not None}
        repeated = {name: value.repeat_interleave(self.shape[1]) for name, value in rows.items()}
        return replace(self._map(lambda tensor: tensor.flatten(0, 1).unsqueeze(1)), **repeated)

    def take(self, index: Tensor) -> "Rollouts":
        """Select rows by index [n]."""
        return self._map(lambda tensor: tensor[index], rows=lambda tensor: tensor[index])

    def to(self, device: torch.device | str) -> "Rollouts":
        """Move every tensor."""
        moved = self._map(lambda tensor: tensor.to(device), rows=lambda tensor: tensor.to(device))
        return replace(moved, images=None if self.images is None else self.images.to(device))

    def compact(self) -> "Rollouts":
        """Drop the images that only rows which are not here any more have seen: for rows that are kept for long."""
        return replace(self, images=None if self.images is None else self.images.compact())

    def without(self, *, following: bool = False, images: bool = False) -> "Rollouts":
        """Leave out what is not read any more, so that selecting rows does not copy it.

        following: the next observations, with what cameras showed then; images: all that cameras showed.
        """
        kept = None if images else self.images
        if not following:
            return replace(self, images=kept)
        return replace(self, next_observation={}, images=None if kept is None else replace(kept, after=None))

    def ended_by_limits(self) -> "Rollouts":
        """Take time limits for ends of the task, behind which nothing is worth anything.

        As Pardo et al. 2018 (arXiv:1712.00378) do, whose agents are told the time as well; here nothing observes it.
        """
        return replace(self, terminated=self.terminated | self.truncated, truncated=torch.zeros_like(self.truncated))

    def with_extras(self, **extras: Tensor) -> "Rollouts":
        """Add extras [B, T, ...] by name; raises KeyError for a name that `Extras` does not have."""
        return replace(self, extras=self.extras.adding(**extras))

    def _map(self, function: Callable[[Tensor], Tensor], rows: Callable[[Tensor], Tensor] | None = None) -> "Rollouts":
        def changed(name: str) -> Any:
            value = getattr(self, name)
            if name in ROW_FIELDS:
                return value if rows is None or value is None else rows(value)
            return _mapped(value, function)

        return Rollouts(**{item.name: changed(item.name) for item in fields(self)})


def visible(rollouts: Rollouts, where: Tensor, *, following: bool = False, images: bool = False) -> dict[str, Tensor]:
    """Return what a critic sees at the n decisions `where` [B, T], or after them: key -> [n, ...]; `task` as index.

    images: camera images too, which cost more to gather than all the rest. Raises LookupError where images after a
    decision are asked for that are not kept (see `Images`).
    """
    source = rollouts.next_observation if following else rollouts.observation
    pick = picker(where)
    found = {key: pick(tensor_of(source, key)) for key in source if key != TASK}
    if images and rollouts.images is not None:
        shown = rollouts.images
        found |= shown.following(where) if following else shown.read(pick(shown.seen))
    return {**found, TASK: pick(rollouts.task)}


def picker(where: Tensor) -> Callable[[Tensor], Tensor]:
    """Return what takes the n decisions `where` [B, T] bool out of tensors [B, T, ...], as rows [n, ...].

    All of them, as in minibatches of single decisions, are a view: nothing is looked for again with every tensor, which
    on a GPU is waited for each time.
    """
    return (lambda value: value.flatten(0, 1)) if bool(where.all()) else (lambda value: value[where])


def tensor_of(observation: TensorObservation, key: str) -> Tensor:
    """Return a field [B, T, H, ...] of an observation; rollouts hold no texts (`Rollouts.task` has their indices)."""
    value = observation[key]
    assert isinstance(value, Tensor)
    return value


def sum_of_rewards(rewards: Mapping[str, Tensor], valid: Tensor) -> Tensor:
    """Return the sum over terms and valid steps, [..., C] each -> [...]."""
    total = torch.stack(list(rewards.values())).sum(0)
    return torch.where(valid, total, 0.0).sum(-1)


def concatenate(parts: list[Rollouts], *, same_groups: bool = False) -> Rollouts:
    """Join rows of rollouts of whole episodes, padding time with decisions that are not valid; rows get new numbers.

    same_groups: equal group numbers in several parts mean one group, which the parts share; else the groups of each
    part are apart from those of the others, and those of later parts have larger numbers.
    Raises ValueError when one has observations, latents, rewards, extras or images that another lacks.
    """
    if len({part.images is None for part in parts}) > 1:
        raise ValueError("Rollouts that are to be joined differ in whether they keep images.")
    if not same_groups:
        parts = _with_own_groups(parts)
    offsets = [sum(len(part.episode) for part in parts[:index]) for index in range(len(parts))]
    parts = [
        replace(
            part,
            episode=part.episode + offset,
            parent=torch.where(part.parent >= 0, part.parent + offset, part.parent),
        )
        for part, offset in zip(parts, offsets, strict=True)
    ]
    if any("executed" in part.latents for part in parts):
        parts = [replace(part, latents={"executed": part.valid, **part.latents}) for part in parts]
    length = max(part.shape[1] for part in parts)

    names = [item.name for item in fields(Rollouts)]
    columns = {name: [getattr(part, name) for part in parts] for name in names}
    return Rollouts(**{name: _joined(found, length, name in ROW_FIELDS) for name, found in columns.items()})


# A function inside a function that calls itself is a reference cycle: what it holds, here all of an iteration's
# tensors, stays until Python's collector comes round, which counts objects and not their memory.
def _mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return nested tensors, each changed by `function`."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Extras | Images):
        return value.map(function)
    if is_mapping(value):
        return {key: _mapped(item, function) for key, item in value.items()}
    if value is None or isinstance(value, bool):
        return value
    raise TypeError(f"Rollouts hold tensors and mappings of tensors, not {type(value).__name__}.")


def _joined(values: list[Any], length: int, per_row: bool) -> Any:
    """Return one field of several parts, padded to `length` decisions unless it is one `per_row`."""
    first = values[0]
    if isinstance(first, Extras):
        values = [dict(value.items()) for value in values]
        first = values[0]
    if is_mapping(first):
        differ = {key for value in values for key in set(value) ^ set(first)}
        if differ:
            raise ValueError(f"Rollouts that are to be joined differ in {', '.join(sorted(differ))}.")
        return {key: _joined([value[key] for value in values], length, per_row) for key in first}
    if first is None or isinstance(first, bool):
        return first
    if isinstance(first, Images):
        return Images.join(values, lambda numbers: _pad(numbers, length))
    return torch.cat(values if per_row else [_pad(value, length) for value in values])


def _with_own_groups(parts: list[Rollouts]) -> list[Rollouts]:
    """Move the group numbers of parts up as far as they must not to be those of the parts before."""
    moved: list[Rollouts] = []
    first = 0
    for part in parts:
        if len(part.group):
            low, high = int(part.group.min()), int(part.group.max())
            shift = max(0, first - low) if moved else 0
            part, first = replace(part, group=part.group + shift), high + shift + 1
        moved.append(part)
    return moved


def _pad(tensor: Tensor, length: int) -> Tensor:
    missing = length - tensor.shape[1]
    if not missing:
        return tensor
    return torch.cat([tensor, tensor.new_zeros((tensor.shape[0], missing, *tensor.shape[2:]))], 1)
