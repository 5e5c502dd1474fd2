"""Checkpoints of transformers (extra `vla`): loaded strictly, and never with code of their own.

What a user names may come from the hub; what lies in a checkpoint of ours is read without a network.
"""

import importlib
import importlib.util
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from robopolicy.core.errors import CheckpointError, ConfigError, require_extra
from robopolicy.core.narrowing import is_mapping, is_sequence
from robopolicy.nn.language import EXTRA, PretrainedTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION = (None, "eager", "sdpa", "flex_attention")
"""What a file may choose as attention and the like; any other name can stand for code on the hub."""
LARGEST = 2**24
"""Of the whole numbers that describe a backbone."""
MOST_LAYERS = 1000


def pretrained_backbone(name: str) -> "tuple[PreTrainedModel, PretrainedTokenizer]":
    """Return the (language) backbone and the tokenizer of a causal or vision-language checkpoint, in fp32.

    name: a folder, or a name on the Hugging Face hub (downloaded unless HF_HUB_OFFLINE is set). Raises ConfigError when
    it cannot be loaded, its tokenizer cannot pad, or the extra is missing.
    """
    transformers = require_extra("transformers", EXTRA)
    try:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        _require_plain(config.to_dict(), f"token.model={name}")
        model = transformers.AutoModel.from_pretrained(
            name, config=config, dtype=torch.float32, trust_remote_code=False
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError, CheckpointError) as error:
        raise ConfigError(
            f"token.model={name} could not be loaded: {str(error).splitlines()[0]} Give a folder written by "
            "save_pretrained (model and tokenizer), or a name on the hub and a network connection. Models that bring "
            "code of their own are not run."
        ) from error
    return model.get_decoder(), PretrainedTokenizer(tokenizer)


def described_backbone(description: Mapping[str, Any]) -> "PreTrainedModel":
    """Return a backbone of random weights from `backbone.config.to_dict()`; nothing is downloaded.

    Raises ConfigError without the extra, CheckpointError where the description asks for code that is not part of
    transformers or for sizes that no backbone has.
    """
    transformers = require_extra("transformers", EXTRA)
    _require_plain(description, "The backbone")
    _require_sizes(description, "The backbone")
    settings = dict(description)
    with offline():
        config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
        return transformers.AutoModel.from_config(config, dtype=torch.float32, trust_remote_code=False)


def load_pretrained_tokenizer(folder: Path) -> PretrainedTokenizer:
    """Read what `PretrainedTokenizer.save` wrote; nothing is downloaded, and no code in the folder is run.

    Raises CheckpointError where the folder is missing or asks for code of its own, ConfigError without the extra.
    """
    transformers = require_extra("transformers", EXTRA)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} does not exist: the policy's tokenizer is missing.")
    for path in sorted(folder.glob("*config.json")):
        known = json.loads(path.read_text())
        _require_plain(known if is_mapping(known) else {}, str(path))
    with offline():
        found = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    return PretrainedTokenizer(found)


@contextmanager
def offline() -> Iterator[None]:
    """Let the Hugging Face hub be unreachable, and its libraries refuse code of a checkpoint instead of asking."""
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
    """Yield every setting among nested mappings and sequences, name and value."""
    if is_mapping(description):
        yield from ((str(key), value) for key, value in description.items())
    for item in description.values() if is_mapping(description) else description if is_sequence(description) else ():
        yield from _settings(item)


def _require_plain(description: Any, where: str) -> None:
    """Raise CheckpointError where settings of transformers name code outside it."""
    for name, value in _settings(description):
        if name == "auto_map" and value:
            raise CheckpointError(f"{where} brings code of its own (auto_map), which is never run.")
        if name.endswith(("_implementation", "_implementation_internal")):
            _require_attention(name, value, where)


def _require_sizes(description: Any, where: str) -> None:
    """Raise CheckpointError where whole numbers are too large to be sizes, layers above all: lists are made of them."""
    for name, value in _settings(description):
        limit = MOST_LAYERS if {"layer", "layers"} & set(name.split("_")) else LARGEST
        if isinstance(value, int) and abs(value) > limit:
            raise CheckpointError(f"{where} has {name}={float(value):g}: that is no size of a language model.")


def _require_attention(name: str, value: Any, where: str) -> None:
    chosen = list(value.values()) if is_mapping(value) else [value]
    if any(item not in ATTENTION for item in chosen):
        raise CheckpointError(
            f"{where} asks for {name}={str(value)[:80]}, which could be code from a hub: "
            f"choose one of {', '.join(filter(None, ATTENTION))}."
        )
