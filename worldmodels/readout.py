"""Readout: vectors of the imitated world, read off the latents of a model without a decoder.

A model of image features imagines no observation, so only policies trained behind its encoder act in it. The readout is
a small network from a latent, and its change in the last step, to the vectors that the encoder does not read
(`observation.environment_state`), trained after the encoder on recorded labels. With it, scripted experts and policies
of states act in the model too (`ReadableModel`), and the model's errors are known in the world's units. Elements that
never change within an episode (goals) are read once, off its first frame; what is an affine function of others is
computed from them. The encoder learns from these labels as well (`worldmodels.frame_encoder.Labels`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, Self, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.episodes import Episodes
from robopolicy.core.spec import Field, WorldSpec
from robopolicy.core.vectors import StateVector
from robopolicy.nn.blocks import Members
from worldmodels.data import (
    Standardised,
    StateStructure,
    find_structure,
    means_and_deviations,
    register_structure,
    structure_of,
)
from worldmodels.protocol import LATENT, Context, DecoderFree, Imagined, Latent, WorldModel

BATCH = 256
"""Number of frames per training step."""

WIDTH = 192
"""Width of its two hidden layers."""

BEFORE, FIXED = "before", "fixed"
"""Entries of a latent with a readout: the state before the last step [B, S], what was read once [B, C]."""


@runtime_checkable
class HasReadout(DecoderFree, Protocol):
    """A `DecoderFree` from whose latents vectors of the imitated world can be read."""

    @property
    def readable(self) -> Mapping[str, Field]:
        """Fields of the imitated world that `read` returns, by key; {} if there is no readout."""
        ...

    def read(self, latent: Latent, keys: Sequence[str]) -> Mapping[str, Tensor]:
        """Return the fields `keys` of latents, some of `readable`, key -> [B, *shape], without gradient."""
        ...


class StateReadout(Standardised):
    """Reads the vector fields of a world off latents; a `Regression` on episodes that contain latents and vectors.

    known: fields that lead a latent of `size` elements as they are; fields: all vector fields, of which the others are
    read; structure: of the `StateVector` of `fields`.
    """

    latent_mean: Tensor
    latent_std: Tensor
    change_mean: Tensor
    change_std: Tensor
    value_mean: Tensor
    value_std: Tensor
    fixed_places: Tensor

    def __init__(
        self,
        known: StateVector,
        fields: Mapping[str, Field],
        structure: StateStructure,
        size: int,
        seed: int = 0,
    ):
        super().__init__()
        self.known, self.vector = known, StateVector.of(fields)
        register_structure(self, structure)
        hidden = [
            index
            for key, place in self.vector.slices.items()
            if key not in known.fields
            for index in range(place.start, place.stop)
        ]
        derived = set(structure.derived.tolist())
        self.read_elements = [index for index in hidden if index not in derived]
        constant = set(structure.constant.tolist())
        fixed = [place for place, index in enumerate(self.read_elements) if index in constant]
        self.register_buffer("fixed_places", torch.tensor(fixed, dtype=torch.long), persistent=False)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.network = Members(1, 2 * size, WIDTH, 2, len(self.read_elements))
        self.register_statistics(latent=size, change=size, value=len(self.read_elements))

    @classmethod
    def of(cls, known: StateVector, spec: WorldSpec, episodes: Episodes, size: int, seed: int) -> Self | None:
        """Return an untrained readout of the vectors of `spec` that `episodes` contain; None if all are `known`."""
        fields = {
            key: field
            for key, field in StateVector.of(spec).fields.items()
            if key in known.fields or key in episodes.observation
        }
        if fields.keys() <= known.fields.keys():
            return None
        vector = StateVector.of(fields)
        frames = torch.arange(episodes.step_count) + episodes.episode_of_step
        state = vector.pack(episodes.observation)
        return cls(known, fields, find_structure(state[frames], state[frames + 1], vector.names), size, seed)

    @property
    def fields(self) -> Mapping[str, Field]:
        """Fields that `read` returns, those that the latent contains included."""
        return self.vector.fields

    @property
    def deviations(self) -> Tensor:
        """Standard deviations [S] of all its elements, in the world's units; of those computed from others, as if these
        were independent.
        """
        structure, deviations = structure_of(self), self.value_std.new_ones(self.vector.size)
        for key, place in self.known.slices.items():
            deviations[self.vector.slices[key]] = self.latent_std[place]
        deviations[self.read_elements] = self.value_std
        if len(structure.derived):
            variances = deviations[structure.source].square() @ structure.weights.square()
            deviations[structure.derived] = variances.sqrt().clamp_min(1e-6)
        return deviations

    def batches(self, episodes: Episodes, generator: torch.Generator) -> Iterator[dict[str, Tensor]]:
        """Yield batches indefinitely: latent and before, the latents of a frame and of the previous one (of the same
        one at the start of an episode), [N, S]; value, the elements to read, [N, E], in the world's units.

        The statistics are replaced by those of `episodes`; `generator` is the only other state.
        """
        latents, device = episodes.observation[LATENT], self.latent_mean.device
        before = torch.arange(len(latents)) - 1
        before[episodes.frame_starts] += 1
        values = self.vector.pack(episodes.observation)[:, self.read_elements]
        statistics = {"latent": latents, "change": latents - latents[before], "value": values}
        self.keep_statistics(means_and_deviations(statistics))
        while True:
            rows = torch.randint(len(latents), (BATCH,), generator=generator, device=generator.device).cpu()
            batch = {"latent": latents[rows], "before": latents[before[rows]], "value": values[rows]}
            yield {name: value.to(device) for name, value in batch.items()}

    def loss(self, batch: Mapping[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        """Return {"readout": [N]}: the squared error in standard deviations of the data, a mean over elements."""
        error = self(batch["latent"], batch["before"]) - self.standard("value", batch["value"])
        return {"readout": error.square().mean(-1)}

    def forward(self, latent: Tensor, before: Tensor) -> Tensor:
        """Return the standardised elements [B, E] of latents and those before the last step, [B, S]."""
        inputs = self.standard("latent", latent), self.standard("change", latent - before)
        return self.network(torch.cat(inputs, -1)[None])[0]

    def values(self, latent: Tensor, before: Tensor) -> Tensor:
        """Return the elements [B, E] in the world's units, of latents and those before the last step, [B, S]."""
        return self.value_mean + self.value_std * self(latent, before)

    def fixed_in(self, latent: Tensor) -> Tensor:
        """Return the elements that are read once, [B, C] in the world's units, off latents [B, S] of first frames."""
        return self.values(latent, latent)[:, self.fixed_places]

    def read(self, latent: Tensor, before: Tensor, fixed: Tensor) -> dict[str, Tensor]:
        """Return the vector fields, key -> [B, *shape], of latents and those before the last step, [B, S].

        fixed: [B, C], what was read off the first frame.
        """
        values = self.values(latent, before)
        values[:, self.fixed_places] = fixed
        state = latent.new_zeros(len(latent), self.vector.size)
        for key, place in self.known.slices.items():
            state[:, self.vector.slices[key]] = latent[:, place]
        state[:, self.read_elements] = values
        return dict(self.vector.unpack(structure_of(self).complete(state)))


