"""Statistics that world models compute from the data before training: structure of the state vector, means and
deviations.

Learned dynamics predict only what is free to move. Elements that never change within an episode (goals) are copied;
elements that are an affine function of others (relative positions) are recomputed from them, so that they cannot drift
apart; (cosine, sine) pairs are put back on the unit circle. `Standardised` keeps means and deviations in buffers, so
that they are saved and moved with the model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import DataError
from robopolicy.core.returns import progress_reward
from robopolicy.core.spec import Field, WorldSpec, check_finite
from robopolicy.core.transitions import Transitions
from robopolicy.core.vectors import StateVector

BUFFER = "structure_"
"""Name prefix of a structure's buffers in a model."""

TOLERANCE = 1e-3
"""Fraction of an element's own standard deviation below which a residual counts as zero."""


@dataclass(frozen=True)
class StateStructure:
    """Classification of the S elements of a state.

    free: [F] indices that are predicted; constant: [C] indices copied; derived: [D] indices recomputed as
    base @ weights + bias, with base the elements `source` [P], weights [P, D], bias [D]; circles: [n, 2] index pairs.
    """

    free: Tensor
    constant: Tensor
    derived: Tensor
    source: Tensor
    weights: Tensor
    bias: Tensor
    circles: Tensor

    def complete(self, state: Tensor) -> Tensor:
        """Return `state` [..., S] with circles normalised and derived elements recomputed."""
        state = state.clone()
        if len(self.circles):
            pairs = state[..., self.circles]
            state[..., self.circles] = pairs / pairs.norm(dim=-1, keepdim=True).clamp_min(1e-6)
        if len(self.derived):
            state[..., self.derived] = state[..., self.source] @ self.weights + self.bias
        return state


def find_structure(state: Tensor, next_state: Tensor, names: tuple[str, ...]) -> StateStructure:
    """Infer the structure from transitions [N, S]; (cosine, sine) pairs are recognised by their names: `a_cos` followed
    by `a_sin`.

    Elements are processed in order. One is derived if least squares predicts it from the earlier non-derived ones
    within TOLERANCE of its standard deviation, in every transition.
    """
    # In double precision: rounding of floats would look like a residual of an exact affine relation.
    samples = torch.cat([state[:5000], next_state[:5000]]).double()
    scale = samples.std(0, correction=0)
    # Relative to the spread over all episodes, so that jitter of a stored goal does not count as movement.
    moves = (next_state - state).abs().amax(0).double() > TOLERANCE * scale.clamp_min(1e-9)
    circles = [
        (index, index + 1)
        for index, (first, second) in enumerate(pairwise(names))
        if first.endswith("cos") and second == first.removesuffix("cos") + "sin"
    ]
    on_circle = {index for pair in circles for index in pair}
    independent: list[int] = []
    derived: list[int] = []
    for index in range(samples.shape[1]):
        varies = bool(scale[index] > 1e-9)
        # Both elements of an angle stay free: `complete` needs the two to put them back on the circle.
        if (
            varies
            and independent
            and index not in on_circle
            and _residual(samples, independent, index) < TOLERANCE * scale[index]
        ):
            derived.append(index)
        elif varies:
            independent.append(index)
    # One affine fit of all derived elements on those kept; its last row, that of the column of ones, is the bias.
    design = torch.cat([samples[:, independent], torch.ones(len(samples), 1, dtype=torch.float64)], 1)
    solution = torch.linalg.lstsq(design, samples[:, derived]).solution
    # What the fit leaves of a zero must be exactly 0, or every kept element would leak into every derived one.
    solution[solution.abs() < 1e-6] = 0.0
    free_elements = [index for index in independent if moves[index]]
    # Goals vary between episodes but not within them: kept, not free.
    constant = [index for index in range(samples.shape[1]) if index not in free_elements and index not in derived]
    return StateStructure(
        torch.tensor(free_elements),
        torch.tensor(constant, dtype=torch.int64),
        torch.tensor(derived, dtype=torch.int64),
        # Derived elements may rest on constants too, as "object minus goal" does.
        torch.tensor(independent),
        solution[:-1].float(),
        solution[-1].float(),
        torch.tensor(circles, dtype=torch.int64).reshape(-1, 2),
    )


def no_structure() -> StateStructure:
    """Return the structure of a state without elements."""
    none = torch.zeros(0, dtype=torch.int64)
    return StateStructure(none, none, none, none, torch.zeros(0, 0), torch.zeros(0), none.reshape(0, 2))


