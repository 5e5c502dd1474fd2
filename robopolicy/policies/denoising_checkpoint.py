"""Checkpoints of denoising policies."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from robopolicy.core.errors import CheckpointError, ConfigError
from robopolicy.core.spec import Field
from robopolicy.core.structured import from_plain
from robopolicy.policies.checkpoint import read_weights, require_format, save_policy
from robopolicy.policies.configuration import DenoisingPolicyConfig
from robopolicy.policies.denoising import DenoisingPolicy
from robopolicy.policies.network import describe_network, restore_network

DENOISING_POLICY = "denoising_policy"


def save_denoising_policy(policy: DenoisingPolicy, folder: Path) -> None:
    """Write `policy` to `folder`, atomically."""
    network = describe_network(policy.network)
    own: dict[str, Any] = {} if network is None else {"network": network}
    save_policy(policy, folder, kind=DENOISING_POLICY, finetuning=policy.finetuning, **own)


def load_denoising_policy(folder: Path, description: Mapping[str, Any], device: torch.device | str) -> DenoisingPolicy:
    """Rebuild what `save_denoising_policy` wrote; raises CheckpointError when the files do not fit together."""
    require_format(folder, description)
    try:
        spec = description["spec"]
        policy = DenoisingPolicy(
            from_plain(DenoisingPolicyConfig, description["config"], "config"),
            {key: Field.from_json(field) for key, field in spec["observation"].items()},
            Field.from_json(spec["action"]),
            fps=spec["fps"],
            instructions=tuple(spec["instructions"]),
            network=restore_network(description.get("network"), folder),
        )
        finetuning = description["finetuning"]
        if finetuning is not None:
            policy.prepare_finetuning(finetuning["steps"], train_encoder=finetuning["train_encoder"])
    except (KeyError, TypeError, AttributeError, ConfigError) as error:
        raise CheckpointError(f"{folder / 'config.json'} does not describe a policy: {error!r}.") from error
    return read_weights(policy, folder, device)
