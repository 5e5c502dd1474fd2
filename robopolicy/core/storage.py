"""Files that are either whole or absent: atomic writes of files and folders."""

import errno
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from robopolicy.core.errors import CheckpointError, DataError, StorageError

_TEMPORARY = re.compile(r"\..+\.[a-z0-9_]{8}")
"""Names that `tempfile` gives with a prefix ".NAME."."""


@contextmanager
def storage_errors(path: Path) -> Generator[None, None, None]:
    """Turn operating-system write failures under `path` into a `StorageError` that names the way out."""
    try:
        yield
    except SafetensorError as error:
        if f"os error {errno.ENOSPC}" in str(error):
            raise StorageError(f"No space left while writing {path}. Free some and run it again.") from error
        raise StorageError(f"Could not write {path}: {error}. Free some space or choose another folder.") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageError(f"No space left while writing {path}. Free some and run it again.") from error
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            raise StorageError(f"{path} is not writable. Choose another folder with run.root=FOLDER.") from error
        if error.errno in (errno.ENOTDIR, errno.EEXIST):
            raise StorageError(
                f"{path} cannot be made: a file of that name, or of one above it, is in the way."
            ) from error
        raise


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write `data` to `path` through a temporary file in the same folder: a crash leaves the old or the new one."""
    path = Path(path)
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data.encode() if isinstance(data, str) else data)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).chmod(0o644)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def sweep(folder: Path, name: str = "") -> None:
    """Remove what a killed `write_atomic` or `write_folder_atomic` left in `folder`; nobody else may write there.

    A folder NAME.old is what `write_folder_atomic` put aside: it goes where NAME is in place, and back where it is not.
    name: of the only file or folder whose remains are removed.
    """
    for item in sorted(folder.iterdir()):
        if name and not item.name.startswith((f".{name}.", f"{name}.old")):
            continue
        aside = item.name.endswith(".old") and item.is_dir() and not item.is_symlink()
        if aside and recover_folder(item.with_suffix("")).is_dir():
            shutil.rmtree(item, ignore_errors=True)
        elif _TEMPORARY.fullmatch(item.name):
            if item.is_dir() and not item.is_symlink():
                shutil.rmtree(item, ignore_errors=True)
            else:
                item.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically; NaN and infinity are refused (they are not JSON)."""
    write_atomic(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read JSON, or raise `CheckpointError` naming the file."""
    try:
        return json.loads(Path(path).read_text())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist. Is this the folder you meant?") from error
    except NotADirectoryError as error:
        raise CheckpointError(
            f"{Path(path).parent} is a file; a checkpoint is a folder with config.json and model.safetensors. Pickled "
            "files (.pt, .ckpt, .pkl) are never read: they can run any code."
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is corrupt ({error}). Restore it from a copy or train again.") from error


def read_json_lines(path: Path) -> list[Any]:
    """Read one JSON value a line, none of a file that is not there; raises DataError for a line that is not JSON.

    A last one that is not was half written when its process was killed, and is left out.
    """
    if not path.exists():
        return []
    found: list[Any] = []
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise DataError(f"{path} line {number} is not JSON: {error}.") from error
    return found


def write_folder_atomic(folder: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write a temporary sibling, then swap it in: a crash leaves the old folder or the new one.

    A crash between the two renames leaves `folder.old`; `recover_folder` (called by the readers) puts it back.
    """
    folder = Path(folder)
    with storage_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
        try:
            temporary.chmod(0o755)
            fill(temporary)
            replace_folder(temporary, folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def replace_folder(new: Path, folder: Path) -> None:
    """Put the folder `new` in the place of `folder`, which may exist; a crash may leave `folder.old` as well."""
    old = folder.with_name(folder.name + ".old")
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.rename(folder, old)
    os.rename(new, folder)
    shutil.rmtree(old, ignore_errors=True)


def recover_folder(folder: Path) -> Path:
    """Return `folder`, first putting back the copy that a crash in `write_folder_atomic` may have left beside it."""
    folder = Path(folder)
    old = folder.with_name(folder.name + ".old")
    if not folder.exists() and old.exists():
        os.rename(old, folder)
    return folder
