"""Describes the content of a path: the type of a file by its first bytes, or the content of a folder.

Error messages about an existing path that cannot be used name its type, instead of what is missing in it.
"""

import stat
import zipfile
from pathlib import Path

from robopolicy.core.former_names import keep_former_names

SIGNATURES = (
    (0, b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    (0, b"PAR1", "a parquet file"),
    (0, b"\x93NUMPY", "a NumPy array (.npy)"),
    (0, b"\x89PNG\r\n\x1a\n", "a PNG image"),
    (0, b"\xff\xd8\xff", "a JPEG image"),
    (0, b"\x1f\x8b", "a gzip archive"),
    (0, b"\xfd7zXZ\x00", "an xz archive"),
    (0, b"\x28\xb5\x2f\xfd", "a zstandard archive"),
    (4, b"ftyp", "an MP4 video"),
    (257, b"ustar", "a tar archive"),
)
"""Offset and bytes by which a file type is recognised, and its description."""
READ = 512
"""Bytes read from the start of a file: the last signature ends before."""
ZARR = (".zgroup", ".zarray", "zarr.json")
LISTED = 3
"""Number of names listed of a folder's content."""


def describe_path(path: Path) -> str:
    """Describe `path` as a noun phrase: "an HDF5 file", "an empty folder", "a folder with notes.txt".

    "" if nothing is there. Reads at most the start of a file; nothing is unpickled.
    """
    path = Path(path)
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            return _folder(path)
        return _file(path) if stat.S_ISREG(mode) else "a pipe or device"
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, zipfile.BadZipFile):
        return "a file that cannot be read"


def _folder(path: Path) -> str:
    names = sorted(item.name for item in path.iterdir())
    if not names:
        return "an empty folder"
    if (path / "meta/info.json").is_file():
        return "a LeRobotDataset"
    if any(mark in names for mark in ZARR):
        return "a zarr store"
    if (path / "checkpoint/config.json").is_file():
        return f"a run folder; its checkpoint is {path / 'checkpoint'}"
    if (path / "dataset/meta/info.json").is_file():
        return f"a run folder; its dataset is {path / 'dataset'}"
    if (path / "config.json").is_file():
        return "a checkpoint"
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"a folder with {', '.join(names[:LISTED])}{more}"


def _file(path: Path) -> str:
    with open(path, "rb") as file:
        start = file.read(READ)
    if not start:
        return "an empty file"
    for offset, signature, name in SIGNATURES:
        if start[offset : offset + len(signature)] == signature:
            return name
    if start.startswith(b"PK\x03\x04"):
        return _zip(path)
    if start[:1] == b"\x80" and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return "a pickle, which is never read: it can run any code"
    if path.suffix == ".safetensors" and start[8:9] == b"{":
        return "a safetensors file"
    try:
        text = start[: len(start) - 4 if len(start) == READ else None].decode()
    except UnicodeDecodeError:
        return "a file of unknown type"
    return "a JSON file" if text.lstrip()[:1] in ("{", "[") and path.suffix == ".json" else "a text file"


def _zip(path: Path) -> str:
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()[:1000]
    if any(name.endswith(".npy") for name in names):
        return "an .npz file"
    if any(Path(name).name in ZARR for name in names):
        return "a zarr store in a zip archive"
    if any(Path(name).name == "data.pkl" for name in names):
        return "a PyTorch file, which holds a pickle and is never read: it can run any code"
    return "a zip archive"


keep_former_names(__name__, {"described_path": "describe_path"})
