"""The files that a run's outcome depends on beside its settings: checkpoints, and code that the user writes."""

import importlib.util
from pathlib import Path

from robopolicy.core.checkpoints import WEIGHTS
from robopolicy.core.registry import add_working_folder, is_dotted
from robopolicy.core.tensors import file_hash
from robopolicy.policies.loading import checkpoint_in


def source_of(name: str) -> Path | None:
    """Return the file of a dotted path's module, or the file that `name` is; None for what is registered."""
    if not is_dotted(name):
        return Path(name) if name and Path(name).is_file() else None
    add_working_folder()
    try:
        found = importlib.util.find_spec(name.partition(":")[0])
    except (ImportError, ValueError):  # who builds it says what is missing
        return None
    return None if found is None or found.origin is None or not Path(found.origin).is_file() else Path(found.origin)


def began_from(checkpoint: Path) -> dict[str, str]:
    """Return what a result says of the checkpoint that a run began from: where it lay, and the hash of its weights."""
    weights = checkpoint_in(checkpoint) / WEIGHTS
    told = {"base_checkpoint": str(checkpoint)}
    return {**told, "base_weights": file_hash(weights)} if weights.is_file() else told


def hashes(checkpoint: Path) -> dict[str, str]:
    """Return the hash of every file in a folder, by its path there."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    return {str(path.relative_to(checkpoint)): file_hash(path) for path in files}
