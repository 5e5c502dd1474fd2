"""Conversion between a world's observations and units and the critics' inputs: state vectors, and flat action chunks in
[-1, 1].
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.arrays import Array
from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError, SpecError
from robopolicy.core.policy import TensorObservation, to_tensors
from robopolicy.core.spec import IMAGE_PREFIX, TASK, Field, PolicySpec, WorldSpec
from robopolicy.core.vectors import StateVector

Features = Callable[[TensorObservation], Tensor]
"""Frozen features [N, F] of observations [N, H, ...], such as those of a policy's encoder, through which critics read
images.
"""


class Interface:
    """Inputs of critics: states and actions.

    observation: fields, by key, whose vectors form the state; action: one control step [A]; chunk: control steps C per
    action chunk; instructions: if there are several, the current one is part of the state; features: additional state
    features of `history` H frames, `feature_size` F elements; bounds: range of actions if `action` has none, low and
    high [A]. Raises ConfigError if actions have no range, or if the state is empty.
    """

    def __init__(
        self,
        observation: Mapping[str, Field],
        action: Field,
        *,
        chunk: int = 1,
        instructions: Sequence[str] = ("",),
        features: Features | None = None,
        feature_size: int = 0,
        history: int = 1,
        bounds: tuple[Tensor, Tensor] | None = None,
    ):
        self.fields = dict(observation)
        self.action = action
        self.chunk = chunk
        self.history = history
        self.vector, self.instructions = StateVector.learned(observation), tuple(instructions)
        self.features, self.feature_size = features, feature_size
        self.low, self.high = bounds or _range(action)
        if not bool(self.low.isfinite().all() and self.high.isfinite().all()):
            raise ConfigError("The actions have no bounds, which agents with critics need: set low and high.")
        tasks = len(self.instructions) if len(self.instructions) > 1 else 0
        self.size = self.vector.size + tasks + feature_size
        if not self.size:
            raise ConfigError(
                "A critic needs vector observations or encoded image features, and this data has neither."
            )
        self.actions = chunk * action.size

    @staticmethod
    def of(spec: "WorldSpec | PolicySpec", chunk: int = 1) -> "Interface":
        """Build the interface of a world or a policy without images; raises ConfigError if its actions have no
        range.
        """
        return Interface(spec.observation, spec.action, chunk=chunk, instructions=spec.instructions)

    def to_json(self) -> dict[str, Any]:
        """Return the interface's arguments except the features as JSON; the number of features is included."""
        return {
            "observation": {key: field.to_json() for key, field in self.fields.items()},
            "action": self.action.to_json(),
            "chunk": self.chunk,
            "instructions": list(self.instructions),
            "feature_size": self.feature_size,
            "history": self.history,
            "low": cast(list[float], self.low.tolist()),  # pyright: ignore[reportUnknownMemberType]
            "high": cast(list[float], self.high.tolist()),  # pyright: ignore[reportUnknownMemberType]
        }

    @staticmethod
    def from_json(data: Mapping[str, Any], features: Features | None = None) -> "Interface":
        """Rebuild from `to_json`, with the original's features; raises KeyError on invalid data."""
        return Interface(
            {key: Field.from_json(field) for key, field in data["observation"].items()},
            Field.from_json(data["action"]),
            chunk=data["chunk"],
            instructions=tuple(data["instructions"]),
            features=features,
            feature_size=data["feature_size"],
            history=data["history"],
            bounds=(torch.tensor(data["low"]), torch.tensor(data["high"])),
        )

    @property
    def keys(self) -> tuple[str, ...]:
        """Observation fields that are read."""
        images = tuple(key for key in self.fields if key.startswith(IMAGE_PREFIX)) if self.features else ()
        return (*self.vector.keys, *images)

    def state(self, observation: Mapping[str, Any]) -> Tensor:
        """Return the states [N, S] of observations [N, H, ...], numpy or torch, with `task` texts if there are several
        instructions.

        Raises SpecError if a field or an instruction is missing.
        """
        has_tensors = any(isinstance(value, Tensor) for value in observation.values())
        tensors: dict[str, Any] = dict(observation) if has_tensors else dict(to_tensors(dict(observation)))
        parts: list[Tensor] = []
        if self.vector.size:
            newest: dict[str, Tensor] = {key: tensors[key][:, -1] for key in self.vector.keys}
            parts.append(self.vector.pack(newest))
        if len(self.instructions) > 1:
            parts.append(self._tasks(tensors[TASK]).to(parts[0].device if parts else "cpu"))
        if self.features is not None:
            parts.append(self.features(tensors))
        return torch.cat(parts, -1)

    def to_world(self, action: Tensor) -> Array:
        """Convert flat chunks [N, C * A] to the world's units, [N, C, A] numpy."""
        return cast(Array, self.chunks(action).cpu().double().numpy())  # pyright: ignore[reportUnknownMemberType]

    def chunks(self, action: Tensor) -> Tensor:
        """Convert flat chunks [N, C * A] to the world's units, [N, C, A]."""
        low, high = self.low.to(action.device), self.high.to(action.device)
        return low + (action.reshape(len(action), self.chunk, -1) + 1) / 2 * (high - low)

    def to_agent(self, chunks: Tensor) -> Tensor:
        """Normalise chunks [N, C, A], or single steps [N, A], to [-1, 1] and flatten them: [N, C * A]."""
        low, high = self.low.to(chunks.device), self.high.to(chunks.device)
        # Recorded actions may lie outside of the range; agents know only the box.
        return (2 * (chunks - low) / (high - low) - 1).clamp(-1, 1).flatten(1).float()

    def _tasks(self, texts: Sequence[str]) -> Tensor:
        index_of_text = {text: place for place, text in enumerate(self.instructions)}
        unknown_texts = sorted({str(text) for text in texts} - set(index_of_text))
        if unknown_texts:
            raise SpecError(f"The critic was not trained with the instruction '{unknown_texts[0]}'.")
        return torch.eye(len(index_of_text))[[index_of_text[str(text)] for text in texts]]


def recorded_range(episodes: Episodes, margin: float = 0.05) -> tuple[Tensor, Tensor]:
    """Return the range of actions, low and high [A]: the field's, or the recorded one if the field has none.

    margin: fraction of the recorded range added on both sides.
    """
    low, high = _range(episodes.action_field)
    lowest, highest = episodes.actions.amin(0).cpu().float(), episodes.actions.amax(0).cpu().float()
    room = margin * (highest - lowest).clamp_min(1e-6)
    return torch.where(low.isfinite(), low, lowest - room), torch.where(high.isfinite(), high, highest + room)


def _range(action: Field) -> tuple[Tensor, Tensor]:
    low, high = (np.broadcast_to(bound, action.shape).copy() for bound in (action.low, action.high))
    return torch.as_tensor(low, dtype=torch.float32), torch.as_tensor(high, dtype=torch.float32)
