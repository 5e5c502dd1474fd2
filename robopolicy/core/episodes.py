"""Episode container (`Episodes`): demonstrations or rollouts in memory, from which policies and world models sample
batches.

An episode of L actions has L + 1 observation frames: the last frame is the result of the last action, so every action
has a next observation, and values can be bootstrapped at a time limit. All episodes are concatenated along time. Axes:
E episode, N = sum(L) step, F = N + E observation frame, A action dimension, H history frame, P predicted step, M batch
row.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from robopolicy.core.action_bounds import union_of_bounds
from robopolicy.core.arrays import integers
from robopolicy.core.errors import ConfigError, DataError, as_setting, did_you_mean
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.policy import TensorObservation
from robopolicy.core.spec import IMAGE_PREFIX, TASK, Field, require_consistent_fields
from robopolicy.core.transitions import Transitions
from robopolicy.core.vectors import StateVector

_OF_STEPS = ("step_success", "actor", "segment", "labels", "label_steps")


@dataclass(frozen=True)
class Episodes:
    """Complete episodes (trajectories), concatenated along time.

    observation_fields: one frame each, by LeRobot key; observation: key -> [F, *shape] (float32, images uint8 height x
    width x 3); actions: [N, A] in world units; lengths: [E] int64, actions per episode; tasks: instruction of each
    episode; rewards: term -> [N]; step_success: [N] bool, the episode has succeeded by the end of this step;
    terminated: [E] bool, the task ended (False: time limit); seeds: [E] int64; final_known: [E] bool, False if the data
    lacks the observation after the last action (the last frame then repeats the one before); actor, segment: [N] int64,
    who acted and the kind of segment, encoded as in `interventions`; labels: [N, L, A] in world units, the teacher's
    actions for each step and, for a teacher that predicts chunks, for the L - 1 steps after it; label_steps: [N] int64,
    number of these L actions before the end of the teacher's episode, None for all. fps: steps per second. Optional
    entries are None if the dataset does not provide them. Raises DataError when lengths do not match, an episode is
    empty, or keys and fields differ.
    """

    observation_fields: Mapping[str, Field]
    action_field: Field
    fps: float
    observation: Mapping[str, Tensor]
    actions: Tensor
    lengths: Tensor
    tasks: tuple[str, ...]
    rewards: Mapping[str, Tensor] | None = None
    step_success: Tensor | None = None
    terminated: Tensor | None = None
    seeds: Tensor | None = None
    final_known: Tensor | None = None
    actor: Tensor | None = None
    segment: Tensor | None = None
    labels: Tensor | None = None
    label_steps: Tensor | None = None

    def __post_init__(self):
        steps, count = int(self.lengths.sum()), len(self.lengths)
        expected: dict[str, tuple[Any, int]] = {
            "actions": (self.actions, steps),
            "tasks": (self.tasks, count),
            **{name: (getattr(self, name), steps) for name in _OF_STEPS},
            "terminated": (self.terminated, count),
            "seeds": (self.seeds, count),
            "final_known": (self.final_known, count),
            **{f"reward '{name}'": (values, steps) for name, values in (self.rewards or {}).items()},
            **{f"'{key}'": (values, steps + count) for key, values in self.observation.items()},
        }
        for name, (values, size) in expected.items():
            if values is not None and len(values) != size:
                raise DataError(f"{name} has {len(values)} entries, but {count} episodes of {steps} steps need {size}.")
        if count and int(self.lengths.min()) < 1:
            raise DataError("An episode needs at least one action: remove the empty ones.")
        if set(self.observation) != set(self.observation_fields):
            raise DataError(
                f"The observations are {sorted(self.observation)}, but the fields describe "
                f"{sorted(self.observation_fields)}."
            )

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def step_count(self) -> int:
        """Number of actions N."""
        return len(self.actions)

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.actions.device

    @property
    def cameras(self) -> tuple[str, ...]:
        """Names of the recorded cameras."""
        return tuple(key.removeprefix(IMAGE_PREFIX) for key in self.observation if key.startswith(IMAGE_PREFIX))

    @cached_property
    def starts(self) -> Tensor:
        """[E] int64: index into `actions` of each episode's first action."""
        return self.lengths.cumsum(0) - self.lengths

    @cached_property
    def frame_starts(self) -> Tensor:
        """[E] int64: index into the observations of each episode's first frame."""
        return self.starts + torch.arange(len(self), device=self.device)

    @cached_property
    def episode_of_step(self) -> Tensor:
        """[N] int64: the episode that each action belongs to."""
        return torch.repeat_interleave(torch.arange(len(self), device=self.device), self.lengths)

    @property
    def reward(self) -> Tensor | None:
        """[N]: sum of the reward terms."""
        return None if self.rewards is None else torch.stack(list(self.rewards.values())).sum(0)

    @property
    def success(self) -> Tensor | None:
        """[E] bool: the episode succeeded."""
        return None if self.step_success is None else self.step_success[self.starts + self.lengths - 1]

    @property
    def returns(self) -> Tensor | None:
        """[E]: sum of the rewards of each episode."""
        reward = self.reward
        if reward is None:
            return None
        return torch.zeros(len(self), device=self.device).index_add(0, self.episode_of_step, reward)

    def to(self, device: torch.device | str) -> "Episodes":
        """Move every tensor to a device."""
        tensors: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Tensor):
                tensors[item.name] = value.to(device)
            elif item.name in ("observation", "rewards") and value is not None:
                tensors[item.name] = {key: tensor.to(device) for key, tensor in value.items()}
        return replace(self, **tensors)

    def select(self, index: Tensor | Sequence[int] | None) -> "Episodes":
        """Keep episodes by index [n] or boolean mask [E], in the order given: `select(episodes.success)`.

        Raises DataError on None, as `success` is where it is not recorded, and on a mask of another length.
        """
        if index is None:
            raise DataError("The selection is None: this dataset does not record success.")
        indices = torch.as_tensor(index, device=self.device)
        if indices.dtype == torch.bool:
            if len(indices) != len(self):
                raise DataError(f"The mask has {len(indices)} entries for {len(self)} episodes.")
            indices = indices.nonzero().squeeze(1)
        indices = indices.long()
        steps = _ranges(self.starts[indices], self.lengths[indices])
        frames = _ranges(self.frame_starts[indices], self.lengths[indices] + 1)
        per_episode = {
            name: None if (value := getattr(self, name)) is None else value[indices]
            for name in ("terminated", "seeds", "final_known")
        }
        return replace(
            self,
            observation={key: value[frames] for key, value in self.observation.items()},
            actions=self.actions[steps],
            lengths=self.lengths[indices],
            tasks=tuple(self.tasks[i] for i in integers(indices)),
            rewards=None if self.rewards is None else {name: value[steps] for name, value in self.rewards.items()},
            **{name: None if (value := getattr(self, name)) is None else value[steps] for name in _OF_STEPS},
            **per_episode,
        )

    def to_imitate(self) -> "Episodes":
        """Return the episodes with the teacher's labels in place of the executed actions, if there are labels.

        Rewards and next observations are then not the results of these actions.
        """
        if self.labels is None:
            return self
        return replace(self, actions=self.labels[:, 0], actor=None, segment=None, labels=None, label_steps=None)

    def split(self, share: float, generator: torch.Generator) -> tuple["Episodes", "Episodes"]:
        """Hold out a fraction of the episodes, at least one: (training, validation).

        Raises DataError if none would be left for training.
        """
        held_out = max(1, round(share * len(self)))
        if held_out >= len(self):
            raise DataError(
                f"Holding out validation data leaves none of {len(self)} episodes for training: record more episodes."
            )
        order = torch.randperm(len(self), generator=generator)
        return self.select(order[held_out:].sort().values), self.select(order[:held_out].sort().values)

    @staticmethod
    def concatenate(parts: Sequence["Episodes"]) -> "Episodes":
        """Join episodes with the same fields and fps; an entry that one part lacks is None in the result.

        Two exceptions: `actor` and `segment` are -1 for parts that lack them, and labels default to the recorded
        actions until the episode's end. Raises DataError when shapes, observation keys, element names, control rates or
        the length of labels differ.
        """
        if not parts:
            raise DataError("There are no episodes to concatenate.")
        first = parts[0]
        for part in parts[1:]:
            _require_alike(first, part)

        def joined(name: str) -> Tensor | None:
            values = [getattr(part, name) for part in parts]
            return None if any(value is None for value in values) else torch.cat(values)

        def acted(name: str) -> Tensor | None:
            values = [getattr(part, name) for part in parts]
            if all(value is None for value in values):
                return None
            fillers = [torch.full((part.step_count,), -1, device=part.device) for part in parts]
            return torch.cat([other if value is None else value for value, other in zip(values, fillers, strict=True)])

        terms = None if any(part.rewards is None for part in parts) else set(first.rewards or {})
        if terms is not None and any(set(part.rewards or {}) != terms for part in parts):
            parts = [replace(part, rewards={"reward": part.reward}) for part in parts]
        names = None if terms is None else list(parts[0].rewards or {})
        final_masks = [part.final_known if part.final_known is not None else _all_known(part) for part in parts]
        return replace(
            first,
            observation={key: torch.cat([part.observation[key] for part in parts]) for key in first.observation},
            actions=torch.cat([part.actions for part in parts]),
            action_field=union_of_bounds(*(part.action_field for part in parts)),
            lengths=torch.cat([part.lengths for part in parts]),
            tasks=tuple(task for part in parts for task in part.tasks),
            rewards=None
            if names is None
            else {name: torch.cat([(part.rewards or {})[name] for part in parts]) for name in names},
            step_success=joined("step_success"),
            terminated=joined("terminated"),
            seeds=joined("seeds"),
            final_known=torch.cat(final_masks),
            actor=acted("actor"),
            segment=acted("segment"),
            **_joined_labels(parts),
        )

    def statistics(self) -> dict[str, dict[str, Tensor]]:
        """Return min, max, mean and std, each [*shape], of every non-image observation and of "action".

        Frames that only repeat because the final observation is unknown are excluded.
        """
        frames = torch.ones(self.step_count + len(self), dtype=torch.bool, device=self.device)
        if self.final_known is not None:
            frames[(self.frame_starts + self.lengths)[~self.final_known]] = False
        values = {key: value[frames] for key, value in self.observation.items() if not key.startswith(IMAGE_PREFIX)}
        return {
            key: {
                "min": value.amin(0),
                "max": value.amax(0),
                "mean": value.mean(0),
                "std": value.std(0, correction=0),
            }
            for key, value in {**values, "action": self.actions}.items()
        }

    def sampler(
        self,
        history: int,
        prediction: int,
        batch_size: int,
        generator: torch.Generator,
        keys: Sequence[str] | None = None,
    ) -> Iterator[dict[str, Any]]:
        """Yield policy batches indefinitely; steps are drawn uniformly with replacement, with all randomness from
        `generator`.

        A batch is {"observation": {key: [M, H, *shape], "task": list of M}, "actions": [M, P, A], "action_valid":
        [M, P] bool}: the current frame is the last of the history (padded by repeating the episode's first frame), the
        first action is the one taken there (padded by repeating the last, action_valid False). keys: the observations
        to gather, None for all and the task. Raises DataError on an unknown key.
        """
        selected_keys = self._known_keys(keys)
        with_task = keys is None or TASK in keys
        if history < 1 or prediction < 1 or batch_size < 1:
            raise DataError("history, prediction and batch_size must be at least 1.")
        if not self.step_count:
            raise DataError("There are no steps to sample from: the selection of episodes is empty.")
        return self._batches(history, prediction, batch_size, generator, selected_keys, with_task)

    def actions_ahead(self, count: int) -> Tensor:
        """Return the actions of every step and of the steps after it, [N, count, A]; the last action is repeated."""
        last = (self.starts + self.lengths - 1)[self.episode_of_step]
        steps = torch.arange(self.step_count, device=self.device)[:, None] + torch.arange(count, device=self.device)
        return self.actions[torch.minimum(steps, last[:, None])]

    def before(self, steps: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the actions of the `count` steps before the given steps [M] as [M, count, A], and a mask of those that
        exist.

        Steps before the start of an episode contain its first action and are False in the mask [M, count].
        """
        indices = steps[:, None] + torch.arange(-count, 0, device=self.device)
        first = self.starts[self.episode_of_step[steps]][:, None]
        return self.actions[torch.maximum(indices, first)], indices >= first

    def windows(
        self, steps: Tensor, history: int, prediction: int, keys: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Return a batch in the format of `sampler` whose first actions are at the step indices [M], plus "steps"."""
        episode = self.episode_of_step[steps]
        back = torch.arange(1 - history, 1, device=self.device)
        offsets = torch.arange(prediction, device=self.device)
        frames = torch.maximum((steps + episode)[:, None] + back, self.frame_starts[episode][:, None])
        targets = steps[:, None] + offsets
        last = (self.starts + self.lengths - 1)[episode][:, None]
        observation: TensorObservation = {key: self.observation[key][frames] for key in self._known_keys(keys)}
        if keys is None or TASK in keys:
            observation[TASK] = [self.tasks[index] for index in integers(episode)]
        return {
            "observation": observation,
            "actions": self.actions[torch.minimum(targets, last)],
            "action_valid": targets <= last,
            "steps": steps,
        }

    def transitions(self, vector: StateVector | None = None) -> Transitions:
        """Return (state, action, reward, next state) of every step with a known next observation, in temporal order.

        vector: the fields that make up the state; None: all vector fields of the episodes. Raises DataError when there
        is none, or rewards or terminations are not recorded; SpecError when the episodes lack a field of it.
        """
        reward = self.reward
        if reward is None or self.terminated is None:
            raise DataError("Transitions need rewards and task ends, which this dataset does not record.")
        vector = StateVector.of(self.observation_fields) if vector is None else vector
        if not vector.size:
            raise DataError(
                "Transitions need vector fields such as observation.state; these episodes have only images."
            )
        states = vector.pack(self.observation)
        steps = torch.arange(self.step_count, device=self.device)
        episode, last = self.episode_of_step, torch.zeros(self.step_count, dtype=torch.bool, device=self.device)
        last[self.starts + self.lengths - 1] = True
        if self.final_known is not None:
            steps = steps[~(last & ~self.final_known[episode])]
        episode, frames = episode[steps], steps + episode[steps]
        return Transitions(
            state=states[frames],
            action=self.actions[steps],
            reward=reward[steps],
            next_state=states[frames + 1],
            terminated=last[steps] & self.terminated[episode],
            success=None if self.step_success is None else self.step_success[steps],
            episode=episode,
        )

    def _known_keys(self, keys: Sequence[str] | None) -> list[str]:
        selected_keys = list(self.observation) if keys is None else [key for key in keys if key != TASK]
        for key in selected_keys:
            if key not in self.observation:
                raise DataError(f"The episodes have no '{key}'.{did_you_mean(key, self.observation)}")
        return selected_keys

    def _batches(
        self,
        history: int,
        prediction: int,
        batch_size: int,
        generator: torch.Generator,
        keys: list[str],
        with_task: bool,
    ) -> Iterator[dict[str, Any]]:
        selected_keys = [*keys, TASK] if with_task else keys
        while True:
            steps = torch.randint(self.step_count, (batch_size,), generator=generator, device=generator.device)
            yield self.windows(steps.to(self.device), history, prediction, selected_keys)


def _ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """Return the indices start, ..., start + length - 1 of every range, concatenated."""
    offsets = lengths.cumsum(0) - lengths
    positions = torch.arange(int(lengths.sum()), device=starts.device) - torch.repeat_interleave(offsets, lengths)
    return torch.repeat_interleave(starts, lengths) + positions


def _all_known(part: Episodes) -> Tensor:
    return torch.ones(len(part), dtype=torch.bool, device=part.device)


def _joined_labels(parts: Sequence[Episodes]) -> dict[str, Tensor | None]:
    """Return labels [N, L, A] and label_steps [N] of all parts; parts without labels use their recorded actions until
    the end of the episode.
    """
    lengths = {part.labels.shape[1] for part in parts if part.labels is not None}
    if not lengths:
        return {"labels": None, "label_steps": None}
    if len(lengths) > 1:
        raise DataError(
            f"Labels of {sorted(lengths)} steps cannot be concatenated: they come from teachers with different "
            "chunk lengths."
        )
    label_length = lengths.pop()
    labels = [part.actions_ahead(label_length) if part.labels is None else part.labels for part in parts]
    are_complete = all(part.labels is not None and part.label_steps is None for part in parts)
    return {
        "labels": torch.cat(labels),
        "label_steps": None if are_complete else torch.cat([_said(each, label_length) for each in parts]),
    }


def _said(part: Episodes, ahead: int) -> Tensor:
    """Return the number of the `ahead` labels of each step that lie before the end of the episode, [N] int64."""
    if part.labels is None:
        after = (part.starts + part.lengths)[part.episode_of_step]
        return (after - torch.arange(part.step_count, device=part.device)).clamp(max=ahead)
    full_count = torch.full((part.step_count,), ahead, device=part.device)
    return full_count if part.label_steps is None else part.label_steps


def _require_alike(first: Episodes, other: Episodes) -> None:
    shapes = {key: field.shape for key, field in first.observation_fields.items()}
    other_shapes = {key: field.shape for key, field in other.observation_fields.items()}
    if shapes != other_shapes:
        differing = sorted(key for key in {*shapes, *other_shapes} if shapes.get(key) != other_shapes.get(key))
        only = next((key for key in differing if key not in shapes or key not in other_shapes), None)
        way_out = (
            " To drop a column that some of them lack, rename it to a name without the prefix 'observation.': "
            f"{as_setting('train.rename', {only: only.removeprefix('observation.')})}"
            if only is not None
            else ""
        )
        raise DataError(
            f"Episodes with different observations cannot be concatenated: {shapes} and {other_shapes}.{way_out}"
        )
    if first.action_field.shape != other.action_field.shape:
        raise DataError(f"Actions differ in shape: {first.action_field.shape} and {other.action_field.shape}.")
    fields, other_fields = ({**each.observation_fields, "action": each.action_field} for each in (first, other))
    require_consistent_fields(
        {f"'{key}'": (field, other_fields[key]) for key, field in fields.items()},
        ("in the first episodes", "in the other episodes"),
        error=DataError,
        renamed=RENAME_DATA,
        converted=CONVERT_DATA,
    )
    if first.fps != other.fps:
        raise DataError(f"Control rates differ: {first.fps} and {other.fps} steps per second.")


def select_episodes(
    recorded: Episodes, where: object, section: str, episodes: int | Sequence[int] = 0, without: Sequence[int] = ()
) -> Episodes:
    """Return the episodes of a dataset that settings choose; see `select_episode_indices`, which raises ConfigError."""
    count = len(recorded)
    numbers = select_episode_indices(count, where, section, episodes, without)
    return recorded if len(numbers) == count and numbers == sorted(numbers) else recorded.select(numbers)


def select_episode_indices(
    count: int, where: object, section: str, episodes: int | Sequence[int] = 0, without: Sequence[int] = ()
) -> list[int]:
    """Return the numbers of those of `count` episodes that settings choose.

    episodes: their indices, or a number of leading episodes, 0 for all; without: indices to exclude; section, where:
    settings section and dataset, for the error text. Raises ConfigError when an index is out of range or none is left.
    """
    numbers_left = [*range(min(episodes or count, count))] if isinstance(episodes, int) else [*dict.fromkeys(episodes)]
    for setting, numbers in (("episodes", numbers_left), ("exclude_episodes", without)):
        beyond = [number for number in numbers if not 0 <= number < count]
        if beyond:
            raise ConfigError(
                f"{section}.{setting} contains episode {beyond[0]}, but {where} has episodes 0 to {count - 1} "
                f"({count} in all)."
            )
    numbers_left = [number for number in numbers_left if number not in set(without)]
    if not numbers_left:
        raise ConfigError(
            f"{section}.episodes and {section}.exclude_episodes exclude all episodes of {where} ({count})."
        )
    return numbers_left


RENAME_DATA = (
    'Put the columns and "names" in meta/info.json into the same order; or, if both mean the same quantity, give '
    "them the same name in the section that names the data: {train.rename}."
)
CONVERT_DATA = "Convert one of the two, or correct the unit in meta/robopolicy of the dataset that is labelled wrongly."


def require_recorded(
    where: object, episodes: Episodes, observation: Mapping[str, Field], action: Field, whose: str = "policy"
) -> None:
    """Raise DataError unless `episodes` contain the columns of `observation` (key -> field) and `action` with the same
    shapes, elements and units; see `spec.require_consistent_fields`.

    where: dataset location, for the error text; whose: "policy" or "world model".
    """
    fields: Mapping[str, Field] = {**episodes.observation_fields, "action": episodes.action_field}
    pairs: dict[str, tuple[Field, Field]] = {}
    for key, own_field in {**observation, "action": action}.items():
        if key not in fields:
            columns = [name for name in fields if name != "action"]
            raise DataError(
                f"{where} has no column '{key}', which the {whose} reads; it has "
                f"{', '.join(columns)}.{did_you_mean(key, columns)} Rename the column in the section that names the "
                f"data ({as_setting('train.rename', {'COLUMN': key})}), or train a {whose} on the existing columns."
            )
        if fields[key].shape != own_field.shape:
            raise DataError(
                f"{where} has '{key}' with shape {list(fields[key].shape)}, but the {whose} reads shape "
                f"{list(own_field.shape)}: convert the column, or train a {whose} on this dataset."
            )
        pairs[f"'{key}'"] = (fields[key], own_field)
    sides = (f"in {where}", f"for the {whose}")
    require_consistent_fields(pairs, sides, error=DataError, renamed=RENAME_DATA, converted=CONVERT_DATA)


keep_former_names(__name__, {"chosen_episodes": "select_episodes", "chosen_numbers": "select_episode_indices"})
