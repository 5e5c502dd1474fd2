"""What a state vector is made of, read off the data: constants, derived elements and angles.

Learned dynamics predict only what is free to move. Elements that never change within an episode (goals) are copied;
elements that are an affine function of others (relative positions) are recomputed from them, so that they cannot drift
apart; (cosine, sine) pairs are put back on the unit circle.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import pairwise

import torch
from torch import Tensor, nn

BUFFER = "structure_"
"""What the names of a structure's buffers in a model begin with."""

TOLERANCE = 1e-3
"""Share of an element's own standard deviation below which a residual counts as zero."""


@dataclass(frozen=True)
class StateStructure:
    """Which of S elements are what.

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
    """Read the structure off transitions [N, S]; names find the (cosine, sine) pairs: `a_cos` followed by `a_sin`.

    Elements are taken in order: one is derived if the earlier non-derived ones give it by least squares within
    TOLERANCE of its standard deviation, in every transition.
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
    kept: list[int] = []
    derived: list[int] = []
    for index in range(samples.shape[1]):
        varies = bool(scale[index] > 1e-9)
        # Both elements of an angle stay free: `complete` needs the two to put them back on the circle.
        if varies and kept and index not in on_circle and _residual(samples, kept, index) < TOLERANCE * scale[index]:
            derived.append(index)
        elif varies:
            kept.append(index)
    # One affine fit of all derived elements on those kept; its last row, that of the column of ones, is the bias.
    design = torch.cat([samples[:, kept], torch.ones(len(samples), 1, dtype=torch.float64)], 1)
    solution = torch.linalg.lstsq(design, samples[:, derived]).solution
    # What the fit leaves of a zero must be exactly 0, or every kept element would leak into every derived one.
    solution[solution.abs() < 1e-6] = 0.0
    free = [index for index in kept if moves[index]]
    # Goals vary between episodes but not within them: kept, not free.
    constant = [index for index in range(samples.shape[1]) if index not in free and index not in derived]
    return StateStructure(
        torch.tensor(free),
        torch.tensor(constant, dtype=torch.int64),
        torch.tensor(derived, dtype=torch.int64),
        # Derived elements may rest on constants too, as "object minus goal" does.
        torch.tensor(kept),
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
    """Keep `structure` in the buffers of `model`, so that it is saved and moved with it."""
    for name, value in structure.__dict__.items():
        model.register_buffer(f"{BUFFER}{name}", value)


def structure_of(model: nn.Module) -> StateStructure:
    """Return the structure in the buffers of `model`."""
    return StateStructure(*(getattr(model, f"{BUFFER}{item.name}") for item in fields(StateStructure)))


def structure_in(weights: Mapping[str, Tensor]) -> StateStructure:
    """Return the structure among saved `weights`, of a model or of a part of one.

    weights: name -> [...]; read are those whose last names begin with BUFFER, of the shapes that `StateStructure` says.
    Raises TypeError when one of them is missing.
    """
    last = {name.rpartition(".")[2]: value for name, value in weights.items()}
    return StateStructure(
        **{name.removeprefix(BUFFER): value for name, value in last.items() if name.startswith(BUFFER)}
    )
