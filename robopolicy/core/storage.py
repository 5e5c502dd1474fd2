"""Atomic file and folder writes (complete or absent), and paths of packaged files."""

import errno
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from robopolicy.core.arrays import is_mapping
from robopolicy.core.errors import CheckpointError, DataError, RobopolicyError, StorageError, in_one_line
from robopolicy.core.file_types import describe_path
from robopolicy.core.former_names import keep_former_names

LARGEST_TEXT = 2**24
"""Maximum bytes of a parsed JSON or YAML file; its content takes a hundred times as much memory."""
_TEMPORARY = re.compile(r"\.(.+)\.robopolicy-[a-z0-9_]{8}\.tmp")
"""Name pattern of temporary files; unique to this module, so matching files may be removed."""
_OLD = re.compile(r"\.(.+)\.robopolicy-old")
"""Name pattern of folders moved aside until their replacement is in place."""
_PACKAGE = Path(__file__).resolve().parents[1]
_LONGEST_NAME = 200
"""Maximum characters of a file name repeated in its temporary name: systems allow 255 in total."""


@contextmanager
def storage_errors(path: Path) -> Generator[None, None, None]:
    """Convert operating-system write failures under `path` into a `StorageError` that names the remedy."""
    try:
        yield
    except SafetensorError as error:
        if f"os error {errno.ENOSPC}" in str(error):
            raise StorageError(
                f"No space left while writing {path}. Free some space and run the command again."
            ) from error
        raise StorageError(f"Could not write {path}: {error}. Free some space or choose another folder.") from error
    except OSError as error:
        raise StorageError(write_failure(path, error)) from error


def write_failure(path: object, error: OSError) -> str:
    """Return the reason why `path` could not be written and the remedy, in one sentence."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"No space left while writing {path}. Free some space and run the command again."
    if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
        return f"{path} is not writable. Choose another folder with run.root=FOLDER."
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return f"{path} cannot be created: it or one of its parent folders exists as a file."
    if error.errno == errno.EFBIG:
        return (
            f"{path} exceeds the file size that the file system or a limit of this shell (ulimit -f) allows. Choose "
            "another folder with run.root=FOLDER, or raise the limit, and run the command again."
        )
    return f"{path} could not be written ({error.strerror or error}). Choose another folder with run.root=FOLDER."


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write `data` to `path` through a temporary file in the same folder, so that a crash leaves the old or the new
    file.
    """
    path = Path(path)
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(*_temporary(path.name), path.parent)
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


def _temporary(name: str) -> tuple[str, str]:
    """Return suffix and prefix of the temporary file for `name`."""
    return ".tmp", f".{name[:_LONGEST_NAME]}.robopolicy-"


def require_writable(path: Path) -> None:
    """Raise StorageError unless `write_atomic` could write `path`; call it before work whose results are saved
    there.
    """
    path = Path(path)
    if os.path.lexists(path) and not path.is_file():
        raise StorageError(f"{path} is not a regular file and cannot be replaced: choose another path.")
    try:
        with suppress(FileNotFoundError):
            path.lstat()  # refuses names that are too long
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(*_temporary(path.name), path.parent)
        os.close(handle)
        Path(temporary).unlink()
    except OSError as error:
        raise StorageError(f"{path} cannot be written ({error.strerror or error}): choose another path.") from error


def remove_leftovers(folder: Path, name: str = "") -> None:
    """Remove leftovers of a killed `write_atomic` or `write_folder_atomic` from `folder`; no other process may write
    there.

    A folder moved aside by `write_folder_atomic` is removed if its replacement exists and restored otherwise. name:
    restricts the cleanup to this file or folder.
    """
    for item in sorted(folder.iterdir()):
        old, temporary = _OLD.fullmatch(item.name), _TEMPORARY.fullmatch(item.name)
        if old and name in ("", old[1]):
            if recover_folder(folder / old[1]).is_dir():
                _remove(item)
        elif temporary and name[:_LONGEST_NAME] in ("", temporary[1]):
            _remove(item)


