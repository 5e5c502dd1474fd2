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

from robopolicy.core.allowance import Allowance
from robopolicy.core.errors import CheckpointError, RobopolicyError
from robopolicy.core.modules import Module, Weights
from robopolicy.core.storage import read_json, storage_errors, write_folder_atomic, write_json
from robopolicy.core.tensors import file_hash, load_tensors, require_hash

FORMAT = 2
"""Of checkpoints: a change that older versions cannot read takes the next number."""
WEIGHTS = "model.safetensors"
HASH = "sha256"
"""The key of config.json under which the hash of the weights file stands; older checkpoints lack it."""


def write_checkpoint(
    folder: Path, description: Mapping[str, Any], module: Weights, more: Callable[[Path], None] | None = None
) -> None:
    """Write `description` and the weights of `module` to `folder`, atomically, with the hash of the weights file.

    description: JSON with at least "kind", what the class is found by; more: writes further files into the folder that
    it is given. Raises StorageError where the folder cannot be written.
    """
    tensors = {name: value.detach().cpu().contiguous() for name, value in module.state_dict().items()}

    def fill(inside: Path) -> None:
        with storage_errors(inside):
            save_file(tensors, inside / WEIGHTS)
            known = {"kind": description["kind"], "format": FORMAT, HASH: file_hash(inside / WEIGHTS)}
            write_json(inside / "config.json", {**known, **description})
            if more is not None:
                more(inside)

    write_folder_atomic(Path(folder), fill)


def read_description(folder: Path) -> Mapping[str, Any]:
    """Return what config.json in `folder` says, {} where it is no JSON object.

    Raises CheckpointError on what is no JSON, or where its kind is no text.
    """
    path = Path(folder) / "config.json"
    found = read_json(path)
    if not isinstance(found, Mapping):
        return {}
    description = cast(Mapping[str, Any], found)
    if not isinstance(description.get("kind", ""), str):
        raise CheckpointError(f"{path} is corrupt: its kind is a {type(description['kind']).__name__}, not text.")
    return description


def require_format(folder: Path, description: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless this version reads the format of the checkpoint in `folder`."""
    if description.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder} has format {_short(description.get('format'))}, this version reads {FORMAT}: use the version of "
            "robopolicy that wrote it, or train again."
        )


@contextmanager
def restoring(folder: Path, what: str) -> Generator[None, None, None]:
    """Let what fails while `what` is made from config.json be a CheckpointError that says so, in one line.

    A description comes from outside: it may ask for little more memory than the weights beside it fill (`Allowance`).
    """
    weights = Path(folder) / WEIGHTS
    # A float32 of the file is 4 bytes, so bytes are 4 times its elements: room for copies that are overwritten later
    size = weights.stat().st_size if weights.is_file() else 0
    try:
        with Allowance(size):
            yield
    except CheckpointError:  # of a part, which says what it needs
        raise
    except Exception as error:  # whatever a constructor does with numbers and texts that nobody has checked
        reason = _short(error)
        raise CheckpointError(f"{Path(folder) / 'config.json'} does not describe {what}: {reason}.") from error


def load_weights(folder: Path, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Read the weights in `folder`, name -> tensor [...] as it was saved.

    Raises CheckpointError where the file is missing, corrupt, or not the one that config.json was written with; a
    config.json without a hash, from before there was one, is believed.
    """
    path = Path(folder) / WEIGHTS
    require_hash(path, read_description(folder).get(HASH), "config.json")
    return load_tensors(path, device)


def read_weights[Trained: Module](
    module: Trained, folder: Path, device: torch.device | str = "cpu", tensors: Mapping[str, Tensor] | None = None
) -> Trained:
    """Return `module` on `device` with the weights in `folder`; tensors: where they are read already, name -> [...].

    Raises CheckpointError unless all of them fit and, where they are read here, as `load_weights` does.
    """
    weights = load_weights(folder) if tensors is None else tensors
    try:
        module.load_state_dict(weights)
    except RuntimeError as error:
        raise CheckpointError(
            f"{Path(folder) / WEIGHTS} does not match its config.json: {_short(error, 1000)}. Restore both from a copy."
        ) from error
    return module.to(device)


def _short(value: object, length: int = 300) -> str:
    """Return `value` as one line of at most so many characters; an error's text, with its type where that is needed."""
    try:
        text = " ".join(str(value).split())
    except RecursionError:
        text = f"a {type(value).__name__} nested without end"
    if isinstance(value, Exception) and not isinstance(value, RobopolicyError | RuntimeError):
        text = f"{type(value).__name__}: {text}"
    return (text if len(text) <= length else f"{text[:length]} ...").removesuffix(".")