def _residual(samples: Tensor, kept: list[int], index: int) -> Tensor:
    """Return the largest error of predicting element `index` from the elements `kept`, after an affine fit."""
    design = torch.cat([samples[:, kept], torch.ones(len(samples), 1, dtype=torch.float64)], 1)
    target = samples[:, index : index + 1]
    return (design @ torch.linalg.lstsq(design, target).solution - target).abs().max()


def register_structure(model: nn.Module, structure: StateStructure) -> None:
    """Store `structure` in buffers of `model`, so that it is saved and moved with it."""
    for name, value in structure.__dict__.items():
        model.register_buffer(f"{BUFFER}{name}", value)


def structure_of(model: nn.Module) -> StateStructure:
    """Return the structure in the buffers of `model`."""
    return StateStructure(*(getattr(model, f"{BUFFER}{item.name}") for item in fields(StateStructure)))


def structure_in(weights: Mapping[str, Tensor]) -> StateStructure:
    """Return the structure stored in saved `weights` of a model or of a part of one.

    weights: name -> [...]; entries whose last name part starts with BUFFER are read, with the shapes of
    `StateStructure`. Raises TypeError when one of them is missing.
    """
    last = {name.rpartition(".")[2]: value for name, value in weights.items()}
    return StateStructure(
        **{name.removeprefix(BUFFER): value for name, value in last.items() if name.startswith(BUFFER)}
    )


BOUND = 10.0
"""Clipping bound of standardised values, so that a state far from the data does not blow up the networks."""


def standardised(value: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Standardise `value` [..., D] with mean and standard deviation [D], and clip it to BOUND."""
    return ((value - mean) / std).clamp(-BOUND, BOUND)


class Standardised(nn.Module):
    """A module that standardises values with statistics of its data: buffers `<name>_mean` and `<name>_std`, [D] each.

    The statistics are in the data's units; states are the world's `StateVector`.
    """

    state_mean: Tensor
    state_std: Tensor
    action_mean: Tensor
    action_std: Tensor

    def register_statistics(self, **sizes: int) -> None:
        """Register the buffers of every name, with the given number of elements: mean 0 and deviation 1 until they are
        set.
        """
        for name, size in sizes.items():
            self.register_buffer(f"{name}_mean", torch.zeros(size))
            self.register_buffer(f"{name}_std", torch.ones(size))

    @torch.no_grad()
    def keep_statistics(self, statistics: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Store means and deviations [D] by name, in the data's units."""
        for name, (mean, std) in statistics.items():
            getattr(self, f"{name}_mean").copy_(mean)
            getattr(self, f"{name}_std").copy_(std)

    def standard(self, name: str, value: Tensor) -> Tensor:
        """Standardise `value` [..., D] of this name, given in the data's units, and clip it to BOUND."""
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
    statistics: dict[str, tuple[Tensor, Tensor]] = {}
    for name, value in values.items():
        check_finite(f"episodes: {name}", value)
        mean = value.mean(0)
        statistics[name] = mean, (value - mean).square().mean(0).sqrt().clamp_min(1e-6)
    structure = find_structure(state[frames], state[frames + 1], vector.names) if vector.size else no_structure()
    return structure, statistics


def require_fields(spec: WorldSpec, fields: Mapping[str, Field], episodes: Episodes) -> None:
    """Raise DataError unless `episodes` contain `fields` of the world of `spec`, and its actions, in their shapes."""
    expected_shapes = {key: field.shape for key, field in fields.items()}
    actual_shapes = {
        key: tuple(value.shape[1:]) for key, value in episodes.observation.items() if key in expected_shapes
    }
    if actual_shapes != expected_shapes or episodes.actions.shape[1:] != spec.action.shape:
        raise DataError(
            f"The data comes from another world: '{spec.name}' outputs {expected_shapes} and takes actions "
            f"{list(spec.action.shape)}, but the episodes contain {actual_shapes} and "
            f"{list(episodes.actions.shape[1:])}."
        )


def recorded_transitions(episodes: Episodes, vector: StateVector | None = None) -> Transitions:
    """Return the steps of `episodes` with their progress rewards, excluding the success bonus.

    vector: composition of the states; None: all vector fields of the episodes. Raises DataError when rewards, success
    or final frames are missing, NonFiniteError when the data is not finite.
    """
    progress = progress_reward(episodes)
    if episodes.terminated is None:
        raise DataError("A world model needs the task ends, but the dataset lacks next.terminated.")
    return replace(episodes.transitions(vector), reward=progress).check()
