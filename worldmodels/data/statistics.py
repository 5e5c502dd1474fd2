"""What models of vectors and images read off the data before they learn: structure, means and deviations.

`Standardised` keeps the latter in buffers, so that they are saved and moved with the model.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import DataError
from robopolicy.core.returns import progress_reward
from robopolicy.core.spec import Field, WorldSpec, check_finite
from robopolicy.core.transitions import Transitions
from robopolicy.core.vectors import StateVector
from worldmodels.data.structure import StateStructure, find_structure, no_structure

BOUND = 10.0
"""Standardised values are limited to this, so that a state far from the data cannot blow up the networks."""


def standardised(value: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return `value` [..., D] in standard deviations [D] from the mean [D], limited to BOUND."""
    return ((value - mean) / std).clamp(-BOUND, BOUND)


class Standardised(nn.Module):
    """A module that sees values in standard deviations of its data: buffers `<name>_mean` and `<name>_std`, [D] each.

    They are in the data's units; states are the world's `StateVector`.
    """

    state_mean: Tensor
    state_std: Tensor
    action_mean: Tensor
    action_std: Tensor

    def register_statistics(self, **sizes: int) -> None:
        """Make the buffers of every name, of so many elements: mean 0 and deviation 1 until they are known."""
        for name, size in sizes.items():
            self.register_buffer(f"{name}_mean", torch.zeros(size))
            self.register_buffer(f"{name}_std", torch.ones(size))

    @torch.no_grad()
    def keep_statistics(self, statistics: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Take over means and deviations [D] by name, in the data's units."""
        for name, (mean, std) in statistics.items():
            getattr(self, f"{name}_mean").copy_(mean)
            getattr(self, f"{name}_std").copy_(std)

    def standard(self, name: str, value: Tensor) -> Tensor:
        """Return `value` [..., D] of this name, in the data's units, in standard deviations, limited to BOUND."""
        mean, std = getattr(self, f"{name}_mean"), getattr(self, f"{name}_std")
        return standardised(value, mean.to(value.device), std.to(value.device))


def means_and_deviations(values: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return name -> (mean [D], standard deviation [D], at least 1e-6) of values [N, D]."""
    # With 1e-6 for a deviation of 0, what never varied stays at 0; should it move, `standardised` limits it.
    return {name: (value.mean(0), value.std(0, correction=0).clamp_min(1e-6)) for name, value in values.items()}


def read_statistics(spec: WorldSpec, episodes: Episodes) -> tuple[StateStructure, dict[str, tuple[Tensor, Tensor]]]:
    """Return the state's structure, and name -> (mean, standard deviation) of "state", "action", "change", "reward".

    The state is the world's `StateVector` of V elements; change is the state's in one step. Mean and deviation are [V]
    for "state" and "change", [A] for "action" and [1] for "reward", in the data's units. Raises DataError where the
    data's fields are not the world's or rewards, success or final frames are missing, NonFiniteError where the data is
    not finite.
    """
    require_fields(spec, spec.observation, episodes)
    vector = StateVector.of(spec)
    state = vector.pack(episodes.observation)
    # Episode e has one frame more than steps: step i of it begins at frame i + e and leads to the next one.
    frames = torch.arange(episodes.step_count) + episodes.episode_of_step
    values = {
        "state": state,
        "action": episodes.actions,
        "change": state[frames + 1] - state[frames],
        "reward": progress_reward(episodes)[:, None],
    }
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for name, value in values.items():
        check_finite(f"episodes: {name}", value)
        mean = value.mean(0)
        found[name] = mean, (value - mean).square().mean(0).sqrt().clamp_min(1e-6)
    structure = find_structure(state[frames], state[frames + 1], vector.names) if vector.size else no_structure()
    return structure, found


def require_fields(spec: WorldSpec, fields: Mapping[str, Field], episodes: Episodes) -> None:
    """Raise DataError unless `episodes` hold `fields` of the world of `spec`, and its actions, in their shapes."""
    wanted = {key: field.shape for key, field in fields.items()}
    given = {key: tuple(value.shape[1:]) for key, value in episodes.observation.items() if key in wanted}
    if given != wanted or episodes.actions.shape[1:] != spec.action.shape:
        raise DataError(
            f"World '{spec.name}' shows {wanted} and takes actions {list(spec.action.shape)}, the episodes hold "
            f"{given} and {list(episodes.actions.shape[1:])}: the data comes from another world."
        )


def recorded_transitions(episodes: Episodes, vector: StateVector | None = None) -> Transitions:
    """Return the steps of `episodes` with their rewards for progress, without what success is paid.

    vector: what their states are made of; None: all vector fields of the episodes. Raises DataError where rewards,
    success or final frames are missing, NonFiniteError where the data is not finite.
    """
    progress = progress_reward(episodes)
    if episodes.terminated is None:
        raise DataError("A world model learns where the task ends: the dataset lacks next.terminated.")
    return replace(episodes.transitions(vector), reward=progress).check()
