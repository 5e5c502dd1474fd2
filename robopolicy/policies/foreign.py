"""Checkpoints that other libraries saved: a format registers itself, and no verb knows which one it opened.

Such a folder has a config.json without our `kind`. A format tells which folders are its library's and opens them as
policies; what its files do not say of the world that a policy acts in stands beside them, in `robopolicy.json`.
"""

from abc import ABC, abstractmethod
from pathlib import Path

import torch

from robopolicy.core.checkpoints import Checkpoint
from robopolicy.core.policy import Policy
from robopolicy.core.registry import Registry

SETTINGS_FILE = "robopolicy.json"
"""What lies beside the config.json of such a checkpoint, and says what its format does not: {"world": ...} and more."""

FORMATS = Registry(
    "checkpoint format",
    "robopolicy.checkpoint_formats",
    {"lerobot": "robopolicy.policies.lerobot.format:LeRobotFormat"},
)
"""Classes of `ForeignFormat`, by name; they are asked in turn, ours last."""


class ForeignFormat(ABC):
    """How the policies of another library are opened; the next one overrides `library`, `recognises` and `load`.

    library: what it is called in messages; from_shapes: whether `load` can do without the weights, so that a dry run
    plans memory from the shapes of tensors alone.
    """

    library = ""
    from_shapes = False

    @abstractmethod
    def recognises(self, checkpoint: Checkpoint) -> bool:
        """Whether this library saved what is in checkpoint.folder, whose config.json is checkpoint.description."""

    @abstractmethod
    def load(self, folder: Path, device: torch.device | str = "cpu", *, weights: bool = True) -> Policy:
        """Return the policy in `folder`; weights: False, with `from_shapes` alone, where they need not be read.

        Raises CheckpointError where its files are damaged, ConfigError where something that it needs is missing.
        """

    def weights_bytes(self, folder: Path) -> int:
        """Return how much memory its weights take."""
        return bytes_of_files(folder)

    def require_memory(self, folder: Path, device: torch.device, copies: int = 1) -> None:
        """Raise ConfigError where so many copies of its weights do not fit into the free memory of `device`."""
        del folder, device, copies  # nothing is known of it before it is tried

    def how_to_train(self, folder: Path) -> str:
        """Return what to do instead of training the checkpoint further, to go on from "it is that library's: "."""
        return f"fine-tune it instead, robopolicy finetune {folder}."


def bytes_of_files(folder: Path) -> int:
    """Return the size of the files with weights in `folder` and below."""
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


def format_of(checkpoint: Checkpoint) -> ForeignFormat | None:
    """Return the format of a checkpoint that another library saved, None for ours and for what nobody knows.

    Raises CheckpointError where its config.json is missing or damaged.
    """
    if "kind" in checkpoint.description:
        return None
    # Ours is asked last: LeRobot's is told by a key, `type`, that others may have too.
    formats = (FORMATS.load(name)() for name in reversed(FORMATS.names()))
    return next((each for each in formats if each.recognises(checkpoint)), None)
