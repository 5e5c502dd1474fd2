"""Checkpoints of modules: a folder with config.json, which says what it is, and model.safetensors, its weights.

Policies and world models are written and read here; which class a checkpoint needs is theirs to find.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from robopolicy.core.errors import CheckpointError, ConfigError
from robopolicy.core.modules import Module, Weights
from robopolicy.core.storage import read_json, storage_errors, write_folder_atomic, write_json
from robopolicy.core.tensors import load_tensors

FORMAT = 2
"""Of checkpoints: a change that older versions cannot read takes the next number."""


def write_checkpoint(
    folder: Path, description: Mapping[str, Any], module: Weights, more: Callable[[Path], None] | None = None
) -> None:
    """Write `description` and the weights of `module` to `folder`, atomically.

    description: JSON with at least "kind", what the class is found by; more: writes further files into the folder that
    it is given. Raises StorageError where the folder cannot be written.
    """
    tensors = {name: value.detach().cpu().contiguous() for name, value in module.state_dict().items()}

    def fill(inside: Path) -> None:
        write_json(inside / "config.json", {"kind": description["kind"], "format": FORMAT, **description})
        with storage_errors(inside):
            save_file(tensors, inside / "model.safetensors")
            if more is not None:
                more(inside)

    write_folder_atomic(Path(folder), fill)


def read_description(folder: Path) -> Mapping[str, Any]:
    """Return what config.json in `folder` says, {} where it is no JSON object; raises CheckpointError."""
    found = read_json(Path(folder) / "config.json")
    return cast(Mapping[str, Any], found) if isinstance(found, Mapping) else {}


def require_format(folder: Path, description: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless this version reads the format of the checkpoint in `folder`."""
    if description.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder} has format {description.get('format')}, this version reads {FORMAT}: use the version of "
            "robopolicy that wrote it, or train again."
        )


@contextmanager
def restoring(folder: Path, what: str) -> Generator[None, None, None]:
    """Let what fails while `what` is made from config.json be a CheckpointError that says so."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError, OSError, ConfigError) as error:
        raise CheckpointError(f"{folder / 'config.json'} does not describe {what}: {error!r}.") from error


def read_weights[Trained: Module](
    module: Trained, folder: Path, device: torch.device | str = "cpu", tensors: Mapping[str, Tensor] | None = None
) -> Trained:
    """Return `module` on `device` with the weights in `folder`; tensors: where they are read already, name -> [...].

    Raises CheckpointError unless all of them fit.
    """
    path = Path(folder) / "model.safetensors"
    try:
        module.load_state_dict(load_tensors(path) if tensors is None else tensors)
    except RuntimeError as error:
        raise CheckpointError(f"{path} does not match its config.json: {error}. Restore both from a copy.") from error
    return module.to(device)
