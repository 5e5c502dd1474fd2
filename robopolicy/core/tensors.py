"""Save nested tensors (safetensors for numbers, JSON for the rest, no pickles), and pass them on as numpy arrays."""

import hashlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from robopolicy.core.arrays import Array, is_mapping, is_sequence
from robopolicy.core.errors import CheckpointError
from robopolicy.core.storage import read_errors, read_object, storage_errors, write_json

Tree = Mapping[str, Any]
"""Nested mappings with string keys whose leaves are tensors or JSON values."""
_BFLOAT16 = "__bfloat16__"
"""Key of a bfloat16 tensor passed as integers; numpy has no such type."""
_HASH = "__sha256__"
"""Key, in the JSON file of a tree, of the hash of its tensor file."""


def save_tree(folder: Path, name: str, tree: Tree) -> None:
    """Write `tree` into `folder` as `<name>.safetensors` and `<name>.json`, which stores the hash of the former."""
    tensors: dict[str, Tensor] = {}
    skeleton = split_tree(tree, "", tensors)
    with storage_errors(folder):
        path = Path(folder) / f"{name}.safetensors"
        save_file(tensors, path)
        write_json(Path(folder) / f"{name}.json", {_HASH: file_hash(path), **skeleton})


def load_tree(folder: Path, name: str, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Read a tree written by `save_tree`; raises `CheckpointError` naming a missing or corrupt file."""
    path, described = Path(folder) / f"{name}.safetensors", Path(folder) / f"{name}.json"
    skeleton = read_object(described)
    require_hash(path, skeleton.get(_HASH), described.name)
    tensors = load_tensors(path, device)

    with read_errors(described, failure=CheckpointError):
        return join_tree({key: value for key, value in skeleton.items() if key != _HASH}, tensors, path, described)


# Not inside what calls them: a local function that calls itself is a reference cycle, which keeps a whole checkpoint's
# tensors until Python's collector comes round.
def split_tree(node: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Move the tensors [...] of a tree to `tensors`, keyed by path, and return the rest."""
    if isinstance(node, Tensor):
        tensors[path] = node.detach().cpu().contiguous().clone()
        return {"__tensor__": path}
    if is_mapping(node):
        inner = ((str(key), value) for key, value in node.items())
        return {key: split_tree(value, f"{path}/{key}" if path else key, tensors) for key, value in inner}
    return node


def join_tree(node: Any, tensors: Mapping[str, Tensor], path: object, described: object) -> Any:
    """Insert tensors [...] where `split_tree` removed them; path, described: names of both parts.

    Raises CheckpointError when a tensor is missing.
    """
    if is_mapping(node):
        if set(node) == {"__tensor__"}:
            if node["__tensor__"] not in tensors:
                raise CheckpointError(f"{path} lacks '{node['__tensor__']}', which {described} refers to.")
            return tensors[node["__tensor__"]]
        return {key: join_tree(value, tensors, path, described) for key, value in node.items()}
    return node


def to_arrays(tree: Any) -> Any:
    """Return a tree with its tensors [...] as numpy arrays, which other processes receive without copies of torch's."""
    if isinstance(tree, Tensor):
        plain = tree.detach().cpu().contiguous()
        if plain.dtype == torch.bfloat16:
            return {_BFLOAT16: to_arrays(plain.view(torch.int16))}
        return cast(Array, plain.numpy())  # pyright: ignore[reportUnknownMemberType]
    if is_mapping(tree):
        return {key: to_arrays(value) for key, value in tree.items()}
    return tree


def to_tensors(tree: Any, device: torch.device | str = "cpu") -> Any:
    """Return a tree with its numpy arrays [...] as tensors on `device`; reverses `to_arrays`."""
    if isinstance(tree, np.ndarray):  # torch warns about arrays that it cannot write to
        return torch.as_tensor(np.require(cast(Array, tree), requirements=["W"])).to(device)
    if isinstance(tree, Tensor):
        return tree.to(device)
    if is_mapping(tree):
        if set(tree) == {_BFLOAT16}:
            return to_tensors(tree[_BFLOAT16], device).view(torch.bfloat16)
        return {key: to_tensors(value, device) for key, value in tree.items()}
    return tree


def bytes_of(tree: Any) -> int:
    """Return the bytes of all arrays and tensors in a tree; nested lists are counted as well."""
    if isinstance(tree, np.ndarray | Tensor):
        return int(tree.nbytes)
    if is_mapping(tree):
        return sum(bytes_of(value) for value in tree.values())
    return sum(bytes_of(value) for value in tree) if is_sequence(tree) else 0


def load_tensors(path: Path, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Read a safetensors file as name -> tensor [...] with saved dtypes; raises `CheckpointError` naming it."""
    if not Path(path).is_file():
        raise CheckpointError(f"{path} does not exist. A checkpoint folder contains config.json and safetensors files.")
    try:
        return load_file(path, device=str(device))
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is corrupt ({error}). Restore it from a copy or train again.") from error


def tensor_elements(path: Path) -> int:
    """Return the number of elements in a safetensors file, read from its header; raises as `load_tensors` does."""
    try:
        with cast(Callable[..., Any], safe_open)(path, "pt") as file:
            return sum(math.prod(file.get_slice(name).get_shape()) for name in list[str](file.keys()))
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is corrupt ({error}). Restore it from a copy or train again.") from error


def tensor_dtypes(path: Path) -> dict[str, torch.dtype]:
    """Return name -> dtype of the tensors in a safetensors file, read from its header; raises as `load_tensors`
    does.
    """
    try:
        with cast(Callable[..., Any], safe_open)(path, "pt") as file:
            return {name: _DTYPES[file.get_slice(name).get_dtype()] for name in list[str](file.keys())}
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} is corrupt ({error}). Restore it from a copy or train again.") from error


_DTYPES = {
    "BOOL": torch.bool,
    **{f"F{bits}": getattr(torch, f"float{bits}") for bits in (16, 32, 64)},
    **{f"I{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"U{bits}": getattr(torch, f"uint{bits}") for bits in (8, 16, 32, 64)},
    "BF16": torch.bfloat16,
}
"""safetensors dtype names -> torch dtypes."""


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal; reading dominates the time (0.07 s for 100 MB)."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_hash(path: Path, expected: object, where: str) -> None:
    """Raise CheckpointError, naming the file, if its hash differs from the expected one stored in file `where`.

    Expected is None for files older than the hashes. A missing file is reported by the function that reads it.
    """
    if expected is None or not Path(path).is_file():
        return
    if file_hash(path) != expected:
        raise CheckpointError(
            f"{path} is not the file that was saved with {where} next to it: its SHA-256 differs. It was damaged or "
            "replaced: restore both from a copy, or train again (if you changed it on purpose, remove the hash from "
            f"{where})."
        )
