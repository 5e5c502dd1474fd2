"""ALOHA's and ACT's HDF5: a folder of episode_0.hdf5, ... with action, observations/{qpos,qvel,effort,images/CAMERA}.

Images are raw, or JPEG files as rows of bytes (attribute `compress`). The files do not contain the frame rate: ALOHA's
recorder runs at 50 Hz. Source: tonyzhaozh/act, MarkFzp/act-plus-plus.
"""

import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from robopolicy.core.errors import DataError
from robopolicy.core.progress import progress
from robopolicy.core.spec import IMAGE_PREFIX, STATE
from robopolicy.data.formats.format import Column, DatasetFormat
from robopolicy.data.formats.hdf5 import ENCODED, SUFFIXES, Hdf5Source, array, children, described, has, is_hdf5, opened

USUAL_FPS = 50.0
_TARGETS = {
    "action": "action",
    "observations/qpos": STATE,
    "observations/qvel": "observation.velocity",
    "observations/effort": "observation.effort",
}
"""Names of the elements, as in LeRobot's ALOHA datasets."""
_IMAGES = "observations/images/"


class Aloha(DatasetFormat):
    """HDF5 files of ALOHA and ACT, one per episode."""

    title = "ALOHA's HDF5"

    def recognises(self, path: Path) -> bool:
        """Implement `DatasetFormat.recognises`."""
        files = _files(path)
        if not files:
            return False
        with opened(files[0]) as file:
            return has(file, "action", "observations/qpos")

    @contextmanager
    def open(self, path: Path) -> Generator[Hdf5Source]:
        """Implement `DatasetFormat.open`."""
        files, lengths = _files(path), []
        if not files:
            raise DataError(f"{path} has no file episode_0.hdf5.")
        with opened(files[0]) as file:
            columns = _columns(file, files[0])
        with progress("checking episodes", len(files)) as advance:
            for each in files:
                with opened(each) as file:
                    lengths.append(int(array(file, "action", each).shape[0]))
                    for key in columns:
                        _require_length(file, key, each, lengths[-1])
                advance()
        source = Hdf5Source(path, [(each, "") for each in files], columns, lengths)
        source.usual_fps = USUAL_FPS
        encoded = [key for key, column in columns.items() if column.dtype == ENCODED]
        if encoded:
            cameras = ",".join(key.removeprefix(_IMAGES) for key in encoded)
            source.notes = (
                "Images are decoded with the colour order of JPEG. If red and blue are swapped, set "
                f"convert.bgr=[{cameras}].",
            )
        yield source


def _files(path: Path) -> list[Path]:
    if is_hdf5(path):
        return [path]
    if not path.is_dir():
        return []
    matches = [(re.fullmatch(r"episode_?(\d+)", item.stem), item) for item in path.iterdir() if item.suffix in SUFFIXES]
    return [item for match, item in sorted((int(match[1]), item) for match, item in matches if match)]


def _columns(file: Any, path: Path) -> dict[str, Column]:
    columns: dict[str, Column] = {}
    for key, dataset in children(file, path).items():
        column = described(dataset, path, key)
        if key == "compress_len" or column is None:
            continue
        targets: tuple[str, ...] = (_TARGETS[key],) if key in _TARGETS else ()
        if key.startswith(_IMAGES):
            targets = (IMAGE_PREFIX + key.removeprefix(_IMAGES).replace("/", "_"),)
        columns[key] = replace(column, targets=targets)
    return columns


def _require_length(file: Any, key: str, path: Path, length: int) -> None:
    rows = array(file, key, path).shape[0]
    if rows != length:
        raise DataError(
            f"{path}: '{key}' has {rows} rows but 'action' has {length}, so images, states and actions would not be "
            "aligned. Move that file out of the folder, or record it again."
        )
