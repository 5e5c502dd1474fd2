"""Load policy checkpoints (robopolicy's and, via `foreign`, other libraries') and build new policies of every kind.

config.json names the kind of policy. Built-in and installed kinds are found by name; others are loaded only if the user
has named them too, so that a downloaded folder cannot choose imports.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from robopolicy.core.checkpoints import Checkpoint, read_weights, require_format, restoring
from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import CheckpointError, ConfigError, did_you_mean
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.origin import WORLD, WorldOrigin, remember_described
from robopolicy.core.policy import Policy, Trainable
from robopolicy.core.registry import is_dotted, is_trusted
from robopolicy.core.spec import WorldSpec
from robopolicy.core.storage import read_object
from robopolicy.core.structured import from_plain
from robopolicy.core.tensors import file_hash
from robopolicy.policies.checkpoint import saved_fields
from robopolicy.policies.foreign import SETTINGS_FILE, ForeignFormat, bytes_of_files, format_of
from robopolicy.policies.registry import LEFT_BEHIND, POLICIES, SAVED_AS

PLUGIN, EXPORTED = "robopolicy", "checkpoint"
"""LeRobot type of a robopolicy checkpoint exported for LeRobot's commands, and its subfolder in the export."""


def load_policy(folder: Path | str | Checkpoint, device: torch.device | str = "cpu") -> Policy:
    """Load any policy checkpoint; its actions are bitwise equal to those of the saved policy.

    Raises CheckpointError when the folder is missing, corrupt, of a newer format, or contains no policy or a kind that
    is neither built in nor installed nor named by the user.
    """
    checkpoint = open_checkpoint(folder)
    folder, description = checkpoint.folder, checkpoint.description
    foreign = format_of(checkpoint)
    if foreign is not None:
        loaded_policy = foreign.load(folder, device)
        remember_described(loaded_policy, _said_beside(folder), folder / SETTINGS_FILE)
        return loaded_policy
    kind = str(description.get("kind"))
    name = SAVED_AS.get(kind, kind)
    if "auto_map" in description:
        raise CheckpointError(
            f"{folder} needs the Python code that its config.json names (auto_map), as OpenVLA and OpenVLA-OFT do, and "
            "code of a checkpoint is never executed. A policy class of your own can wrap that model: see 'A policy' in "
            "docs/guides/extend.md. LeRobot's smolvla, xvla, pi0, pi05 and pi0_fast load without code."
        )
    if name not in POLICIES and name not in LEFT_BEHIND and ":" not in name:
        raise CheckpointError(
            f"{folder} contains '{kind}', not a policy.{did_you_mean(kind, SAVED_AS)} Policies are saved by "
            "'robopolicy train' and 'robopolicy finetune' in runs/<verb>/<name>/<seed>/checkpoint."
        )
    policy_class = LEFT_BEHIND.load(name) if name in LEFT_BEHIND else POLICIES.saved(name, folder)
    if hasattr(policy_class, "load"):
        policy: Policy = policy_class.load(folder, description, device)
    else:
        policy = _constructed(policy_class, POLICIES.configuration(name), folder, description, device)
    remember_described(policy, description, folder / "config.json")
    return policy


def foreign_format(folder: Path | str | Checkpoint) -> ForeignFormat | None:
    """Return the foreign format of the checkpoint in `folder`, None for robopolicy's own.

    Raises CheckpointError when there is no checkpoint.
    """
    return format_of(open_checkpoint(folder))


def open_checkpoint(folder: Path | str | Checkpoint) -> Checkpoint:
    """Open the checkpoint in `folder`, or the robopolicy checkpoint inside a folder exported for LeRobot's commands."""
    checkpoint = Checkpoint.open(folder)
    exported_folder = checkpoint.folder / EXPORTED
    exported = exported_folder.is_dir() and checkpoint.description.get("type") == PLUGIN
    return Checkpoint.open(exported_folder) if exported else checkpoint


