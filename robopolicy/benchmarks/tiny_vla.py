"""LeRobot's SmolVLA and pi0 with random weights, as small as a laptop asks: for trying what tunes the large ones.

They are LeRobot's own classes, written to disk as LeRobot writes them, processors included; only their sizes are ours.
Those of pi0 are literals in LeRobot's code, so `pi0_of` must be around all that makes or loads one.
"""

import io
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from robopolicy.core.errors import require_extra
from robopolicy.core.spec import STATE
from robopolicy.core.storage import read_json
from robopolicy.data.lerobot_reading import read_dataset
from robopolicy.nn.pretrained import quiet

EXTRA = "vla"
SPECIAL = {"fake_image_token": "<fake_token_around_image>", "image_token": "<image>"}
SPECIAL["global_image_token"] = "<global-img>"


@dataclass(frozen=True)
class Sizes:
    """image, patch: px of a side; seen: width and layers of the vision transformer; read: of the language model; acts:
    width of the expert, of as many layers; chunk: steps predicted and executed; steps: of the flow.
    """

    image: int = 64
    patch: int = 8
    seen: tuple[int, int] = (96, 2)
    read: tuple[int, int] = (96, 2)
    acts: int = 64
    chunk: int = 4
    steps: int = 5


def tokenizer_of(texts: tuple[str, ...]) -> Any:
    """Return a fast tokenizer of the words in `texts`, built in memory, with SmolVLM's special tokens."""
    tokenizers = require_extra("tokenizers", EXTRA)
    transformers = require_extra("transformers", EXTRA)
    spoken = dict.fromkeys(word for text in texts for word in text.split())
    words = ["<pad>", "<unk>", "<eos>", *SPECIAL.values(), "\n", *spoken]
    model = tokenizers.models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    known = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "<eos>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **known, extra_special_tokens=SPECIAL)


def write_tiny(kind: str, folder: Path, dataset: Path, camera: str, sizes: Sizes, seed: int) -> Path:
    """Write an untrained policy that reads the robot's state and one camera, and return its folder.

    kind: smolvla or pi0; dataset: a LeRobotDataset that it shall learn from, which gives shapes, statistics and
    instructions; camera: key of its images, [height, width, 3].
    """
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.policies.factory import get_policy_class

    features = read_json(dataset / "meta" / "info.json")["features"]
    action = (features["action"]["shape"][0],)
    inputs = {
        STATE: PolicyFeature(FeatureType.STATE, (features[STATE]["shape"][0],)),
        camera: PolicyFeature(FeatureType.VISUAL, (3, sizes.image, sizes.image)),
    }
    outputs = {"action": PolicyFeature(FeatureType.ACTION, action)}
    kept = read_json(dataset / "meta" / "stats.json")
    known = {key: {name: torch.tensor(value) for name, value in kept[key].items()} for key in (*inputs, "action")}
    shared = {
        "input_features": inputs,
        "output_features": outputs,
        "chunk_size": sizes.chunk,
        "n_action_steps": sizes.chunk,
        "max_state_dim": inputs[STATE].shape[0],
        "max_action_dim": action[0],
        "tokenizer_max_length": 16,
        "device": "cpu",
        "push_to_hub": False,
    }
    words = tokenizer_of(tuple(dict.fromkeys(read_dataset(dataset, cameras=()).tasks)))
    with (
        quiet(),
        redirect_stdout(io.StringIO()),
        torch.random.fork_rng(devices=[]),
        pi0_of(sizes) if kind == "pi0" else nullcontext(),
    ):
        torch.manual_seed(seed)
        make = _smolvla if kind == "smolvla" else _pi0
        config, processors = make(folder, words, sizes, shared, known)
        for part in (get_policy_class(kind)(config), *processors):
            part.save_pretrained(folder / kind)
    return folder / kind


