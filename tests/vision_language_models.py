"""Tiny vision-language checkpoints of Hugging Face's classes, written to disk with random weights; nothing downloaded.

Each folder holds what a downloaded one would: config, weights, tokenizer, image processor, processor, chat template.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

transformers: Any = pytest.importorskip("transformers")
SIZE = 32
"""Pixels of a side that their image processors make of any image; 28 for the one that keeps multiples of a patch."""
WORDS = (
    "What", "action", "should", "the", "robot", "take", "to", "?", "user", "assistant", ":", "push", "red", "blue",
    "cube", "left", "right", "go", "stop", "and",
)  # fmt: skip
TEXT = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "initializer_range": 0.2,
    "bos_token_id": 3, "eos_token_id": 2, "pad_token_id": 0, "use_cache": True,
}  # fmt: skip
VISION = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "initializer_range": 0.2,
}  # fmt: skip
CHAT = (
    "{% for message in messages %}{{ message['role'] }} : {% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}assistant :{% endif %}"
)


def tokenizer(**special: str) -> Any:
    """Return a fast tokenizer of WORDS; special: further tokens by their attribute."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<unk>", "<eos>", "<bos>", *special.values(), *WORDS]
    inner = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    known = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "<eos>", "bos_token": "<bos>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **known, extra_special_tokens=special)


def tiny_smolvlm(folder: Path) -> Path:
    """Write a SmolVLM (as Idefics3: Llama, pixel shuffle, chat template), 4 tokens an image unless it is split."""
    words = tokenizer(
        fake_image_token="<fake_token_around_image>", image_token="<image>", global_image_token="<global-img>"
    )
    config = transformers.SmolVLMConfig(
        text_config={**TEXT, "model_type": "llama", "vocab_size": len(words)},
        vision_config={**VISION, "image_size": SIZE, "patch_size": 8},
        scale_factor=2, image_token_id=words.image_token_id, pad_token_id=0,
    )  # fmt: skip
    sizes = {"size": {"longest_edge": 2 * SIZE}, "max_image_size": {"longest_edge": SIZE}}
    parts = transformers.SmolVLMImageProcessor(**sizes), words, transformers.SmolVLMVideoProcessor(**sizes)
    template = CHAT.replace("IMAGE", "<image>")
    transformers.SmolVLMProcessor(*parts, image_seq_len=4, chat_template=template).save_pretrained(folder)
    return written(transformers.SmolVLMForConditionalGeneration, config, folder)


def tiny_qwen(folder: Path) -> Path:
    """Write a Qwen2.5-VL: positions of three axes, as many tokens as an image has patches, chat template."""
    words = tokenizer(
        image_token="<|image_pad|>", video_token="<|video_pad|>", vision_bos_token="<|vision_start|>",
        vision_eos_token="<|vision_end|>",
    )  # fmt: skip
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    text = {key: value for key, value in TEXT.items() if key != "head_dim"}
    config = transformers.Qwen2_5_VLConfig(
        text_config={**text, "vocab_size": len(words), "rope_parameters": rope},
        vision_config={
            "depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32,
            "patch_size": 7, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 28,
            "fullatt_block_indexes": [0], "initializer_range": 0.2,
        },
        image_token_id=words.image_token_id, video_token_id=words.video_token_id,
        vision_start_token_id=words.vision_bos_token_id, vision_end_token_id=words.vision_eos_token_id,
    )  # fmt: skip
    sizes = {"patch_size": 7, "merge_size": 2, "min_pixels": 28 * 28, "max_pixels": 56 * 56}
    template = CHAT.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
    transformers.Qwen2_5_VLProcessor(
        transformers.Qwen2VLImageProcessor(**sizes),
        words,
        transformers.Qwen2VLVideoProcessor(**sizes),
        chat_template=template,
    ).save_pretrained(folder)
    return written(transformers.Qwen2_5_VLForConditionalGeneration, config, folder)


def tiny_paligemma(folder: Path) -> Path:
    """Write a PaliGemma: Gemma, a prompt that is read in both directions, and no chat template."""
    words = tokenizer(image_token="<image>")
    images = transformers.SiglipImageProcessor(size={"height": SIZE, "width": SIZE})
    images.image_seq_length = 16
    processor = transformers.PaliGemmaProcessor(images, words)  # which adds tokens of its own
    config = transformers.PaliGemmaConfig(
        text_config={**TEXT, "model_type": "gemma", "vocab_size": len(words)},
        vision_config={
            **VISION, "model_type": "siglip_vision_model", "image_size": SIZE, "patch_size": 8,
            "projection_dim": 32, "vision_use_head": False,
        },
        image_token_id=words.image_token_id, projection_dim=32,
    )  # fmt: skip
    processor.save_pretrained(folder)
    return written(transformers.PaliGemmaForConditionalGeneration, config, folder)


def written(model: Any, config: Any, folder: Path) -> Path:
    """Write weights drawn from one seed, and the config."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model(config).save_pretrained(folder)
    return folder


FAMILIES: dict[str, Callable[[Path], Path]] = {
    "smolvlm": tiny_smolvlm,
    "qwen": tiny_qwen,
    "paligemma": tiny_paligemma,
}