class ReadableModel:
    """A `DecoderFree` that outputs `keys`: fields that `model` can read off its latents, or its latent itself.

    Everything else is as in `model`, with equal seeds.
    """

    def __init__(self, model: HasReadout, keys: tuple[str, ...]):
        self.inner = model
        fields = {**model.readable, **model.spec.observation}
        self.spec = replace(model.spec, observation={key: fields[key] for key in keys})

    @property
    def reads(self) -> Mapping[str, Field]:
        """Fields that `initial` reads."""
        return self.inner.reads

    def initial(self, context: Context, seeds: np.ndarray) -> Latent:
        """Return the model's latent of episodes with `seeds` [R] that start in `context`."""
        return self.inner.initial(context, seeds)

    def show(self, latent: Latent) -> Mapping[str, Tensor]:
        """Return the fields of `spec`, key -> [B, *shape]."""
        latents = self.inner.show(latent)
        values = {**latents, **self.inner.read(latent, [key for key in self.spec.observation if key not in latents])}
        return {key: values[key] for key in self.spec.observation}

    def imagine(self, latent: Latent, actions: Tensor) -> tuple[Latent, Imagined]:
        """Advance every row by one control step with actions [B, A]."""
        latent, outcome = self.inner.imagine(latent, actions)
        return latent, replace(outcome, observation=self.show(latent))


def inner_model(model: WorldModel) -> WorldModel:
    """Return the model whose latents a `ReadableModel` reads, or `model` itself."""
    return model.inner if isinstance(model, ReadableModel) else model
