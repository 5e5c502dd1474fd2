"""Goals as pictures or states: how far what a model imagines at a plan's end is from what it should look like.

A model of image features compares pictures by its features, which need neither a reward nor a state; vectors are
compared by the elements that the goal names. Both in standard deviations of the data, so that all count alike.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from robopolicy.core.errors import ConfigError, SpecError, did_you_mean
from robopolicy.core.spec import IMAGE_PREFIX, Field
from worldmodels.protocol import Imagined, Latent, WorldModel


@runtime_checkable
class ComparesGoals(WorldModel, Protocol):
    """A model that compares its latents with goals in standard deviations of its data."""

    @property
    def goal_fields(self) -> Mapping[str, Field]:
        """Fields of the imitated world in which a goal may be given, by key."""
        ...

    def goal_targets(self, goal: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the targets of G goals, key -> [G, D], from their fields, key -> [G, *shape]; NaN stays NaN."""
        ...

    def goal_values(self, latent: Latent, keys: Sequence[str]) -> Mapping[str, Tensor]:
        """Return the values of latents [B, ...] to compare with `goal_targets`, key -> [B, D], for these keys."""
        ...


UNVARYING = 2e-6
"""Deviation in the data up to which an element never varied; see `worldmodels.data.means_and_deviations`."""


def only_varying(targets: Tensor, deviations: Tensor) -> Tensor:
    """Return targets [G, D] with NaN for elements without deviation [D]: no plan changes these, and measured in
    deviations of nothing they would drown the others.
    """
    return torch.where(deviations.cpu() > UNVARYING, targets, torch.nan)


def comparable_fields_of(model: WorldModel) -> Mapping[str, Field]:
    """Return the fields in which a goal of `model` may be given, by key."""
    return model.goal_fields if isinstance(model, ComparesGoals) else model.spec.observation


class Goal:
    """What `model` should imagine at a plan's end: one goal for all rows, or one a row.

    fields: key -> [G, *shape], uint8 images and vectors in the world's units, for G = 1 or the number of rows; elements
    of vectors that are NaN do not matter. Raises ConfigError for fields that the model cannot compare.
    """

    def __init__(self, model: WorldModel, fields: Mapping[str, Tensor]):
        comparable_fields = comparable_fields_of(model)
        for key, value in fields.items():
            if key not in comparable_fields:
                raise ConfigError(
                    f"plan.goal names '{key}', but the model of '{model.spec.name}' compares goals by "
                    f"{', '.join(comparable_fields)}.{did_you_mean(key, comparable_fields)}"
                )
            if tuple(value.shape[1:]) != comparable_fields[key].shape:
                raise ConfigError(
                    f"plan.goal: '{key}' has shape {list(value.shape[1:])}, but the world's has "
                    f"{list(comparable_fields[key].shape)}."
                )
        self.model = model
        targets = model.goal_targets(fields) if isinstance(model, ComparesGoals) else _plain(fields)
        self.targets = dict(targets)
        if all(bool(target.isnan().all()) for target in self.targets.values()):
            raise ConfigError("A goal needs an element that is not null and varied in the data of the model.")

    def distance(self, latent: Latent, outcome: Imagined, rows: int) -> Tensor:
        """Return the mean squared distance [n] to the goals, over elements and then over fields.

        latent, outcome: of the last imagined step, n = rows * N, samples of a row one after another. Raises SpecError
        unless there is one goal, or one a row.
        """
        keys = tuple(self.targets)
        count = len(self.targets[keys[0]])
        if count not in (1, rows):
            raise SpecError(f"There are {count} goals for {rows} rows: give one, or one for each row.")
        if isinstance(self.model, ComparesGoals):
            values = self.model.goal_values(latent, keys)
        else:
            values = _plain({key: outcome.observation[key] for key in keys})
        total = torch.zeros(())
        for key, target in self.targets.items():
            value = values[key].cpu()
            counts = (~target.isnan()).expand(rows, -1).repeat_interleave(len(value) // rows, 0)
            target_rows = target.nan_to_num().expand(rows, -1).repeat_interleave(len(value) // rows, 0)
            squared = torch.where(counts, (value - target_rows).square(), 0.0)
            total = total + squared.sum(1) / counts.sum(1).clamp_min(1)
        return total / len(self.targets)


def _plain(fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return fields, key -> [B, *shape], as they are compared without statistics: pixels from 0 to 1, units of the
    world, [B, D].
    """
    scales = {key: 255.0 if key.startswith(IMAGE_PREFIX) else 1.0 for key in fields}
    return {key: value.flatten(1).float().cpu() / scales[key] for key, value in fields.items()}
