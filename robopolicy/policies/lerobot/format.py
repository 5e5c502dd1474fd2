"""Checkpoint format of LeRobot policies: detection and messages without heavy imports."""

from pathlib import Path

import torch

from robopolicy.core.checkpoints import Checkpoint
from robopolicy.core.policy import Policy
from robopolicy.policies.foreign import ForeignFormat


class LeRobotFormat(ForeignFormat):
    """Checkpoints of LeRobot policies: config.json with a `type`, model.safetensors, and the processors' files."""

    library = "LeRobot"
    from_shapes = True

    def recognises(self, checkpoint: Checkpoint) -> bool:
        """Implement `ForeignFormat.recognises`; unsupported types also count as LeRobot's."""
        return "type" in checkpoint.description

    def load(self, folder: Path, device: torch.device | str = "cpu", *, weights: bool = True) -> Policy:
        """Implement `ForeignFormat.load`; raises as `load_lerobot_policy`."""
        from robopolicy.policies.lerobot.acting import load_lerobot_policy  # with torch's networks, which takes seconds

        return load_lerobot_policy(folder, device, weights=weights)

    def weights_bytes(self, folder: Path) -> int:
        """Implement `ForeignFormat.weights_bytes`; raises CheckpointError when the weights file is damaged."""
        from robopolicy.policies.lerobot.reading import weights_bytes

        return weights_bytes(folder)

    def require_memory(self, folder: Path, device: torch.device, copies: int = 1) -> None:
        """Implement `ForeignFormat.require_memory`; raises CheckpointError when the weights file is damaged."""
        from robopolicy.policies.lerobot.reading import require_memory

        require_memory(folder, device, copies)

    def how_to_train(self, folder: Path) -> str:
        """Implement `ForeignFormat.how_to_train`."""
        return f"use policy.kind=lerobot policy.path={folder} instead of train.policy."
