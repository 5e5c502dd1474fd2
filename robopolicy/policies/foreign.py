"""Checkpoints of other libraries: formats register themselves, and commands do not depend on them.

Such a folder has a config.json without robopolicy's `kind`. A format recognises its library's folders and opens them as
policies; information on the world that its files lack is stored next to them, in `robopolicy.json`.
"""

from abc import ABC, abstractmethod
from pathlib import Path

import torch

from robopolicy.core.checkpoints import Checkpoint
from robopolicy.core.policy import Policy
from robopolicy.core.registry import Registry

SETTINGS_FILE = "robopolicy.json"
"""File next to such a checkpoint's config.json with information that its format lacks: {"world": ...} and more."""

FORMATS = Registry(
    "checkpoint format",
    "robopolicy.checkpoint_formats",
    {"lerobot": "robopolicy.policies.lerobot.format:LeRobotFormat"},
)
"""`ForeignFormat` classes by name; checked in turn, the built-in one last."""


class ForeignFormat(ABC):
    """Opens the policies of another library; subclasses define `library`, `recognises` and `load`.

    library: its name in messages; from_shapes: whether `load` works without weights, so that a dry run can plan memory
    from tensor shapes.
    """

    library = ""
    from_shapes = False

    @abstractmethod
    def recognises(self, checkpoint: Checkpoint) -> bool:
        """Whether this library saved checkpoint.folder, whose config.json is checkpoint.description."""

    @abstractmethod
    def load(self, folder: Path, device: torch.device | str = "cpu", *, weights: bool = True) -> Policy:
        """Load the policy in `folder`; weights: False skips reading weights (requires `from_shapes`).

        Raises CheckpointError when its files are damaged, ConfigError when a dependency is missing.
        """

    def weights_bytes(self, folder: Path) -> int:
        """Return the memory of the policy's weights in bytes."""
        return bytes_of_files(folder)

    def require_memory(self, folder: Path, device: torch.device, copies: int = 1) -> None:
        """Raise ConfigError if `copies` copies of its weights exceed the free memory of `device`."""
        del folder, device, copies  # nothing is known of it before it is tried

    def how_to_train(self, folder: Path) -> str:
        """Return the alternative to further training of this checkpoint; completes the message "it is that library's:
        ".
        """
        return f"fine-tune it instead, robopolicy finetune {folder}."


def bytes_of_files(folder: Path) -> int:
    """Return the total size of weight files in `folder` and its subfolders."""
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


def format_of(checkpoint: Checkpoint) -> ForeignFormat | None:
    """Return the format of a checkpoint saved by another library; None for robopolicy's own or unknown ones.

    Raises CheckpointError when its config.json is missing or damaged.
    """
    if "kind" in checkpoint.description:
        return None
    # Ours is asked last: LeRobot's is told by a key, `type`, that others may have too.
    formats = (FORMATS.load(name)() for name in reversed(FORMATS.names()))
    return next((each for each in formats if each.recognises(checkpoint)), None)
