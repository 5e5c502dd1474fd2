"""The files that a run's outcome depends on beside its settings: checkpoints, and code that the user writes."""

import importlib.util
from pathlib import Path

from robopolicy.core.registry import add_working_folder, is_dotted
from robopolicy.core.tensors import file_hash


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


def hashes(checkpoint: Path) -> dict[str, str]:
    """Return the hash of every file in a folder, by its path there."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    return {str(path.relative_to(checkpoint)): file_hash(path) for path in files}
