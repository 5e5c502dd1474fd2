"""Saving and loading world models: config.json says what it is, safetensors hold the weights; nothing is pickled."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from robopolicy.core.errors import CheckpointError, did_you_mean
from robopolicy.core.spec import Field, WorldSpec
from robopolicy.core.storage import read_json, recover_folder, storage_errors, write_folder_atomic, write_json
from robopolicy.core.structured import to_plain
from robopolicy.core.tensors import load_tensors
from worldmodels.protocol import LearnedModel

FORMAT = 2
PREFIX = "world_model/"
KINDS = {
    "ensemble": ("worldmodels.ensemble", "EnsembleModel"),
    "rssm": ("worldmodels.rssm.model", "RssmModel"),
    "joint": ("worldmodels.joint", "JointModel"),
    "pixel_diffusion": ("worldmodels.pixel_diffusion.model", "PixelDiffusionModel"),
    "video": ("worldmodels.video.model", "VideoModel"),
}
"""Kind of model -> (module, class); imported when one is built or loaded."""


def model_class(kind: str) -> type[LearnedModel]:
    """Return the class of a kind of world model."""
    module, name = KINDS[kind]
    return getattr(importlib.import_module(module), name)


def save_world_model(model: Any, folder: Path) -> None:
    """Write a `LearnedModel` to `folder`, atomically."""
    from safetensors.torch import save_file

    kinds = {name: kind for kind, (_, name) in KINDS.items()}
    description = {
        "kind": PREFIX + kinds[type(model).__name__],
        "format": FORMAT,
        "spec": _spec_to_json(model.spec if isinstance(model.spec, WorldSpec) else model.world),
        "model": model.description(),
    }

    def fill(inside: Path) -> None:
        weights = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
        with storage_errors(inside):
            save_file(weights, inside / "model.safetensors")
            write_json(inside / "config.json", description)

    write_folder_atomic(folder, fill)


def kind_of(folder: Path) -> str:
    """Return the kind of the world model in `folder`, or raise CheckpointError if there is none."""
    return _described(recover_folder(folder))[0]


def holds(folder: Path, kind: str) -> bool:
    """Return whether `folder` holds a world model of this kind; CheckpointError where it holds nothing."""
    description = read_json(recover_folder(folder) / "config.json")
    return isinstance(description, Mapping) and description.get("kind") == PREFIX + kind


def _described(folder: Path) -> tuple[str, Mapping[str, Any]]:
    """Return kind and description of the world model in `folder`."""
    description = read_json(folder / "config.json")
    kind = str(description.get("kind")) if isinstance(description, Mapping) else ""
    if kind.removeprefix(PREFIX) not in KINDS or not kind.startswith(PREFIX):
        known = [PREFIX + name for name in KINDS]
        raise CheckpointError(f"{folder} holds '{kind}', not a world model.{did_you_mean(kind, known)}")
    return kind.removeprefix(PREFIX), description


def load_world_model(folder: Path, device: torch.device | str = "cpu") -> Any:
    """Load a `LearnedModel`, or raise CheckpointError: missing, corrupt, another kind, or weights that do not fit."""
    folder = recover_folder(folder)
    kind, description = _described(folder)
    if description["format"] != FORMAT:
        raise CheckpointError(
            f"{folder} has format {description['format']}, this version reads {FORMAT}: train the world model again."
        )
    weights = load_tensors(folder / "model.safetensors", device)
    try:
        spec = _spec_from_json(description["spec"])
        model: Any = model_class(kind).restore(description["model"], spec, weights)
        model.load_state_dict(weights, strict=True)
    except (KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"{folder} does not fit together: {error}. Restore it from a copy or train again."
        ) from error
    return model.to(device).eval()


def _spec_to_json(spec: WorldSpec) -> dict[str, Any]:
    fields = {key: field.to_json() for key, field in spec.observation.items()}
    others = {key: value for key, value in spec.__dict__.items() if key not in ("observation", "action")}
    return {**to_plain(others), "observation": fields, "action": spec.action.to_json()}


def _spec_from_json(data: Mapping[str, Any]) -> WorldSpec:
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
    fields = {key: Field.from_json(value) for key, value in data["observation"].items()}
    return WorldSpec(**{**values, "observation": fields, "action": Field.from_json(data["action"])})
