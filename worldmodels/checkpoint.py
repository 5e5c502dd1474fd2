"""World model checkpoints: config.json describes the model, safetensors store the weights; nothing is pickled.

config.json names the model kind. Built-in and installed kinds are found by name; other kinds are imported only if the
user has named them too, so a downloaded folder cannot trigger arbitrary imports.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from robopolicy.core.checkpoints import (
    Checkpoint,
    load_weights,
    read_weights,
    require_format,
    restoring,
    write_checkpoint,
)
from robopolicy.core.errors import CheckpointError, did_you_mean
from robopolicy.core.origin import described_origin, remember_described
from robopolicy.core.spec import WorldSpec
from robopolicy.core.structured import to_plain
from worldmodels.data import StateStructure, structure_in
from worldmodels.protocol import LearnedModel
from worldmodels.registry import WORLD_MODELS, saved_configuration

PREFIX = "world_model/"


def save_world_model(model: LearnedModel, folder: Path) -> None:
    """Write a world model, an nn.Module, to `folder`, atomically, with the spec of the world that it imitates."""
    kind = PREFIX + WORLD_MODELS.name_of(type(model))
    description = {"kind": kind, "spec": model.spec.to_json(), "model": model.description(), **described_origin(model)}
    write_checkpoint(folder, description, model)


def kind_of(folder: Path) -> str:
    """Return the kind of the world model in `folder`, or raise CheckpointError if there is none."""
    return _kind_in(Checkpoint.open(folder))


def holds_world_model(folder: Path) -> bool:
    """Return whether `folder` contains a world model; raises CheckpointError when it contains no checkpoint."""
    return _name_in(Checkpoint.open(folder).description) is not None


def _name_in(description: Mapping[str, Any]) -> str | None:
    """Return the kind of world model that a checkpoint describes, or None."""
    kind = str(description.get("kind"))
    name = kind.removeprefix(PREFIX)
    return name if kind.startswith(PREFIX) and (name in WORLD_MODELS or ":" in name) else None


def _kind_in(checkpoint: Checkpoint) -> str:
    """Return the kind of the world model in a checkpoint, or raise CheckpointError when it contains none."""
    name = _name_in(checkpoint.description)
    if name is None:
        kind, kinds = str(checkpoint.description.get("kind")), [PREFIX + each for each in WORLD_MODELS.names()]
        raise CheckpointError(f"{checkpoint.folder} contains '{kind}', not a world model.{did_you_mean(kind, kinds)}")
    return name


def load_world_model(folder: Path, device: torch.device | str = "cpu") -> LearnedModel:
    """Load a `LearnedModel`; raises CheckpointError when it is missing, corrupt, of another kind, or its weights do not
    match.
    """
    checkpoint = Checkpoint.open(folder)
    folder = checkpoint.folder
    description = checkpoint.description
    name = _kind_in(checkpoint)
    require_format(folder, description)
    model_kind = WORLD_MODELS.saved(name, folder)
    weights = load_weights(folder, device)
    with restoring(folder, "a world model"):
        spec = WorldSpec.from_json(description["spec"])
        try:
            model: LearnedModel = model_kind.restore(description["model"], spec, weights)
        except CheckpointError as error:  # of a part that the description names
            raise CheckpointError(f"{folder}: {error}") from error
    remember_described(model, description, folder / "config.json")
    return read_weights(model, folder, device, weights).eval()


class Described[Configuration](nn.Module):
    """A part of a `LearnedModel`: describes its construction, and rebuilds the model from the description.

    success_bonus: the reward for reaching success. The structure is stored in buffers (`register_structure`), by the
    model itself or one of its parts.
    """

    configuration: type[Configuration]
    config: Configuration

    def __init__(
        self, config: Configuration, spec: WorldSpec, structure: StateStructure, success_bonus: float, seed: int = 0
    ):
        super().__init__()
        self.config, self.success_bonus = config, success_bonus

    def description(self) -> dict[str, Any]:
        """Return the inputs that `restore` needs in addition to spec and weights."""
        return {"config": to_plain(self.config), "success_bonus": self.success_bonus}

    @classmethod
    def restore(cls, description: Mapping[str, Any], spec: WorldSpec, weights: Mapping[str, Tensor]) -> Self:
        """Return a model into which `weights` can be loaded.

        weights: name -> [...], as `state_dict` returns them; only the structure is read. Raises the errors of
        `LearnedModel.restore`.
        """
        config = saved_configuration(cls.configuration, description)
        return cls(config, spec, structure_in(weights), description["success_bonus"])
