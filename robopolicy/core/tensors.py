"""Nested tensors as files: safetensors for the numbers, JSON for the rest (no pickles)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from robopolicy.core.errors import CheckpointError
from robopolicy.core.narrowing import is_mapping
from robopolicy.core.storage import read_json, storage_errors, write_json

Tree = Mapping[str, Any]
"""Nested mappings with string keys whose leaves are tensors or JSON values."""


def save_tree(folder: Path, name: str, tree: Tree) -> None:
    """Write `tree` into `folder` as `<name>.safetensors` and `<name>.json`."""
    tensors: dict[str, Tensor] = {}

    def split(node: Any, path: str) -> Any:
        if isinstance(node, Tensor):
            tensors[path] = node.detach().cpu().contiguous().clone()
            return {"__tensor__": path}
        if is_mapping(node):
            return {str(key): split(value, f"{path}/{key}" if path else str(key)) for key, value in node.items()}
        return node

    skeleton = split(tree, "")
    with storage_errors(folder):
        save_file(tensors, Path(folder) / f"{name}.safetensors")
        write_json(Path(folder) / f"{name}.json", skeleton)


def load_tree(folder: Path, name: str, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Read what `save_tree` wrote, or raise `CheckpointError` naming the file that is missing or corrupt."""
    tensors = load_tensors(Path(folder) / f"{name}.safetensors", device)

    def join(node: Any) -> Any:
        if is_mapping(node):
            if set(node) == {"__tensor__"}:
                return tensors[node["__tensor__"]]
            return {key: join(value) for key, value in node.items()}
        return node

    return join(read_json(Path(folder) / f"{name}.json"))


def load_tensors(path: Path, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Read a safetensors file, name -> tensor [...] as it was saved, or raise `CheckpointError` naming it."""
    if not Path(path).is_file():
        raise CheckpointError(f"{path} does not exist. A checkpoint folder holds config.json and safetensors files.")
    try:
        return load_file(path, device=str(device))
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is corrupt ({error}). Restore it from a copy or train again.") from error
