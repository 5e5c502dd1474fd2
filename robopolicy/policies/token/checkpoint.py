"""Checkpoints of token policies: all weights are inside, so the Hugging Face checkpoint it began with is not needed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from robopolicy.core.errors import CheckpointError, ConfigError
from robopolicy.core.spec import Field
from robopolicy.core.storage import storage_errors, write_folder_atomic, write_json
from robopolicy.core.structured import from_plain, to_plain
from robopolicy.core.tensors import load_tensors
from robopolicy.nn.language import WordTokenizer, described_backbone, load_pretrained_tokenizer
from robopolicy.policies.token.configuration import TokenPolicyConfig
from robopolicy.policies.token.policy import TokenPolicy

TOKEN_POLICY = "token_policy"
FORMAT = 2
TOKENIZER = "tokenizer"


def save_token_policy(policy: TokenPolicy, folder: Path) -> None:
    """Write `policy` to `folder`, atomically."""
    description = {
        "kind": TOKEN_POLICY,
        "format": FORMAT,
        "config": to_plain(policy.config),
        "spec": {
            "observation": {key: field.to_json() for key, field in policy.fields.items()},
            "action": policy.action.to_json(),
            "fps": policy.fps,
            "instructions": list(policy.instructions),
        },
        "backbone": policy.language.backbone.config.to_dict(),
        "adapters": policy.adapters,
        "finetuning": policy.finetuning,
    }
    weights = {name: value.detach().cpu().contiguous() for name, value in policy.state_dict().items()}

    def fill(temporary: Path) -> None:
        write_json(temporary / "config.json", description)
        with storage_errors(temporary):
            save_file(weights, temporary / "model.safetensors")
            if policy.config.token.model:
                policy.text_tokens.save(temporary / TOKENIZER)

    write_folder_atomic(Path(folder), fill)


def load_token_policy(folder: Path, description: Mapping[str, Any], device: torch.device | str) -> TokenPolicy:
    """Rebuild what `save_token_policy` wrote; raises CheckpointError when the files do not fit together."""
    if description.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder} has format {description.get('format')}, this version reads {FORMAT}: use the version of "
            "robopolicy that wrote it, or train again."
        )
    try:
        spec = description["spec"]
        config = from_plain(TokenPolicyConfig, description["config"], "config")
        instructions = tuple(spec["instructions"])
        texts = load_pretrained_tokenizer(folder / TOKENIZER) if config.token.model else WordTokenizer(instructions)
        with torch.random.fork_rng(devices=[]):
            backbone = described_backbone(description["backbone"])
        policy = TokenPolicy(
            config,
            {key: Field.from_json(field) for key, field in spec["observation"].items()},
            Field.from_json(spec["action"]),
            fps=spec["fps"],
            instructions=instructions,
            language=(backbone, texts),
        )
        if description["adapters"] is not None:
            policy.add_lora(description["adapters"]["rank"], description["adapters"]["alpha"])
        if description["finetuning"] is not None:
            policy.prepare_finetuning(**description["finetuning"])
    except (KeyError, TypeError, AttributeError, ValueError, OSError, ConfigError) as error:
        raise CheckpointError(f"{folder / 'config.json'} does not describe a policy: {error!r}.") from error
    tensors = load_tensors(folder / "model.safetensors")
    try:
        policy.load_state_dict(tensors, strict=True)
    except RuntimeError as error:
        raise CheckpointError(
            f"{folder / 'model.safetensors'} does not match its config.json: {error}. Restore both from a copy."
        ) from error
    return policy.to(device)
