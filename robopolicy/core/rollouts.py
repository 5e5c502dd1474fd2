"""Rollout container (`Rollouts`): experience of a policy in a world, as used by the learner.

B rows of T decisions (policy calls), each with K steps that have log-probabilities. Two layouts: in the stream layout a
row continues across episodes, separated by `terminated`, `truncated` or `horizon_end`; with `whole` every row is one
episode from its start (or from where it branched off its parent), padded with invalid decisions.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from robopolicy.core.arrays import is_mapping
from robopolicy.core.extras import Extras
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.images import Images
from robopolicy.core.policy import TensorObservation
from robopolicy.core.spec import IMAGE_PREFIX, TASK

ROW_FIELDS = ("episode", "group", "parent", "branch_decision", "branch_sampling_step")
"""Fields with one entry per row, [B]."""
HELPED_GROUPS = 2**40
"""Number of a group of helped episodes minus that of the group that they help, more than a run counts."""


@dataclass(frozen=True)
class Rollouts:
    """Decisions in temporal order.

    observation, next_observation: key -> [B, T, H, ...], next is taken BEFORE any reset; images: camera images of both,
    None without cameras or if unused; latents: name -> [B, T, ...]; actions: [B, T, C, A]; logp_behaviour: [B, T, K]
    fp32 under the policy that acted; mask: [B, T, K] bool, False on padding and on prefixes copied from a parent;
    rewards: name -> [B, T, C]; valid: [B, T, C]; terminated, truncated, horizon_end, success: [B, T] bool; task,
    policy_version: [B, T] int64, index of the instruction and number of updates of the policy that acted; extras:
    additional columns (see `Extras`). episode, group, parent, branch_decision: [B] int64. episode: identity of the row;
    group: episodes with the same initial state and task, whose outcomes are compared; parent: the episode from which
    this one branched at decision branch_decision (both -1: none), keeping the first branch_sampling_step of its steps
    there (None: 0 everywhere). logp_proximal: [B, T, K] under the policy used as clipping centre, None: the behaviour
    policy.
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
        """Shape of the observation of one policy call by key, cameras included: (H, *field.shape)."""
        vectors = {key: tuple(tensor_of(self.observation, key).shape[2:]) for key in self.observation}
        return vectors if self.images is None else {**vectors, **self.images.shapes}

    @property
    def ended(self) -> Tensor:
        """[B, T]: the episode did not continue into the next column; ends advantage chains."""
        return self.terminated | self.truncated | self.horizon_end

    @property
    def duration(self) -> Tensor:
        """[B, T]: number of executed control steps per action chunk; bootstrapping discounts by gamma ** duration."""
        return self.valid.sum(-1)

    @property
    def alive(self) -> Tensor:
        """[B, T]: action chunks with at least one executed control step."""
        return self.valid.any(-1)

    @property
    def played(self) -> Tensor:
        """[B, T]: action chunks computed in this row rather than copied from an ancestor; only these are trained on."""
        sampled_mask = self.mask.any(-1)
        return self.alive & (sampled_mask if self.extras.taught is None else sampled_mask | self.extras.taught)

    @property
    def proximal(self) -> Tensor:
        """[B, T, K]: log-probabilities under the policy used as clipping centre."""
        return self.logp_behaviour if self.logp_proximal is None else self.logp_proximal

    @property
    def reward(self) -> Tensor:
        """[B, T]: sum of all reward terms over the valid steps of each action chunk, undiscounted."""
        return sum_of_rewards(self.rewards, self.valid)

    @property
    def row_return(self) -> Tensor:
        """[B]: sum of rewards of each row; if rows are complete episodes, the return of the episode."""
        return self.reward.sum(1)

    @property
    def row_success(self) -> Tensor:
        """[B] bool: the row has succeeded; if rows are complete episodes, the episode's outcome."""
        return (self.success & self.alive).any(1)

    @property
    def fresh(self) -> "Rollouts":
        """Rows collected in this iteration, without replayed ones."""
        replayed_mask = self.extras.replayed
        return self if replayed_mask is None else self.take((~replayed_mask[:, 0]).nonzero().squeeze(1))

    @property
    def unaided(self) -> "Rollouts":
        """Rows that were played from their initial state, by the policy and without help."""
        helped_mask = self.extras.helped
        return self if helped_mask is None else self.take((~helped_mask[:, 0]).nonzero().squeeze(1))

    def tree(self) -> dict[str, Any]:
        """Return nested tensors for a checkpoint, read by `of`."""
        columns = {item.name: getattr(self, item.name) for item in fields(self)}
        images = None if self.images is None else self.images.tree()
        return {**columns, "extras": dict(self.extras.items()), "images": images}

    @staticmethod
    def of(tree: Mapping[str, Any]) -> "Rollouts":
        """Restore rollouts from `tree`; earlier versions stored images among the observations."""
        columns: dict[str, Any] = {name: value for name, value in tree.items() if name != "final_images"}
        images, observation = columns.get("images"), columns["observation"]
        columns["images"] = Images.of(observation) if images is None else Images.from_tree(images)
        columns["observation"] = {key: value for key, value in observation.items() if not key.startswith(IMAGE_PREFIX)}
        return Rollouts(**columns)

    def flat(self) -> "Rollouts":
        """Merge rows and time: every [B, T, ...] becomes [B * T, 1, ...], so that action chunks can be drawn as
        minibatches.
        """
        rows = {name: getattr(self, name) for name in ROW_FIELDS if getattr(self, name) is not None}
        row_fields = {name: value.repeat_interleave(self.shape[1]) for name, value in rows.items()}
        return replace(self._map(lambda tensor: tensor.flatten(0, 1).unsqueeze(1)), **row_fields)

    def take(self, index: Tensor) -> "Rollouts":
        """Select rows by index [n]."""
        return self._map(lambda tensor: tensor[index], rows=lambda tensor: tensor[index])

    def to(self, device: torch.device | str) -> "Rollouts":
        """Move every tensor to a device."""
        rollouts = self._map(lambda tensor: tensor.to(device), rows=lambda tensor: tensor.to(device))
        return replace(rollouts, images=None if self.images is None else self.images.to(device))

    def compact(self) -> "Rollouts":
        """Drop images that only removed rows refer to; for rows that are stored for long."""
        return replace(self, images=None if self.images is None else self.images.compact())

    def without(self, *, following: bool = False, images: bool = False) -> "Rollouts":
        """Drop columns that are no longer read, so that selecting rows does not copy them.

        following: drop the next observations and their camera images; images: drop all camera images.
        """
        kept_images = None if images else self.images
        if not following:
            return replace(self, images=kept_images)
        return replace(
            self, next_observation={}, images=None if kept_images is None else replace(kept_images, after=None)
        )

    def ended_by_limits(self) -> "Rollouts":
        """Treat time limits as terminations, with zero value afterwards.

        As in Pardo et al. 2018 (arXiv:1712.00378), whose agents also observe the remaining time; here no policy
        observes it.
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


def critic_observation(
    rollouts: Rollouts, where: Tensor, *, following: bool = False, images: bool = False
) -> dict[str, Tensor]:
    """Return the critic's inputs at the n action chunks `where` [B, T], or after them: key -> [n, ...]; `task` as
    index.

    images: include camera images, which are by far the slowest to gather. Raises LookupError when requested images
    after a decision are not stored (see `Images`).
    """
    source = rollouts.next_observation if following else rollouts.observation
    pick = row_selector(where)
    inputs = {key: pick(tensor_of(source, key)) for key in source if key != TASK}
    if images and rollouts.images is not None:
        source_images = rollouts.images
        inputs |= source_images.following(where) if following else source_images.read(pick(source_images.seen))
    return {**inputs, TASK: pick(rollouts.task)}


def row_selector(where: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function that selects the n action chunks `where` [B, T] bool from tensors [B, T, ...], as rows [n,
    ...].

    Selecting all decisions, as in minibatches of single decisions, returns a view and avoids a GPU synchronisation per
    tensor.
    """
    return (lambda value: value.flatten(0, 1)) if bool(where.all()) else (lambda value: value[where])


