"""Load transformers checkpoints (extra `vla`) strictly, without executing their code.

Models named by the user may come from the hub; contents of robopolicy checkpoints are read offline.
"""

import importlib
import importlib.util
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from robopolicy.core.arrays import is_mapping, is_sequence
from robopolicy.core.errors import CheckpointError, ConfigError, require_extra
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.machine import free_memory, in_bytes
from robopolicy.core.storage import read_object
from robopolicy.nn.language import EXTRA, PretrainedTokenizer
from robopolicy.nn.vision_language import VisionLanguageProcessor

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

ATTENTION = (None, "eager", "sdpa", "flex_attention")
"""Values that a file may choose for attention and similar settings; other names could refer to code on the hub."""
LARGEST = 2**24
"""Largest integer allowed in the description of a backbone."""
MOST_LAYERS = 1000
OLDEST_TRANSFORMERS, NEWEST_TRANSFORMERS = (5, 4), (5, 6)
"""Range of transformers versions tested with vision-language models, including LeRobot's; the second is the first
incompatible one.
"""


def pretrained_backbone(name: str) -> "tuple[PreTrainedModel, PretrainedTokenizer]":
    """Load the language backbone and the tokenizer of a causal or vision-language checkpoint, in fp32.

    name: a folder, or a name on the Hugging Face hub (downloaded unless HF_HUB_OFFLINE is set). Raises ConfigError when
    it cannot be loaded, its tokenizer cannot pad, it does not fit into memory, or the extra is missing.
    """
    transformers = require_extra("transformers", EXTRA)
    with _loading(name, "model and tokenizer"):
        model = _load_model(name, pretrained_config(name))
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    return model.get_decoder(), PretrainedTokenizer(tokenizer)


def pretrained_vision_language(
    name: str, prompt: str, *, split_images: bool
) -> "tuple[PreTrainedModel, VisionLanguageProcessor]":
    """Load a full vision-language checkpoint without its language head, in fp32, and its processor.

    name: as in `pretrained_backbone`; prompt, split_images: as in `VisionLanguageProcessor`. Raises ConfigError when it
    cannot be loaded, has no vision model, lacks weights or a processor, does not fit into memory, or the extra is
    missing or has an untested version.
    """
    transformers = require_extra("transformers", EXTRA)
    require_transformers("token.vision=checkpoint")
    config = pretrained_config(name)
    if not is_vision_language(config):
        raise ConfigError(
            f"token.model={name} is a {config.model_type} checkpoint, which reads no images: set "
            "token.vision=patches, or choose a vision-language model (such as SmolVLM, Qwen2.5-VL or PaliGemma)."
        )
    with _loading(name, "model, tokenizer and image processor"):
        # First, because it is small: what is missing is said before gigabytes are read
        processor = transformers.AutoProcessor.from_pretrained(name, trust_remote_code=False)
        _require_processor(processor, name)
        wrapped_processor = VisionLanguageProcessor(processor, prompt, split_images=split_images)
        return _load_model(name, config), wrapped_processor


def pretrained_config(name: str) -> "PreTrainedConfig":
    """Return the config of a checkpoint; raises ConfigError if it is missing or requires custom code."""
    transformers = require_extra("transformers", EXTRA)
    with _loading(name, "model and tokenizer"):
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        _require_plain(config.to_dict(), f"token.model={name}")
    return config


def is_vision_language(config: "PreTrainedConfig") -> bool:
    """Whether a config belongs to a vision-language model."""
    return type(config) in require_extra("transformers", EXTRA).MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def require_transformers(what: str) -> None:
    """Raise ConfigError, naming `what`, unless a tested version of transformers is installed."""
    require_extra("transformers", EXTRA)
    installed = version("transformers")
    if not OLDEST_TRANSFORMERS <= tuple(map(int, installed.split(".")[:2])) < NEWEST_TRANSFORMERS:
        first, last = (".".join(map(str, each)) for each in (OLDEST_TRANSFORMERS, NEWEST_TRANSFORMERS))
        raise ConfigError(
            f"{what} was tested with transformers from {first} to before {last}, but {installed} is installed: pip "
            f"install 'transformers>={first},<{last}'."
        )