def checkpoint_in(folder: Path | str) -> Path:
    """Return the folder of the checkpoint that `folder` is or contains; see `open_checkpoint`."""
    return open_checkpoint(folder).folder


def weights_hash(folder: Path | str) -> str:
    """Return the hashes of a checkpoint's weight files, which identify it; see `checkpoint_in`."""
    return " ".join(file_hash(each) for each in sorted(checkpoint_in(folder).glob("*.safetensors")))


def weights_bytes(folder: Path) -> int:
    """Return the memory of all weights of the checkpoint in `folder`, in bytes; see `checkpoint_in`."""
    foreign = foreign_format(folder)
    return bytes_of_files(folder) if foreign is None else foreign.weights_bytes(folder)


def _said_beside(folder: Path) -> Mapping[str, Any]:
    """Return the content of robopolicy.json next to another library's checkpoint, {} if there is none."""
    path = folder / SETTINGS_FILE
    return read_object(path) if os.path.lexists(path) else {}


def missing_fps_message(folder: Path) -> str:
    """Return the setting to add for the policy in `folder`, which does not declare its control rate."""
    return (
        f'The control rate of {folder} is unknown, which driving a robot needs: add "fps": N to {SETTINGS_FILE} '
        "next to config.json."
    )


def saved_origin(folder: Path | Checkpoint) -> WorldOrigin | None:
    """Return the training world stored in a checkpoint of a policy or world model, None if not stored.

    Reads config.json, or for another library's policy robopolicy.json next to it. Raises CheckpointError when it is
    missing or damaged.
    """
    checkpoint = open_checkpoint(folder)
    foreign = format_of(checkpoint) is not None
    description = _said_beside(checkpoint.folder) if foreign else checkpoint.description
    return WorldOrigin.from_json(
        description.get(WORLD), checkpoint.folder / (SETTINGS_FILE if foreign else "config.json")
    )


def untrusted_kind(folder: Path) -> str:
    """Return the import path of a checkpoint's kind if the user has not named it in this process, else "".

    Reads only config.json, if there is one (a dataset has none); raises CheckpointError when it is damaged.
    """
    checkpoint = open_checkpoint(folder)
    if not (checkpoint.folder / "config.json").is_file():
        return ""
    kind = str(checkpoint.description.get("kind")).rpartition("/")[2]
    return kind if is_dotted(kind) and not is_trusted(kind) else ""


def build_policy(
    kind: str, config: object, spec: WorldSpec, episodes: Episodes, seed: int, device: torch.device | str = "cpu"
) -> Trainable:
    """Build a new policy of a kind for the fields of `spec`, with normalisers fitted on `episodes`.

    The kind's class has `build(config, spec, episodes, seed)`, or is called as cls(config, observation fields, action
    field, fps=, instructions=, values=, seed=) with values: key -> [samples, *shape], including "action". Raises
    ConfigError when the result is not a torch.nn.Module, and any error of the kind itself.
    """
    policy_class = POLICIES.builds(kind)
    if hasattr(policy_class, "build"):
        policy = policy_class.build(config, spec, episodes, seed)
    else:
        values = {**episodes.observation, "action": episodes.to_imitate().actions}
        metadata = {"fps": spec.fps, "instructions": spec.instructions, "values": values, "seed": seed}
        policy = policy_class(config, spec.observation, spec.action, **metadata)
    if not isinstance(policy, nn.Module):
        raise ConfigError(f"The policy '{kind}' is built as {type(policy).__name__}, which is not a torch.nn.Module.")
    return cast(Trainable, policy.to(device))


def _constructed(
    made: Any, configuration: type, folder: Path, description: Mapping[str, Any], device: torch.device | str
) -> Policy:
    """Rebuild a policy saved by `save_policy` with the class's constructor."""
    require_format(folder, description)
    with restoring(folder, "a policy"):
        observation, action, metadata = saved_fields(description)
        policy = made(from_plain(configuration, description["config"], "config"), observation, action, **metadata)
    return read_weights(policy, folder, device)


keep_former_names(__name__, {"no_rate": "missing_fps_message"})