def tensor_of(observation: TensorObservation, key: str) -> Tensor:
    """Return a field [B, T, H, ...] of an observation; rollouts contain no strings (`Rollouts.task` has their
    indices).
    """
    value = observation[key]
    assert isinstance(value, Tensor)
    return value


def sum_of_rewards(rewards: Mapping[str, Tensor], valid: Tensor) -> Tensor:
    """Sum over terms and valid steps, [..., C] each -> [...]."""
    total = torch.stack(list(rewards.values())).sum(0)
    return torch.where(valid, total, 0.0).sum(-1)


def concatenate(parts: list[Rollouts], *, same_groups: bool = False) -> Rollouts:
    """Concatenate rows of complete-episode rollouts, padding time with invalid action chunks; rows are renumbered.

    same_groups: equal group numbers in several parts denote one shared group; otherwise the groups of each part stay
    separate, and later parts get larger numbers. Raises ValueError when a part has observations, latents, rewards,
    extras or images that another lacks.
    """
    if len({part.images is None for part in parts}) > 1:
        raise ValueError("Rollouts to be concatenated must either all contain images or none.")
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
    return Rollouts(**{name: _joined(values, length, name in ROW_FIELDS) for name, values in columns.items()})


# A function inside a function that calls itself is a reference cycle: what it holds, here all of an iteration's
# tensors, stays until Python's collector comes round, which counts objects and not their memory.
def _mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply `function` to all nested tensors."""
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
    """Concatenate one field of several parts, padded to `length` action chunks unless it is `per_row`."""
    first = values[0]
    if isinstance(first, Extras):
        values = [dict(value.items()) for value in values]
        first = values[0]
    if is_mapping(first):
        differ = {key for value in values for key in set(value) ^ set(first)}
        if differ:
            raise ValueError(f"Rollouts to be concatenated differ in {', '.join(sorted(differ))}.")
        return {key: _joined([value[key] for value in values], length, per_row) for key in first}
    if first is None or isinstance(first, bool):
        return first
    if isinstance(first, Images):
        return Images.join(values, lambda numbers: _pad(numbers, length))
    return torch.cat(values if per_row else [_pad(value, length) for value in values])


def _with_own_groups(parts: list[Rollouts]) -> list[Rollouts]:
    """Shift the group numbers of parts so that they do not collide with those of earlier parts."""
    shifted: list[Rollouts] = []
    first = 0
    for part in parts:
        if len(part.group):
            low, high = int(part.group.min()), int(part.group.max())
            shift = max(0, first - low) if shifted else 0
            part, first = replace(part, group=part.group + shift), high + shift + 1
        shifted.append(part)
    return shifted


def _pad(tensor: Tensor, length: int) -> Tensor:
    padding = length - tensor.shape[1]
    if not padding:
        return tensor
    return torch.cat([tensor, tensor.new_zeros((tensor.shape[0], padding, *tensor.shape[2:]))], 1)


keep_former_names(__name__, {"visible": "critic_observation", "picker": "row_selector"})
