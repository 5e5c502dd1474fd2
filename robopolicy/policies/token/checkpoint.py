"""Checkpoints of token policies: all weights are inside, so the Hugging Face checkpoint it began with is not needed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from robopolicy.core.checkpoints import read_weights, require_format, restoring
from robopolicy.core.structured import from_plain
from robopolicy.nn.language import TextTokenizer, WordTokenizer
from robopolicy.nn.pretrained import described_backbone, load_pretrained_tokenizer, load_processor
from robopolicy.nn.vision_language import VisionLanguageProcessor
from robopolicy.policies.checkpoint import save_policy, saved_fields
from robopolicy.policies.token.configuration import TokenConfig, TokenPolicyConfig
from robopolicy.policies.token.policy import TokenPolicy

TOKEN_POLICY = "token_policy"
TOKENIZER, PROCESSOR = "tokenizer", "processor"


def save_token_policy(policy: TokenPolicy, folder: Path) -> None:
    """Write `policy` to `folder`, atomically."""

    def reader(temporary: Path) -> None:
        if policy.processor is not None:
            policy.processor.save(temporary / PROCESSOR)
        elif policy.config.token.model:
            policy.text_tokens.save(temporary / TOKENIZER)

    save_policy(
        policy,
        folder,
        reader,
        kind=TOKEN_POLICY,
        sees=policy.processor is not None,
        backbone=policy.language.backbone.config.to_dict(),
        adapters=policy.adapters,
        finetuning=policy.finetuning,
    )


def load_token_policy(folder: Path, description: Mapping[str, Any], device: torch.device | str) -> TokenPolicy:
    """Rebuild what `save_token_policy` wrote; raises CheckpointError when the files do not fit together."""
    require_format(folder, description)
    with restoring(folder, "a policy"):
        observation, action, known = saved_fields(description)
        config = from_plain(TokenPolicyConfig, description["config"], "config")
        reader = _reader(folder, description, config.token, known["instructions"])
        with torch.random.fork_rng(devices=[]):
            backbone = described_backbone(description["backbone"])
        policy = TokenPolicy(config, observation, action, language=(backbone, reader), **known)
        if description["adapters"] is not None:
            policy.add_lora(description["adapters"]["rank"], description["adapters"]["alpha"])
        if description["finetuning"] is not None:
            policy.prepare_finetuning(**description["finetuning"])
    return read_weights(policy, folder, device)


def _reader(
    folder: Path, description: Mapping[str, Any], token: TokenConfig, instructions: tuple[str, ...]
) -> TextTokenizer | VisionLanguageProcessor:
    """Return what reads prompts; older checkpoints, without prompts of images, say nothing about them."""
    if description.get("sees") is True:
        return load_processor(folder / PROCESSOR, token.prompt, split_images=token.split_images)
    return load_pretrained_tokenizer(folder / TOKENIZER) if token.model else WordTokenizer(instructions)