@contextmanager
def quiet_logger(name: str = "transformers") -> Iterator[None]:
    """Restrict a library's log to errors; name: of its logger, "" for libraries that log without a name."""
    chatter = logging.getLogger(name)
    level = chatter.level
    chatter.setLevel(logging.ERROR)
    try:
        yield
    finally:
        chatter.setLevel(level)


@contextmanager
def _loading(name: str, parts: str) -> Iterator[None]:
    """Convert loading errors into a ConfigError that names the remedy, and silence all other output."""
    if Path(name).is_absolute() and not Path(name).is_dir():  # transformers would take it for a name on the hub
        raise ConfigError(
            f"token.model={name}: this folder does not exist. Use a folder written by save_pretrained ({parts})."
        )
    try:
        with quiet_logger():
            yield
    except (OSError, ValueError, KeyError, TypeError, ImportError, CheckpointError, SafetensorError) as error:
        message = " ".join(
            next((line for line in str(error).splitlines() if line.strip()), type(error).__name__).split()
        )
        gated = " Accept its licence on its page, then hf auth login." if "gated" in str(error).lower() else ""
        raise ConfigError(
            f"token.model={name} could not be loaded: {message}{gated} Use a folder written by save_pretrained "
            f"({parts}), or a name on the hub and a network connection. Code that comes with a model is never run."
        ) from error


def _load_model(name: str, config: "PreTrainedConfig") -> "PreTrainedModel":
    """Return the model without its head, in fp32; raises ConfigError if weights are missing or memory is
    insufficient.
    """
    transformers = require_extra("transformers", EXTRA)
    with torch.device("meta"):
        byte_count = sum(4 * weight.numel() for weight in transformers.AutoModel.from_config(config).parameters())
    free_bytes = free_memory(torch.device("cpu"))
    if free_bytes is not None and byte_count > free_bytes:
        raise ConfigError(
            f"token.model={name} needs {in_bytes(byte_count)} of memory in fp32, but only {in_bytes(free_bytes)} are "
            f"free: choose a smaller checkpoint or a larger machine."
        )
    model, loading_info = transformers.AutoModel.from_pretrained(
        name,
        config=config,
        dtype=torch.float32,
        trust_remote_code=False,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # its own refusal points at a report that nobody sees
    )
    if mismatches := sorted(loading_info["mismatched_keys"]):
        weight, shape_in_file, expected_shape = mismatches[0]
        raise ConfigError(
            f"token.model={name} has {len(mismatches)} weights whose shapes differ from its config.json: {weight} is "
            f"{list(shape_in_file)} and should be {list(expected_shape)}. Download the complete checkpoint again, "
            "both files of one version."
        )
    if missing_keys := sorted(loading_info["missing_keys"]):
        raise ConfigError(
            f"token.model={name} lacks {len(missing_keys)} weights of a {type(model).__name__}, such as "
            f"{missing_keys[0]}: they would be random. Download the complete checkpoint."
        )
    return model


def _require_processor(processor: Any, name: str) -> None:
    """Raise ConfigError unless a processor has an image processor."""
    if not isinstance(processor, require_extra("transformers", EXTRA).ProcessorMixin):
        raise ConfigError(
            f"token.model={name} has no image processor, only a {type(processor).__name__}: add a "
            "preprocessor_config.json or processor_config.json to its folder (processor.save_pretrained), or set "
            "token.vision=patches."
        )


def build_described_backbone(description: Mapping[str, Any]) -> "PreTrainedModel":
    """Build a backbone with random weights from `backbone.config.to_dict()`; nothing is downloaded.

    Raises ConfigError without the extra; CheckpointError when the description requires code outside transformers or has
    unrealistic sizes.
    """
    transformers = require_extra("transformers", EXTRA)
    _require_plain(description, "The backbone")
    _require_sizes(description, "The backbone")
    settings = dict(description)
    with hub_offline():
        config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
        return transformers.AutoModel.from_config(config, dtype=torch.float32, trust_remote_code=False)


