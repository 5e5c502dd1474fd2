"""Saving and loading world models: config.json says what it is, safetensors hold the weights; nothing is pickled.

config.json names the kind of model that it needs. Built-in and installed kinds are found by that name; others only
where the user has named them too, so that a downloaded folder cannot choose what is imported.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from robopolicy.core.errors import CheckpointError, ConfigError, did_you_mean
from robopolicy.core.spec import WorldSpec
from robopolicy.core.storage import read_json, recover_folder, storage_errors, write_folder_atomic, write_json
from robopolicy.core.tensors import load_tensors
from worldmodels.protocol import LearnedModel
from worldmodels.registry import WORLD_MODELS

FORMAT = 2
PREFIX = "world_model/"


def save_world_model(model: LearnedModel, folder: Path) -> None:
    """Write a world model, an nn.Module, to `folder`, atomically."""
    from safetensors.torch import save_file

    description = {
        "kind": PREFIX + WORLD_MODELS.name_of(type(model)),
        "format": FORMAT,
        "spec": model.spec.to_json(),
        "model": model.description(),
    }
    weights = {name: value.detach().cpu().contiguous() for name, value in cast(nn.Module, model).state_dict().items()}

    def fill(inside: Path) -> None:
        with storage_errors(inside):
            save_file(weights, inside / "model.safetensors")
            write_json(inside / "config.json", description)

    write_folder_atomic(folder, fill)


def kind_of(folder: Path) -> str:
    """Return the kind of the world model in `folder`, or raise CheckpointError if there is none."""
    return _described(recover_folder(folder))[0]


def holds_world_model(folder: Path) -> bool:
    """Return whether `folder` holds a world model; CheckpointError where it holds nothing."""
    description = read_json(recover_folder(folder) / "config.json")
    kind = str(description.get("kind")) if isinstance(description, Mapping) else ""
    return kind.startswith(PREFIX) and (kind.removeprefix(PREFIX) in WORLD_MODELS or ":" in kind)


def _described(folder: Path) -> tuple[str, Mapping[str, Any]]:
    """Return kind and description of the world model in `folder`."""
    description = read_json(folder / "config.json")
    kind = str(description.get("kind")) if isinstance(description, Mapping) else ""
    name = kind.removeprefix(PREFIX)
    if not kind.startswith(PREFIX) or (name not in WORLD_MODELS and ":" not in name):
        known = [PREFIX + each for each in WORLD_MODELS.names()]
        raise CheckpointError(f"{folder} holds '{kind}', not a world model.{did_you_mean(kind, known)}")
    return name, description


def load_world_model(folder: Path, device: torch.device | str = "cpu") -> LearnedModel:
    """Load a `LearnedModel`, or raise CheckpointError: missing, corrupt, another kind, or weights that do not fit."""
    folder = recover_folder(folder)
    kind, description = _described(folder)
    if description["format"] != FORMAT:
        raise CheckpointError(
            f"{folder} has format {description['format']}, this version reads {FORMAT}: train the world model again."
        )
    made = WORLD_MODELS.saved(kind, folder)
    weights = load_tensors(folder / "model.safetensors", device)
    try:
        spec = WorldSpec.from_json(description["spec"])
        model: LearnedModel = made.restore(description["model"], spec, weights)
        model.load_state_dict(weights, strict=True)
    except CheckpointError as error:  # of a part that the description names
        raise CheckpointError(f"{folder}: {error}") from error
    except (KeyError, TypeError, RuntimeError, ConfigError) as error:
        raise CheckpointError(
            f"{folder} does not fit together: {error}. Restore it from a copy or train again."
        ) from error
    return model.to(device).eval()