def _remove(path: Path) -> None:
    """Remove a file, link or folder if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON atomically; NaN and infinity are rejected because they are not JSON."""
    write_atomic(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_text(path: Path, failure: type[RobopolicyError] = CheckpointError, limit: int | None = LARGEST_TEXT) -> str:
    """Read the text of a regular file of at most `limit` bytes (None: any size), or raise `failure` naming it.

    Pipes and devices are rejected, because reading them may never end.
    """
    path = Path(path)
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise failure(f"{path} is a {'folder' if path.is_dir() else 'pipe or device'}, not a file.")
        with open(path, "rb") as file:
            data = file.read() if limit is None else file.read(limit + 1)
        if limit is not None and len(data) > limit:
            raise failure(
                f"{path} is larger than {limit} bytes, more than any valid file of this kind: it is not read."
            )
        return data.decode()
    except FileNotFoundError as error:
        if description := describe_path(path.parent):
            raise failure(
                f"{path.parent} has no {path.name}: it is {description}. Is this the folder you meant?"
            ) from error
        raise failure(f"{path} does not exist. Check the path of the folder.") from error
    except NotADirectoryError as error:
        raise failure(
            f"{path.parent} is a file; a checkpoint is a folder with config.json and model.safetensors. Pickled "
            "files (.pt, .ckpt, .pkl) are never read, because they can run any code."
        ) from error
    except OSError as error:
        raise failure(f"{path} cannot be read ({error.strerror or error}).") from error
    except ValueError as error:  # no UTF-8, or no path
        raise failure(f"{path} is corrupt ({error}). Restore it from a copy or train again.") from error


def read_json(path: Path, failure: type[RobopolicyError] = CheckpointError) -> Any:
    """Read JSON, or raise `failure` naming the file."""
    text = read_text(path, failure)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise failure(f"{path} is corrupt ({error}). Restore it from a copy or train again.") from error


def read_object(path: Path, failure: type[RobopolicyError] = CheckpointError) -> dict[str, Any]:
    """Read a JSON object, or raise `failure` naming the file."""
    content = read_json(path, failure)
    if not is_mapping(content):
        raise failure(
            f"{path} is corrupt: it contains a {type(content).__name__} instead of an object. Restore it from a copy."
        )
    return dict(content)


@contextmanager
def read_errors(
    path: Path, way_out: str = "Restore it from a copy", failure: type[RobopolicyError] = DataError
) -> Generator[None, None, None]:
    """Convert any error while reading or parsing `path` into a one-line `failure`.

    The file is untrusted input and may trigger errors in any constructor or library.
    """
    try:
        yield
    except RobopolicyError:
        raise
    except MemoryError as error:
        raise failure(f"Reading {path} needs more memory than is available ({in_one_line(error, 100)}).") from error
    except Exception as error:  # whatever is done with values that nobody has checked
        raise failure(f"{path} cannot be read ({in_one_line(error)}). {way_out}.") from error


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read one JSON object per line; empty for a missing file. Raises DataError on an invalid line.

    An invalid last line was half written by a killed process and is ignored.
    """
    if not path.exists():
        return []
    records: list[dict[str, Any]] = []
    lines = read_text(path, DataError, limit=None).splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            record: Any = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                break
            raise DataError(f"{path} line {number} is not JSON: {error}.") from error
        if not is_mapping(record):
            raise DataError(f"{path} line {number} is a JSON {type(record).__name__}, not an object.")
        records.append(dict(record))
    return records


def write_folder_atomic(folder: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write a temporary sibling, then swap it in, so that a crash leaves the old or the new folder.

    A crash between the two renames leaves the old folder moved aside; `recover_folder` (called by the readers) restores
    it.
    """
    folder = Path(folder)
    with storage_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(*_temporary(folder.name), folder.parent))
        try:
            temporary.chmod(0o755)
            fill(temporary)
            replace_folder(temporary, folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def replace_folder(new: Path, folder: Path) -> None:
    """Replace `folder`, which may exist, by the folder `new`; a crash may leave the old one moved aside."""
    old = _aside(folder)
    if folder.exists():
        _remove(old)
        os.rename(folder, old)
    os.rename(new, folder)
    _remove(old)


def recover_folder(folder: Path) -> Path:
    """Return `folder`, after restoring a copy that a crash in `write_folder_atomic` may have left next to it.

    Earlier versions named that copy NAME.old, as users name backups. It is restored only if the folder .NAME.XXXXXXXX,
    left by the same crash, is next to it.
    """
    folder = Path(folder)
    if os.path.lexists(folder):
        return folder
    old, earlier = _aside(folder), folder.with_name(f"{folder.name}.old")
    if os.path.lexists(old):  # False, not an error, where the name is too long
        os.rename(old, folder)
    elif os.path.lexists(earlier):
        unfinished = re.compile(rf"\.{re.escape(folder.name)}\.[a-z0-9_]{{8}}")
        if any(unfinished.fullmatch(item.name) and item.is_dir() for item in folder.parent.iterdir()):
            os.rename(earlier, folder)
    return folder


def _aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.robopolicy-old")


def resource(kind: str, name: str = "") -> Path:
    """Return the path of a packaged file or folder; kind is "assets" or "configs".

    Raises FileNotFoundError if the installation lacks the folder of that kind; the file itself is not checked.
    """
    for root in (_PACKAGE.parent / kind, _PACKAGE / "resources" / kind):
        if root.is_dir():
            return root / name
    raise FileNotFoundError(f"The '{kind}' folder is missing from this installation: reinstall robopolicy.")


keep_former_names(__name__, {"sweep": "remove_leftovers", "unwritten": "write_failure", "reading": "read_errors"})