def load_pretrained_tokenizer(folder: Path) -> PretrainedTokenizer:
    """Load a tokenizer saved by `PretrainedTokenizer.save`; nothing is downloaded, and no code in the folder is
    executed.

    Raises CheckpointError when the folder is missing or requires custom code, ConfigError without the extra.
    """
    return PretrainedTokenizer(_load_saved(require_extra("transformers", EXTRA).AutoTokenizer, folder, "tokenizer"))


def load_processor(folder: Path, prompt: str, *, split_images: bool) -> VisionLanguageProcessor:
    """Load a processor saved by `VisionLanguageProcessor.save`, as `load_pretrained_tokenizer` loads a tokenizer.

    Raises CheckpointError and ConfigError as that function does, and ConfigError with an untested version of
    transformers.
    """
    require_transformers("A policy with a checkpoint's own vision")
    processor = _load_saved(require_extra("transformers", EXTRA).AutoProcessor, folder, "image processor")
    return VisionLanguageProcessor(processor, prompt, split_images=split_images)


def _load_saved(loader: Any, folder: Path, what: str) -> Any:
    """Load an Auto class of transformers from a robopolicy checkpoint folder."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} does not exist: the policy's {what} is missing.")
    for path in sorted(folder.glob("*config.json")):
        _require_plain(read_object(path), str(path))
    with hub_offline():
        return loader.from_pretrained(folder, trust_remote_code=False, local_files_only=True)


@contextmanager
def hub_offline() -> Iterator[None]:
    """Context in which the Hugging Face hub is unreachable and its libraries reject custom code instead of
    prompting.
    """
    changes: dict[tuple[str, str], bool | int] = {
        ("huggingface_hub.constants", "HF_HUB_OFFLINE"): True,
        ("transformers.dynamic_module_utils", "TIME_OUT_REMOTE_CODE"): 0,  # seconds that it waits for an answer
    }
    before: list[tuple[ModuleType, str, Any]] = []
    for (name, setting), value in changes.items():
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            module = importlib.import_module(name)
            before.append((module, setting, getattr(module, setting)))
            setattr(module, setting, value)
    try:
        yield
    finally:
        for module, setting, value in before:
            setattr(module, setting, value)


def _settings(description: Any) -> Iterator[tuple[str, Any]]:
    """Yield every setting in nested mappings and sequences as (name, value)."""
    if is_mapping(description):
        yield from ((str(key), value) for key, value in description.items())
    for item in description.values() if is_mapping(description) else description if is_sequence(description) else ():
        yield from _settings(item)


def _require_plain(description: Any, where: str) -> None:
    """Raise CheckpointError if transformers settings name code outside the package."""
    for name, value in _settings(description):
        if name == "auto_map" and value:
            raise CheckpointError(f"{where} contains custom code (auto_map), which is never run.")
        if name.endswith(("_implementation", "_implementation_internal")):
            _require_attention(name, value, where)


def _require_sizes(description: Any, where: str) -> None:
    """Raise CheckpointError if integers are too large to be sizes, in particular layer counts, which allocate lists."""
    for name, value in _settings(description):
        limit = MOST_LAYERS if {"layer", "layers"} & set(name.split("_")) else LARGEST
        if isinstance(value, int) and abs(value) > limit:
            raise CheckpointError(
                f"{where} has {name}={float(value):g}, which is not a valid size of a language model."
            )


def _require_attention(name: str, value: Any, where: str) -> None:
    implementations = list(value.values()) if is_mapping(value) else [value]
    if any(item not in ATTENTION for item in implementations):
        raise CheckpointError(
            f"{where} sets {name}={str(value)[:80]}, which could be code from a hub: choose one of "
            f"{', '.join(filter(None, ATTENTION))}."
        )


keep_former_names(
    __name__,
    {
        "sees": "is_vision_language",
        "quiet": "quiet_logger",
        "offline": "hub_offline",
        "described_backbone": "build_described_backbone",
    },
)