def _smolvla(folder: Path, words: Any, sizes: Sizes, shared: Mapping[str, Any], known: Any) -> tuple[Any, Any]:
    """Return config and processors of a SmolVLA over a SmolVLM whose config and tokenizer are written into `folder`."""
    from lerobot.policies.factory import make_pre_post_processors
    from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig

    transformers = require_extra("transformers", EXTRA)

    (seen, seeing), (width, layers) = sizes.seen, sizes.read
    text = {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 32,
        "num_key_value_heads": width // 32,
        "head_dim": 32,
        "vocab_size": len(words),
        "max_position_embeddings": 512,
    }
    vision = {
        "hidden_size": seen,
        "intermediate_size": 2 * seen,
        "num_hidden_layers": seeing,
        "num_attention_heads": seen // 32,
        "image_size": sizes.image,
        "patch_size": sizes.patch,
    }
    made = transformers.SmolVLMConfig(
        text_config=text, vision_config=vision, scale_factor=2, image_token_id=words.image_token_id, pad_token_id=0
    )
    backbone = folder / "smolvlm"
    made.save_pretrained(backbone)
    tokens = (sizes.image // sizes.patch // 2) ** 2
    parts = transformers.SmolVLMImageProcessor(), words, transformers.SmolVLMVideoProcessor()
    transformers.SmolVLMProcessor(*parts, image_seq_len=tokens).save_pretrained(backbone)
    config = SmolVLAConfig(
        **shared,
        num_steps=sizes.steps,
        num_vlm_layers=layers,
        expert_width_multiplier=sizes.acts / width,
        resize_imgs_with_padding=(sizes.image, sizes.image),
        vlm_model_name=str(backbone),
        train_expert_only=False,
        freeze_vision_encoder=False,
    )
    return config, make_pre_post_processors(config, dataset_stats=known)


def _pi0(folder: Path, words: Any, sizes: Sizes, shared: Mapping[str, Any], known: Any) -> tuple[Any, Any]:
    """Return config and processors of a pi0 whose tokenizer is written into `folder`: LeRobot's own is gated."""
    from lerobot.policies.pi0.configuration_pi0 import PI0Config
    from lerobot.policies.pi0.processor_pi0 import make_pi0_pre_post_processors
    from lerobot.processor import TokenizerProcessorStep

    words.save_pretrained(folder / "tokenizer")
    side = (sizes.image, sizes.image)
    config = PI0Config(**shared, num_inference_steps=sizes.steps, image_resolution=side, dtype="float32")

    def step(**options: Any) -> Any:
        return TokenizerProcessorStep(**(options | {"tokenizer_name": str(folder / "tokenizer")}))

    with patch("lerobot.policies.pi0.processor_pi0.TokenizerProcessorStep", step):
        return config, make_pi0_pre_post_processors(config, known)


@contextmanager
def pi0_of(sizes: Sizes, vocabulary: int = 256) -> Iterator[None]:
    """Let LeRobot's pi0 and pi05 have these sizes inside, and so many words."""
    from lerobot.policies.pi0 import modeling_pi0
    from lerobot.policies.pi05 import modeling_pi05

    (seen, seeing), (width, layers) = sizes.seen, sizes.read
    vision = {
        "hidden_size": seen,
        "intermediate_size": 2 * seen,
        "num_hidden_layers": seeing,
        "num_attention_heads": seen // 32 or 1,
        "patch_size": sizes.patch,
        "projection_dim": width,
    }
    with ExitStack() as stack:
        for module in (modeling_pi0, modeling_pi05):
            gemma, mapping = module.GemmaConfig, module.CONFIG_MAPPING
            build = module.PaliGemmaForConditionalGenerationWithPiGemma

            def gemma_of(variant: str, gemma: Any = gemma) -> Any:
                wide = sizes.acts if "300m" in variant else width
                return gemma(width=wide, depth=layers, mlp_dim=2 * wide, num_heads=4, num_kv_heads=4, head_dim=32)

            def expert(make: Any = mapping["gemma"], **settings: Any) -> Any:
                return make(**(settings | {"vocab_size": vocabulary}))

            def vision_language(config: Any, make: Any = build) -> Any:
                config.text_config.vocab_size = vocabulary
                config.image_token_id = vocabulary - 1
                for name, value in vision.items():
                    setattr(config.vision_config, name, value)
                return make(config)

            small = {"paligemma": mapping["paligemma"], "gemma": expert}
            stack.enter_context(patch.object(module, "get_gemma_config", gemma_of))
            stack.enter_context(patch.object(module, "CONFIG_MAPPING", small))
            stack.enter_context(patch.object(module, "PaliGemmaForConditionalGenerationWithPiGemma", vision_language))
        yield
