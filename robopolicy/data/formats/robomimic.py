"""robomimic's HDF5, also written by MimicGen, robosuite and LIBERO: data/demo_0/{actions,obs/KEY,next_obs/KEY,...}.

Attributes of `data` describe the recording: `env_args` contains a JSON object with the control rate, LIBERO's
`problem_info` the instruction, and its `macros_image_convention` whether images are stored upside down. Source:
robomimic/scripts/dataset_states_to_obs.py, LIBERO/scripts/create_dataset.py.
"""

import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from robopolicy.core.errors import DataError
from robopolicy.core.spec import ENVIRONMENT_STATE, IMAGE_PREFIX, STATE
from robopolicy.data.formats.format import Column, DatasetFormat
from robopolicy.data.formats.hdf5 import (
    Hdf5Source,
    children,
    described,
    has,
    is_hdf5,
    lengths_of,
    member,
    numbered,
    object_of,
    opened,
)
from robopolicy.data.formats.pixels import layout

USUAL_FPS = 20.0
"""Control steps per second of robosuite's tasks."""
_EPISODE = r"(?:demo|ep|episode|traj)_?(\d+)"
_STATES = (
    *(r"robot\d+_eef_pos", r"robot\d+_eef_quat", r"robot\d+_gripper_qpos"),
    *("ee_pos", "ee_ori", "gripper_states"),  # LIBERO's
)
"""Robot observations that robomimic's configurations pass to policies."""


class Robomimic(DatasetFormat):
    """HDF5 files of robomimic and LIBERO."""

    title = "robomimic's HDF5"

    def recognises(self, path: Path) -> bool:
        """Implement `DatasetFormat.recognises`."""
        if not is_hdf5(path):
            return False
        with opened(path) as file:
            return has(file, "data") and bool(numbered(member(file, "data", path), _EPISODE))

    @contextmanager
    def open(self, path: Path) -> Generator[Hdf5Source]:
        """Implement `DatasetFormat.open`."""
        with opened(path) as file:
            data = member(file, "data", path)
            names = numbered(data, _EPISODE)
            if not names:
                raise DataError(f"{path} contains no episode: its group 'data' has no 'demo_0'.")
            env_args = object_of(data.attrs.get("env_args"), path, "env_args")
            lengths = lengths_of(data, names, "actions", "num_samples", path)
            columns = _columns(member(data, names[0], path), path, upside_down=_upside_down(data.attrs))
            source = Hdf5Source(path, [(path, f"data/{name}") for name in names], columns, lengths, file)
            source.final = {"obs/": "next_obs/"}
            source.usual_fps = USUAL_FPS
            rate = (env_args.get("env_kwargs") or {}).get("control_freq")
            source.fps = float(rate) if isinstance(rate, int | float) and rate > 0 else None
            source.tasks = tuple(_task(data.attrs, data[name].attrs, path) for name in names)
            source.notes = _notes(data.attrs, columns)
            yield source


def _columns(group: Any, path: Path, upside_down: bool) -> dict[str, Column]:
    columns: dict[str, Column] = {}
    for key, dataset in children(group, path).items():
        if key.startswith("next_obs/"):
            continue
        column = described(dataset, path, key)
        if column is not None:
            columns[key] = replace(column, targets=_targets(key, column))
    order = {key: _place(key) for key in columns}
    columns = dict(sorted(columns.items(), key=lambda item: order[item[0]]))
    cameras = [key for key, column in columns.items() if any(t.startswith(IMAGE_PREFIX) for t in column.targets or ())]
    columns |= {key: replace(columns[key], upside_down=upside_down) for key in cameras}
    if not any(key.startswith("obs/") for key in columns):
        raise DataError(
            f"{path} contains simulator states but no observations: create them with robomimic's "
            "scripts/dataset_states_to_obs.py, then convert the file that it writes."
        )
    return columns


def _targets(key: str, column: Column) -> tuple[str, ...]:
    name = key.removeprefix("obs/")
    standard_targets = {
        "actions": "action",
        "rewards": "next.reward",
        "dones": "next.terminated",
        "obs/object": ENVIRONMENT_STATE,
    }
    if key in standard_targets:
        return (standard_targets[key],)
    if not key.startswith("obs/"):
        return ()
    if layout(column.shape, column.dtype if column.dtype.startswith(("uint", "float")) else "uint8"):
        return (IMAGE_PREFIX + name.removesuffix("_image").removesuffix("_rgb").replace("/", "_"),)
    return (STATE,) if any(re.fullmatch(each, name) for each in _STATES) else ()


def _place(key: str) -> int:
    """Return a column's position: parts of the state in the order of `_STATES`, before all others."""
    name = key.removeprefix("obs/")
    return next((place for place, each in enumerate(_STATES) if re.fullmatch(each, name)), len(_STATES))


def _upside_down(attributes: Mapping[str, Any]) -> bool:
    """Whether images are stored as OpenGL renders them (upside down), which LIBERO records; robomimic flips them before
    writing.
    """
    return str(attributes.get("macros_image_convention", "")) == "opengl"


def _task(data: Mapping[str, Any], episode: Mapping[str, Any], path: Path) -> str:
    """Return an instruction: LIBERO's of the file, RoboCasa's of the episode."""
    for attributes, name, key in ((episode, "ep_meta", "lang"), (data, "problem_info", "language_instruction")):
        text = object_of(attributes.get(name), path, name).get(key)
        if isinstance(text, list):
            text = "".join(map(str, text))
        if isinstance(text, str) and text:
            return text.strip('"')
    return ""


def _notes(attributes: Mapping[str, Any], columns: Mapping[str, Column]) -> tuple[str, ...]:
    cameras = [key for key, column in columns.items() if column.upside_down]
    if cameras:
        return (f"{', '.join(cameras)} are stored upside down (OpenGL) and are flipped.",)
    return ()
