"""How far a policy will look back and ahead, read from its settings before there is one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from robopolicy.core.errors import CheckpointError
from robopolicy.core.storage import read_object, reading, recover_folder
from robopolicy.policies.lerobot.configuration import LeRobotStart, folder_of


@dataclass(frozen=True)
class Reach:
    """history: frames that it reads; chunk: control steps that it executes a decision; prediction: that it predicts."""

    history: int
    chunk: int
    prediction: int


def reach_of(config: Any) -> Reach | None:
    """Return the reach of a policy of these settings (`policy.*`), None where they do not say.

    Raises ConfigError where a policy of LeRobot's is asked for without its folder, CheckpointError where that is none.
    """
    if isinstance(config, LeRobotStart):
        return _of_lerobot(config)
    chunk = getattr(config, "chunk", None)
    if not isinstance(chunk, int):
        return None
    return Reach(getattr(config, "history", 1), chunk, getattr(config, "prediction_steps", None) or chunk)


def _of_lerobot(config: LeRobotStart) -> Reach:
    path = recover_folder(folder_of(config)) / "config.json"
    with reading(path, failure=CheckpointError):
        return _said_by(read_object(path))


def _said_by(found: Mapping[str, Any]) -> Reach:
    history = int(found.get("n_obs_steps", 1))
    chunk = int(found.get("n_action_steps") or found.get("action_chunk_size") or 1)
    if found.get("type") == "pi0_fast":  # which learns what it executes
        return Reach(history, chunk, chunk)
    beyond = int(found.get("horizon", chunk + history - 1)) - (history - 1)
    return Reach(history, chunk, int(found.get("chunk_size", beyond)))
