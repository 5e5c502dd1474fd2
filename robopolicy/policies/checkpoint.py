"""Self-describing policy checkpoints: config.json (what it is) and model.safetensors (weights and normalisers)."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from robopolicy.core.errors import CheckpointError, ConfigError, did_you_mean
from robopolicy.core.policy import Policy
from robopolicy.core.spec import Field
from robopolicy.core.storage import read_json, recover_folder, storage_errors, write_folder_atomic, write_json
from robopolicy.core.structured import from_plain, to_plain
from robopolicy.core.tensors import load_tensors
from robopolicy.policies.configuration import DenoisingPolicyConfig
from robopolicy.policies.denoising import DenoisingPolicy
from robopolicy.policies.token.checkpoint import TOKEN_POLICY, load_token_policy

DENOISING_POLICY = "denoising_policy"
FORMAT = 2


def load_policy(folder: Path | str, device: torch.device | str = "cpu") -> Policy:
    """Load any policy checkpoint of this project; what it decides is bitwise what the saved one decided.

    Raises CheckpointError when the folder is missing, corrupt, of another kind or of a newer format.
    """
    folder = recover_folder(Path(folder))
    description = read_json(folder / "config.json")
    kind = description["kind"] if isinstance(description, Mapping) and "kind" in description else None
    if kind not in _LOADERS:
        raise CheckpointError(
            f"{folder} holds '{kind}', not a policy.{did_you_mean(str(kind), _LOADERS)} Policies are written by "
            "'robopolicy train' and 'robopolicy finetune' into runs/<verb>/<name>/<seed>/checkpoint."
        )
    return _LOADERS[kind](folder, description, device)


def save_denoising_policy(policy: DenoisingPolicy, folder: Path) -> None:
    """Write `policy` to `folder`, atomically."""
    description = {
        "kind": DENOISING_POLICY,
        "format": FORMAT,
        "config": to_plain(policy.config),
        "spec": {
            "observation": {key: field.to_json() for key, field in policy.fields.items()},
            "action": policy.action.to_json(),
            "fps": policy.fps,
            "instructions": list(policy.instructions),
        },
        "finetuning": policy.finetuning,
    }
    weights = {name: value.detach().cpu().contiguous() for name, value in policy.state_dict().items()}

    def fill(temporary: Path) -> None:
        write_json(temporary / "config.json", description)
        with storage_errors(temporary):
            save_file(weights, temporary / "model.safetensors")

    write_folder_atomic(Path(folder), fill)


def _load_denoising_policy(folder: Path, description: Mapping[str, Any], device: torch.device | str) -> DenoisingPolicy:
    if description.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder} has format {description.get('format')}, this version reads {FORMAT}: use the version of "
            "robopolicy that wrote it, or train again."
        )
    try:
        spec = description["spec"]
        policy = DenoisingPolicy(
            from_plain(DenoisingPolicyConfig, description["config"], "config"),
            {key: Field.from_json(field) for key, field in spec["observation"].items()},
            Field.from_json(spec["action"]),
            fps=spec["fps"],
            instructions=tuple(spec["instructions"]),
        )
        finetuning = description["finetuning"]
        if finetuning is not None:
            policy.prepare_finetuning(finetuning["steps"], train_encoder=finetuning["train_encoder"])
    except (KeyError, TypeError, AttributeError, ConfigError) as error:
        raise CheckpointError(f"{folder / 'config.json'} does not describe a policy: {error!r}.") from error
    tensors = load_tensors(folder / "model.safetensors")
    try:
        policy.load_state_dict(tensors, strict=True)
    except RuntimeError as error:
        raise CheckpointError(
            f"{folder / 'model.safetensors'} does not match its config.json: {error}. Restore both from a copy."
        ) from error
    return policy.to(device)


_LOADERS: dict[str, Callable[[Path, Mapping[str, Any], torch.device | str], Policy]] = {
    DENOISING_POLICY: _load_denoising_policy,
    TOKEN_POLICY: load_token_policy,
}
