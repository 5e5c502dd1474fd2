"""Checkpoints of denoising policies."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from robopolicy.core.checkpoints import read_weights, require_format, restoring
from robopolicy.core.structured import from_plain
from robopolicy.policies.checkpoint import save_policy, saved_fields
from robopolicy.policies.configuration import DenoisingPolicyConfig
from robopolicy.policies.denoising import DenoisingPolicy
from robopolicy.policies.network import describe_network, restore_network

DENOISING_POLICY = "denoising_policy"


@runtime_checkable
class WritesCheckpoint(Protocol):
    """Optional: a network whose policies are kept in another format than ours."""

    def write_checkpoint(self, policy: DenoisingPolicy, folder: Path) -> None:
        """Write the policy whose network this is to `folder`, atomically."""
        ...


def save_denoising_policy(policy: DenoisingPolicy, folder: Path) -> None:
    """Write `policy` to `folder`, atomically."""
    if isinstance(policy.network, WritesCheckpoint):
        policy.network.write_checkpoint(policy, folder)
        return
    network = describe_network(policy.network)
    own: dict[str, Any] = {} if network is None else {"network": network}
    save_policy(policy, folder, kind=DENOISING_POLICY, finetuning=policy.finetuning, **own)


def load_denoising_policy(folder: Path, description: Mapping[str, Any], device: torch.device | str) -> DenoisingPolicy:
    """Rebuild what `save_denoising_policy` wrote; raises CheckpointError when the files do not fit together."""
    require_format(folder, description)
    with restoring(folder, "a policy"):
        observation, action, known = saved_fields(description)
        config = from_plain(DenoisingPolicyConfig, description["config"], "config")
        network = restore_network(description.get("network"), folder)
        policy = DenoisingPolicy(config, observation, action, network=network, **known)
        finetuning = description["finetuning"]
        if finetuning is not None:
            policy.prepare_finetuning(finetuning["steps"], train_encoder=finetuning["train_encoder"])
    return read_weights(policy, folder, device)
