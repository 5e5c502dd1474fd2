"""State vector (`StateVector`): the vector fields of an observation concatenated in a fixed order.

Worlds list their fields in any order; models and agents read one vector. Its order is fixed here: `observation.state`,
then `observation.environment_state`, then all other non-image fields in the order of the spec.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.arrays import Array
from robopolicy.core.errors import SpecError, did_you_mean
from robopolicy.core.spec import (
    ENVIRONMENT_STATE,
    IMAGE_PREFIX,
    STATE,
    Field,
    PolicySpec,
    WorldSpec,
    note_large_vectors,
)


@dataclass(frozen=True)
class StateVector:
    """Fields that make up a vector of S elements, in order; create it with `of`.

    fields: key -> field of one frame, without images.
    """

    fields: Mapping[str, Field]

    @staticmethod
    def of(described: "WorldSpec | PolicySpec | Mapping[str, Field]") -> "StateVector":
        """Return the vector of a spec, or of fields by key; it is empty if there are only images."""
        observation = described if isinstance(described, Mapping) else described.observation
        vectors = {key: field for key, field in observation.items() if not key.startswith(IMAGE_PREFIX)}
        first = [key for key in (STATE, ENVIRONMENT_STATE) if key in vectors]
        return StateVector({key: vectors[key] for key in (*first, *(key for key in vectors if key not in first))})

    @staticmethod
    def learned(described: "WorldSpec | PolicySpec | Mapping[str, Field]") -> "StateVector":
        """As `of`, for the input of a trained network: warns if a field has very many elements."""
        vector = StateVector.of(described)
        note_large_vectors(vector.fields)
        return vector

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the fields, in the vector's order."""
        return tuple(self.fields)

    @cached_property
    def sizes(self) -> list[int]:
        """Number of elements of each field."""
        return [field.size for field in self.fields.values()]

    @property
    def size(self) -> int:
        """Number of elements S."""
        return sum(self.sizes)

    @cached_property
    def slices(self) -> dict[str, slice]:
        """Return key -> slice of the field's elements in the vector."""
        ends = np.cumsum([0, *self.sizes]).tolist()
        return {key: slice(ends[place], ends[place + 1]) for place, key in enumerate(self.fields)}

    @property
    def names(self) -> tuple[str, ...]:
        """Name of every element [S]; empty if a field has no element names."""
        return tuple(name for field in self.fields.values() for name in (field.names or ("",) * field.size))

    @overload
    def pack(self, observation: Mapping[str, Array]) -> Array: ...

    @overload
    def pack(self, observation: Mapping[str, Tensor] | Mapping[str, Tensor | list[str]]) -> Tensor: ...

    def pack(self, observation: Mapping[str, Any]) -> Array | Tensor:
        """Concatenate an observation, key -> [..., *shape], into float32 vectors [..., S]; numpy or torch, like the
        input.

        The leading axes (batch, history, time) are preserved. Keys beyond the vector's fields are ignored. Raises
        SpecError when a field is missing or has another shape.
        """
        parts = [_flat(observation, key, field) for key, field in self.fields.items()]
        if not parts:
            return _empty(observation)
        tensors = [part.float() for part in parts if isinstance(part, Tensor)]
        if tensors:
            return torch.cat(tensors, -1)
        return np.concatenate([np.asarray(part, np.float32) for part in parts], -1)

    @overload
    def unpack(self, vector: Array) -> dict[str, Array]: ...

    @overload
    def unpack(self, vector: Tensor) -> dict[str, Tensor]: ...

    def unpack(self, vector: Array | Tensor) -> Mapping[str, Array | Tensor]:
        """Split vectors [..., S] into fields, key -> [..., *shape]: views of `vector` if possible.

        Raises SpecError if the vectors have a different number of elements.
        """
        if vector.shape[-1] != self.size:
            raise SpecError(f"Vectors of {', '.join(self.keys)} have {self.size} elements, not {vector.shape[-1]}.")
        return {
            key: vector[..., self.slices[key]].reshape(*vector.shape[:-1], *field.shape)
            for key, field in self.fields.items()
        }


def _flat(observation: Mapping[str, Any], key: str, field: Field) -> Array | Tensor:
    """Flatten the field's own axes to [..., size]."""
    if key not in observation:
        raise SpecError(
            f"The observation has no '{key}'; it has: {', '.join(observation)}.{did_you_mean(key, observation)}"
        )
    value = observation[key]
    lead = value.ndim - len(field.shape)
    if lead < 0 or tuple(value.shape[lead:]) != tuple(field.shape):
        raise SpecError(f"'{key}' has shape {list(value.shape)}, which does not end in {list(field.shape)}.")
    return value.reshape(*value.shape[:lead], field.size)


def _empty(observation: Mapping[str, Any]) -> Array | Tensor:
    """Return empty vectors [..., 0] with the leading axes of the images [..., height, width, channels]."""
    image = next((value for key, value in observation.items() if key.startswith(IMAGE_PREFIX)), None)
    if image is None:
        raise SpecError(f"The observation contains neither vectors nor images: {', '.join(observation) or 'nothing'}.")
    if isinstance(image, Tensor):
        return torch.zeros(*image.shape[:-3], 0, device=image.device)
    return np.zeros((*image.shape[:-3], 0), np.float32)
