"""Vision-language checkpoints of transformers: build prompts of images and text in the checkpoint's own format.

The checkpoint determines the prompt completely: image size and number of image tokens (image processor), markup of user
messages (chat template, if any), and image encoding (vision tower and connector, in `LanguageModel.see`).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from einops import rearrange
from torch import Tensor

from robopolicy.core.errors import ConfigError
from robopolicy.core.spec import IMAGE_PREFIX, Field
from robopolicy.nn.language import LanguageModel, PretrainedTokenizer

if TYPE_CHECKING:
    from transformers import ProcessorMixin

INSTRUCTION = "{instruction}"
SPLITTING = ("do_image_splitting", "crop_to_patches", "do_pan_and_scan")
"""Options of transformers image processors that split one image into several (SmolVLM, InternVL, Gemma 3)."""


@runtime_checkable
class MarksImages(Protocol):
    """A processor with a dedicated image token."""

    image_token: str
    image_token_id: int


class VisionLanguageProcessor:
    """Converts instructions and images into the inputs of a vision-language checkpoint.

    processor: as returned by AutoProcessor; prompt: user message containing "{instruction}"; split_images: whether an
    image processor that can split images into tiles, each with its own tokens, does so. Raises ConfigError if the
    checkpoint has neither a chat template nor an image token, or its tokenizer cannot pad.
    """

    def __init__(self, processor: "ProcessorMixin", prompt: str, *, split_images: bool):
        self.processor: Any = processor
        self.tokenizer, self.prompt = PretrainedTokenizer(self.processor.tokenizer), prompt
        image_options = self.processor.image_processor.to_dict()
        self.options = {} if split_images else {name: False for name in SPLITTING if name in image_options}
        if not self.processor.chat_template and not isinstance(processor, MarksImages):
            raise ConfigError(
                f"The checkpoint's {type(processor).__name__} has neither a chat template nor an image token, so a "
                "prompt with images cannot be written: set token.vision=patches, or use a checkpoint that has one."
            )

    def __call__(self, texts: Sequence[str], images: Sequence[Sequence[Tensor]]) -> dict[str, Tensor]:
        """Return the model inputs for N instructions, each with I images [height, width, 3] uint8.

        "input_ids" and "attention_mask" [N, L], padded on the left, and images in the model's format. Everything is
        computed on the CPU: some checkpoints resize images with PIL.
        """
        count = len(images[0])
        prompts = {text: self.written(text, count) for text in set(texts)}
        inputs = self.processor(
            text=[prompts[text] for text in texts],
            images=[[rearrange(image.cpu(), "h w c -> c h w") for image in row] for row in images],
            input_data_format="channels_first",
            padding=True,
            padding_side="left",
            return_tensors="pt",
            **self.options,
        )
        return {name: value for name, value in inputs.items() if name != "labels"}

    def written(self, instruction: str, images: int) -> str:
        """Return the prompt text of an instruction after N images."""
        text = self.prompt.replace(INSTRUCTION, instruction)
        if not self.processor.chat_template:
            return self.processor.image_token * images + text
        content = [*({"type": "image"} for _ in range(images)), {"type": "text", "text": text}]
        # processor_kwargs concern tokens, which are not made here: without any, SmolVLM's warns of its own defaults
        return self.processor.apply_chat_template(
            [{"role": "user", "content": content}],
            add_generation_prompt=True,
            tokenize=False,
            processor_kwargs={"padding": True},
        )

    def save(self, folder: Path) -> None:
        """Write the processor's files, including tokenizer and chat template."""
        self.processor.save_pretrained(folder)


def images_of_rows(frames: Mapping[str, Tensor], rows: int) -> list[list[Tensor]]:
    """Return the images [height, width, 3] of each row, camera by camera and oldest first, from frames [N * H, ...]."""
    parts = [rearrange(value, "(n t) h w c -> n t h w c", n=rows) for value in frames.values()]
    return [[image for part in parts for image in part[row]] for row in range(rows)]


@torch.no_grad()
def describe_prompt(
    model: LanguageModel,
    processor: VisionLanguageProcessor,
    fields: Mapping[str, Field],
    history: int,
    instructions: Sequence[str],
    said: int,
) -> str:
    """Process a prompt with grey images of the world's size and report its length in one line.

    said: number of tokens that follow a prompt. Raises ConfigError when the model cannot process it or has too few
    positions.
    """
    cameras = {key: field for key, field in fields.items() if key.startswith(IMAGE_PREFIX)}
    images = [torch.full(field.shape, 100, dtype=torch.uint8) for field in cameras.values() for _ in range(history)]
    name = type(model.backbone).__name__
    try:
        inputs = processor([max(instructions, key=len)], [images])
        model.see(inputs)
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
        raise ConfigError(
            f"A {name} could not read {len(images)} images and an instruction in the format of its processor: "
            f"{' '.join(str(error).split())[:300]} Set token.vision=patches, or choose another token.model."
        ) from error
    length, limit = inputs["input_ids"].shape[1], _positions(model)
    marked = processor.processor.image_token_id if isinstance(processor.processor, MarksImages) else -1
    image_tokens = int((inputs["input_ids"] == marked).sum())
    if limit is not None and length + said > limit:
        raise ConfigError(
            f"A prompt has {length} tokens, {image_tokens} of them for its {len(images)} images, followed by {said}, "
            f"but a {name} has only {limit} positions: use fewer cameras (observation_keys) or frames (history), set "
            "token.split_images=false, or a smaller size in the checkpoint's preprocessor_config.json."
        )
    sizes = ", ".join(
        f"{key.removeprefix(IMAGE_PREFIX)} {' x '.join(map(str, f.shape[:2]))}" for key, f in cameras.items()
    )
    return (
        f"Images ({sizes}) are resized and encoded as in {name}'s own processor: a prompt has {length} tokens, "
        f"{image_tokens} of them for images."
    )


def _positions(model: LanguageModel) -> int | None:
    """Return the maximum number of positions of the language model; None if its config does not specify it."""
    decoder_config = model.decoder.config.to_dict()
    return decoder_config.get("max_position_embeddings")
