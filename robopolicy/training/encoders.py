"""Loading of policies trained on a world model's latent, with the encoder that their checkpoint contains."""

from pathlib import Path

import torch

from robopolicy.core.checkpoints import Checkpoint
from robopolicy.core.errors import CheckpointError, ConfigError
from robopolicy.core.origin import origin_of, remember_origin, remember_renaming, renaming_of
from robopolicy.core.policy import Policy
from robopolicy.core.storage import recover_folder
from robopolicy.policies import load_policy
from robopolicy.policies.loading import open_checkpoint
from worldmodels import load_world_model
from worldmodels.encoding import ENCODER, EncodedPolicy
from worldmodels.protocol import DecoderFree


def load_with_encoder(folder: Path | str | Checkpoint, device: torch.device | str = "cpu") -> Policy:
    """Load any policy checkpoint; a policy trained on a world model's latent is wrapped with the encoder stored in it.

    Raises CheckpointError as `robopolicy.policies.load_policy` does, and when the encoder is missing.
    """
    checkpoint = open_checkpoint(folder)
    policy, folder = load_policy(checkpoint, device), checkpoint.folder
    if "kind" not in checkpoint.description or ENCODER not in checkpoint.description:
        return policy
    place = folder / ENCODER
    if not recover_folder(place).exists():
        raise CheckpointError(
            f"{place} does not exist: {folder} contains a policy that reads a world model's latent, and the world "
            "model's folder is missing. Restore it from a copy, or train again."
        )
    encoded_policy = EncodedPolicy(policy, load_encoder(place, device))
    remember_origin(encoded_policy, origin_of(policy))
    remember_renaming(encoded_policy, renaming_of(policy))
    return encoded_policy


def load_encoder(folder: Path, device: torch.device | str = "cpu") -> DecoderFree:
    """Load a world model whose latent policies can read; raises ConfigError when it outputs observations instead."""
    model = load_world_model(folder, device)
    if not isinstance(model, DecoderFree):
        raise ConfigError(
            f"{folder} contains a world model that decodes observations ({', '.join(model.spec.observation)}), so "
            "its policies need no encoder: only a model without a decoder can be used as one "
            "(worldmodels/README.md)."
        )
    return model
