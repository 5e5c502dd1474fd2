"""Tiny models of LeRobot's, written to disk as LeRobot writes them, with random weights and nothing downloaded."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from robopolicy.benchmarks.tiny_vla import SPECIAL, Sizes, pi_of, tokenizer_of, write_smolvlm

FRONT = "observation.images.front"
SIZE = 32
TINY = Sizes(image=SIZE, patch=8, seen=(16, 1), read=(32, 4), head=16, shared=2)
WORDS = ("push", "the", "cube", "reach", "stack", "left", "right", "task", "state", "action")


def word_tokenizer(*more: str, **special: str) -> Any:
    """Return a fast tokenizer of a few words, built in memory; more words at its end, special ones by attribute."""
    known = {"bos_token": more[0]} if more else {}
    return tokenizer_of((*WORDS, *map(str, range(10)), *more), special, **known)


def tiny_smolvlm(folder: Path) -> Path:
    """Write the config, processor and tokenizer of a SmolVLM of a few thousand weights, which SmolVLA asks for."""
    return write_smolvlm(folder, word_tokenizer(**SPECIAL), TINY)


def smolvla_config(vlm: Path, inputs: dict, outputs: dict, **changes: Any):
    """Return the config of a SmolVLA over the SmolVLM in the folder `vlm`."""
    from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig

    known = {
        "chunk_size": 6, "n_action_steps": 4, "max_state_dim": 8, "max_action_dim": 5, "num_steps": 4,
        "resize_imgs_with_padding": (SIZE, SIZE), "tokenizer_max_length": 8, "num_vlm_layers": 4,
        "vlm_model_name": str(vlm), "device": "cpu", "push_to_hub": False,
    }  # fmt: skip
    return SmolVLAConfig(input_features=inputs, output_features=outputs, **(known | changes))


def tiny_pi(vocabulary: int) -> Any:
    """Let LeRobot's pi0, pi05 and pi0_fast be tiny while this context is open."""
    return pi_of(replace(TINY, read=(32, 2), acts=32), vocabulary)


def pi_config(kind: str, inputs: dict, outputs: dict, **changes: Any):
    """Return the config of a pi0 or pi05."""
    from lerobot.policies.pi0.configuration_pi0 import PI0Config
    from lerobot.policies.pi05.configuration_pi05 import PI05Config

    known = {
        "chunk_size": 6, "n_action_steps": 4, "max_state_dim": 8, "max_action_dim": 5, "num_inference_steps": 4,
        "image_resolution": (SIZE, SIZE), "tokenizer_max_length": 16, "device": "cpu", "push_to_hub": False,
    }  # fmt: skip
    made = PI0Config if kind == "pi0" else PI05Config
    return made(input_features=inputs, output_features=outputs, **(known | changes))


def xvla_config(words: Path, inputs: dict, outputs: dict, **changes: Any):
    """Return the config of an X-VLA of a few thousand weights, with the tokenizer in the folder `words`."""
    from lerobot.policies.xvla.configuration_xvla import XVLAConfig

    four = {"depths": [1] * 4, "embed_dim": [8, 8, 16, 16], "num_heads": [1, 1, 2, 2], "num_groups": [1, 1, 2, 2]}
    vision = {"window_size": 4, "projection_dim": 32, "max_position_embeddings": 8, "max_temporal_embeddings": 4}
    text = {
        "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 64,
        "max_position_embeddings": 64,
    }  # fmt: skip
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    florence = {"vision_config": {**four, **vision}, "text_config": {**text, **special}, "image_token_id": 3, **special}
    known = {
        "florence_config": florence, "tokenizer_name": str(words), "tokenizer_max_length": 8, "hidden_size": 32,
        "depth": 2, "num_heads": 2, "num_domains": 4, "len_soft_prompts": 2, "dim_time": 8, "max_len_seq": 64,
        "chunk_size": 6, "n_action_steps": 4, "action_mode": "auto", "max_action_dim": 5, "max_state_dim": 8,
        "num_denoising_steps": 4, "device": "cpu", "push_to_hub": False,
    }  # fmt: skip
    return XVLAConfig(input_features=inputs, output_features=outputs, **(known | changes))


def tiny_act(inputs: dict, outputs: dict, **changes: Any):
    """Return the config of an ACT of a few thousand weights, beside its resnet18 where there is a camera."""
    from lerobot.policies.act.configuration_act import ACTConfig

    known = {
        "chunk_size": 6, "n_action_steps": 4, "dim_model": 32, "n_heads": 2, "dim_feedforward": 32,
        "n_encoder_layers": 1, "n_vae_encoder_layers": 1, "latent_dim": 4, "device": "cpu",
        "pretrained_backbone_weights": None, "push_to_hub": False,
    }  # fmt: skip
    return ACTConfig(input_features=inputs, output_features=outputs, **(known | changes))


def fast_folders(root: Path) -> tuple[Path, Path]:
    """Write the tokenizers that a pi0_fast asks for: of texts, and FAST's, of 80 characters and two pairs of them."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words, fast = root / "words", root / "fast"
    places = (f"place{index}" for index in range(82 + 128))  # LeRobot leaves the last 128 words free
    word_tokenizer("<bos>", "Action", ":", "|", *places).save_pretrained(words)
    zero, one = chr(40), chr(41)
    letters = [*map(chr, range(80)), zero + zero, zero + one]
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [(zero, zero), (zero, one)]))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(fast)
    code = {"AutoProcessor": "processing_action_tokenizer.UniversalActionProcessor"}
    known = {"scale": 10, "min_token": -40, "vocab_size": len(letters), "auto_map": code}
    (fast / "processor_config.json").write_text(json.dumps(known))
    (fast / "processing_action_tokenizer.py").write_text("raise RuntimeError('code beside a tokenizer was run')")
    return words, fast


def pi0_fast_config(words: Path, fast: Path, inputs: dict, outputs: dict, **changes: Any):
    """Return the config of a pi0_fast; `tiny_pi` makes it small."""
    from lerobot.policies.pi0_fast.configuration_pi0_fast import PI0FastConfig

    known = {
        "chunk_size": 4, "n_action_steps": 4, "max_state_dim": 8, "max_action_dim": 5, "max_action_tokens": 16,
        "max_decoding_steps": 12, "text_tokenizer_name": str(words),
        "action_tokenizer_name": str(fast), "image_resolution": (SIZE, SIZE), "tokenizer_max_length": 16,
        "validate_action_token_prefix": False, "device": "cpu", "push_to_hub": False,
    }  # fmt: skip
    return PI0FastConfig(input_features=inputs, output_features=outputs, **(known | changes))


@contextmanager
def without_code() -> Iterator[None]:
    """Let LeRobot itself make pi0_fast policies and processors, though nobody runs the code beside a tokenizer."""
    from lerobot.policies.pi0_fast import modeling_pi0_fast
    from lerobot.processor import tokenizer_processor

    from robopolicy.policies.lerobot.reading import FastTokenizer

    with ExitStack() as stack:
        for module in (modeling_pi0_fast, tokenizer_processor):
            stack.enter_context(patch.object(module, "AutoProcessor", FastTokenizer))
        yield
