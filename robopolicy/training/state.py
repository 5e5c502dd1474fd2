"""Trainer state: saving, loading, and checks that a resumed run matches."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from robopolicy.core.arrays import is_mapping
from robopolicy.core.errors import CheckpointError, ConfigError
from robopolicy.core.storage import recover_folder, remove_leftovers, write_folder_atomic
from robopolicy.core.tensors import Tree, load_tree, save_tree

_NAME = "trainer"


def save_trainer(folder: Path, tree: Tree) -> None:
    """Write the trainer's state to `folder`, atomically."""
    write_folder_atomic(folder, lambda inside: save_tree(inside, _NAME, tree))


def load_trainer(folder: Path) -> dict[str, Any] | None:
    """Load the trainer's state, or return None when there is none; removes the remains of an interrupted save."""
    if folder.parent.is_dir():
        remove_leftovers(folder.parent, folder.name)
    folder = recover_folder(folder)
    return load_tree(folder, _NAME) if folder.exists() else None


def require_same_parts(saved: Tree, current: Tree, folder: Path) -> None:
    """Raise CheckpointError unless the state in `folder` has the parts that this version needs to resume."""
    if saved.keys() != current.keys():
        parts = ", ".join(sorted(set(saved) ^ set(current)))
        raise CheckpointError(
            f"{folder} was written by another version (differences: {parts}). Resume with that version, or start "
            "over with run.overwrite=true."
        )


def require_same_config(saved: Mapping[str, Any], current: Mapping[str, Any], may_change: Sequence[str]) -> None:
    """Raise ConfigError naming the keys in which a resumed run differs, except those that may change."""
    keys = (set(saved) | set(current)) - set(may_change)
    changed_keys = sorted(key for key in keys if saved.get(key) != current.get(key))
    if changed_keys:
        text = ", ".join(f"{key} was {saved.get(key)!r}, now {current.get(key)!r}" for key in changed_keys)
        raise ConfigError(
            f"This run was started with other settings ({text}). Use a new run name, or restore these settings."
        )


def on_device(tree: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Move nested mappings with their tensors [...] to `device`; tensors loaded from a file are on the CPU."""

    def moved(value: Any) -> Any:
        if is_mapping(value):
            return on_device(value, device)
        return value.to(device) if isinstance(value, Tensor) else value

    return {key: moved(value) for key, value in tree.items()}
