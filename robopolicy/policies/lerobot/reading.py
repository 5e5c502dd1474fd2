"""Read LeRobot checkpoint folders: configuration, weights, processors.

Weights of other projects are converted to LeRobot's names, and tokenizers are read as data: code stored with them is
never executed. This module does not check the folder's contents: see `acting` and `checks`.
"""

import importlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from robopolicy.core.checkpoints import WEIGHTS, AllocationLimit, require_dtypes
from robopolicy.core.errors import CheckpointError, ConfigError, RobopolicyError
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.machine import free_memory, in_bytes
from robopolicy.core.storage import read_errors, read_object
from robopolicy.core.tensors import load_tensors, tensor_dtypes, tensor_elements
from robopolicy.nn.pretrained import hub_offline, quiet_logger
from robopolicy.policies.lerobot.checks import ACTION_TOKENIZER, PROCESSORS

if TYPE_CHECKING:
    from lerobot.configs.policies import PreTrainedConfig
    from lerobot.policies.pretrained import PreTrainedPolicy
    from lerobot.processor import PolicyProcessorPipeline

FAST_FILE = "processor_config.json"
"""File next to FAST's action tokenizer."""
LONGEST_REASON = 400
"""Maximum characters quoted from another library's error; some list every weight of a model."""


def read_config(folder: Path, device: torch.device) -> "PreTrainedConfig":
    """Read config.json for a policy on `device` whose weights all come from the checkpoint."""
    importlib.import_module("lerobot.policies")  # registers the types
    from lerobot.configs.policies import PreTrainedConfig

    config: Any = PreTrainedConfig.from_pretrained(folder, cli_overrides=[f"--device={device}"])
    if hasattr(config, "pretrained_backbone_weights"):
        # The checkpoint holds the backbone's weights: what it started from would only be downloaded to be overwritten.
        config.pretrained_backbone_weights = None
    if hasattr(config, "load_vlm_weights"):
        config.load_vlm_weights = False
    return config


def _allowance(folder: Path, weights: bool) -> AllocationLimit:
    """Return the allocation limit of a policy's constructor: about the size of its weights, or of the largest
    policies.
    """
    if not weights:
        return AllocationLimit(elements=2**36, tensors=2**17)
    size = (folder / WEIGHTS).stat().st_size  # of 2 or 4 bytes a number: room for what is made beside them
    return AllocationLimit(elements=size, tensors=size // 1024)


def require_memory(folder: Path, device: torch.device, copies: int = 1) -> None:
    """Raise ConfigError if `copies` copies of the weights in `folder` exceed the free memory of `device`.

    Copies are created on the CPU and moved one after the other. Raises CheckpointError when their file is damaged.
    """
    byte_count, bits = weights_bytes(folder), 8 * bytes_per_weight(folder)
    for place, times in ((torch.device("cpu"), copies if device.type == "cpu" else 1), (device, copies)):
        free_bytes = free_memory(place)
        if free_bytes is not None and times * byte_count > free_bytes:
            many = (
                f"{in_bytes(byte_count)} of memory" if times == 1 else f"{times} times {in_bytes(byte_count)} of memory"
            )
            raise ConfigError(
                f"{folder} needs {many} on {place.type} with {bits} bits per weight, but only {in_bytes(free_bytes)} "
                f"are free: stop other processes, or use a smaller checkpoint or a larger machine."
            )


def bytes_per_weight(folder: Path) -> int:
    """Return the bytes per weight of the policy in `folder`: 2 if its config.json requests it."""
    return 2 if read_object(folder / "config.json").get("dtype") == "bfloat16" else 4


def weights_bytes(folder: Path) -> int:
    """Return the memory of the weights of the policy in `folder` in bytes; raises CheckpointError when damaged."""
    return bytes_per_weight(folder) * tensor_elements(folder / WEIGHTS)


DRAWS = {"normal_", "uniform_", "trunc_normal_", "orthogonal_"} | {
    f"{law}_{shape}_" for law in ("kaiming", "xavier") for shape in ("normal", "uniform")
}
"""Names of functions that initialise weights: tensor methods, and torch.nn.init, which transformers partly replaces."""


class SkipWeightInit(TorchFunctionMode):
    """Context that skips weight initialisation of new modules, because every weight is then read from a file.

    Initialisation is nine tenths of the loading time of a SmolVLA.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func`, unless it initialises an existing tensor [...], which is returned unchanged."""
        keywords = kwargs or {}
        if getattr(func, "__name__", "") in DRAWS:
            return args[0] if args else keywords["tensor"]
        return func(*args, **keywords)


def read_policy(folder: Path, config: "PreTrainedConfig", weights: bool) -> "PreTrainedPolicy":
    """Build the policy of a configuration, with the weights of `folder` or of its constructor.

    Raises CheckpointError when weights are missing, or the policy's output would be unusable.
    """
    from lerobot.policies.factory import get_policy_class
    from safetensors.torch import load_model

    with tokenizers_as_data(config), _allowance(folder, weights), SkipWeightInit() if weights else nullcontext():
        policy: Any = get_policy_class(config.type)(config)
    if config.type == "xvla":
        _check_action_mode(policy, folder)
    if not weights:
        return policy
    if config.type in RENAMED:
        _load_renamed(policy, folder / WEIGHTS)
    else:
        require_dtypes(folder / WEIGHTS, tensor_dtypes(folder / WEIGHTS), policy, rounded=True)
        load_model(policy, folder / WEIGHTS, strict=True)
    if config.type == "vqbet" and not policy.vqbet.action_head.vqvae_model.discretized.item():
        raise CheckpointError(
            f"{folder} contains a VQ-BeT whose action codes are not trained yet: train it for more than "
            "n_vqvae_training_steps."
        )
    return policy.to(config.device)


def _check_action_mode(policy: Any, folder: Path) -> None:
    """Raise CheckpointError if an X-VLA's action mode produces a different number of elements than its action."""
    space, size = policy.model.action_space, policy.config.action_feature.shape[0]
    count = space.postprocess(torch.zeros(1, 1, space.dim_action)).shape[-1]
    if count != size:
        raise CheckpointError(
            f"{folder} outputs actions of {count} elements (action_mode={policy.config.action_mode}), but its "
            f"config.json declares {size} (output_features): LeRobot's action_mode=auto supports any number."
        )


def _load_renamed(policy: "PreTrainedPolicy", path: Path) -> None:
    """Load weights, including those of other projects with names that LeRobot converts.

    Raises CheckpointError unless every weight is present, except for aliases of another weight.
    """
    inner: Any = policy
    tensors = RENAMED[inner.config.type](inner, load_tensors(path))
    require_dtypes(path, {name: each.dtype for name, each in tensors.items()}, inner, rounded=True)
    missing_keys, unexpected_keys = inner.load_state_dict(tensors, strict=False)
    state = inner.state_dict()
    # A tied weight is missing under its second name: it lies in the same memory as one that was loaded.
    loaded_pointers = {state[name].data_ptr() for name in tensors if name in state}
    unloaded = [name for name in missing_keys if state[name].data_ptr() not in loaded_pointers]
    if unloaded or unexpected_keys:
        raise CheckpointError(
            f"{path} lacks {unloaded[:3]} or has {unexpected_keys[:3]}, which the policy does not have."
        )


def _from_openpi(policy: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    if any(name.startswith("model.") for name in tensors):
        return tensors
    renamed_tensors = policy._fix_pytorch_state_dict_keys(tensors, policy.config)
    return {f"model.{name}".replace("model.model.", "model.", 1): value for name, value in renamed_tensors.items()}


def _from_florence(policy: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    from lerobot.policies.xvla import modeling_xvla as xvla

    old = xvla._is_vendored_florence_state_dict(tensors)
    return xvla._remap_vendored_florence_state_dict(tensors) if old else tensors


RENAMED: Mapping[str, Callable[[Any, dict[str, Tensor]], dict[str, Tensor]]] = {
    "pi0": _from_openpi,
    "pi05": _from_openpi,
    "pi0_fast": _from_openpi,
    "xvla": _from_florence,
}
"""LeRobot `type` -> function (policy, weights by name) -> weights by LeRobot's names."""


def read_processors(
    folder: Path, config: "PreTrainedConfig", policy: "PreTrainedPolicy"
) -> tuple["PolicyProcessorPipeline", "PolicyProcessorPipeline"]:
    """Return pre- and postprocessor; raises CheckpointError if their vocabulary does not match the policy."""
    from lerobot.policies.factory import make_pre_post_processors

    steps = {step.get("registry_name"): step.get("config", {}) for step in read_object(folder / PROCESSORS[0])["steps"]}
    overrides: dict[str, dict[str, Any]] = {}
    if "device_processor" in steps:
        overrides["device_processor"] = {"device": str(config.device)}
    inner: Any = policy
    if ACTION_TOKENIZER in steps:  # LeRobot's own file lacks two of its choices, which config.json has
        overrides[ACTION_TOKENIZER] = {
            "action_tokenizer_input_object": inner.action_tokenizer,
            "paligemma_tokenizer_name": inner.config.text_tokenizer_name,
            "fast_skip_tokens": inner.config.fast_skip_tokens,
            "trust_remote_code": False,
        }
    before, after = make_pre_post_processors(config, str(folder), preprocessor_overrides=overrides)
    for step in before.steps:
        _check_words(folder, policy, getattr(step, "input_tokenizer", None))
        any_step: Any = step
        if hasattr(step, "action_tokenizer_input_object"):  # saved again it is what it was
            any_step.action_tokenizer_input_object = None
            any_step.trust_remote_code = steps[ACTION_TOKENIZER].get("trust_remote_code", True)
    return before, after


def _check_words(folder: Path, policy: "PreTrainedPolicy", tokenizer: Any) -> None:
    """Raise CheckpointError if a tokenizer has tokens without a row in the policy's embedding.

    Added tokens do not count: PaliGemma's tokenizer has an image token that is never generated.
    """
    rows = [each.num_embeddings for each in policy.modules() if isinstance(each, nn.Embedding)]
    if tokenizer is not None and rows and tokenizer.vocab_size > max(rows):
        raise CheckpointError(
            f"{folder} has a tokenizer of {tokenizer.vocab_size} words ({PROCESSORS[0]}), but its language model has "
            f"{max(rows)}: it belongs to another model. Use the processors that were saved with these weights."
        )


@contextmanager
def offline_loading(folder: Path, kind: str) -> Iterator[None]:
    """Keep the Hugging Face hub offline and quiet, and raise LeRobot's errors as CheckpointError or ConfigError of one
    line.
    """
    try:
        with quiet_logger(), hub_offline(), redirect_stdout(io.StringIO()):
            yield
    except RobopolicyError:
        raise
    except ImportError as error:
        raise ConfigError(
            f"LeRobot's '{kind}' needs a package that is not installed: {first_line(error)} Install it with: "
            f"pip install 'lerobot[{kind}]'"
        ) from error
    except Exception as error:
        reason = first_line(error.__cause__ or error) + _needed_models(folder, error)
        raise CheckpointError(f"{folder} cannot be loaded as LeRobot's '{kind}': {reason}") from error


def _needed_models(folder: Path, error: Exception) -> str:
    """Return the external models that the checkpoint names, if one of them could not be read."""
    from huggingface_hub.errors import HFValidationError  # what looks like a path is no name on the hub

    if not isinstance(error.__cause__ or error, OSError | HFValidationError):
        return ""
    described = [step.get("config", {}) for step in read_object(folder / PROCESSORS[0])["steps"]]
    names = {
        key: str(value)
        for part in (*described, read_object(folder / "config.json"))
        for key, value in part.items()
        if key.endswith(("coder_name", "tokenizer_name", "vlm_model_name")) and value
    }
    remote_names = {key: name for key, name in names.items() if not Path(name).is_dir()}
    if not remote_names:
        return ""
    listing = ", ".join(f"{key}={name}" for key, name in remote_names.items())
    online = [name for name in remote_names.values() if not Path(name).is_absolute() and name.count("/") < 2]
    fetch = (
        f"hf download {online[0]} (for a gated one, after accepting its licence on its page)"
        if online
        else f"copy the folder there, or write its present path into config.json and {PROCESSORS[0]}"
    )
    return f" It needs {listing} on this machine, because nothing is downloaded. To get it: {fetch}."


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, and the second if the first ends in a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return shorten(" ".join(lines[: 2 if lines[0].endswith(":") else 1]), LONGEST_REASON)


@dataclass(frozen=True)
class FastTokenizer:
    """FAST action tokenizer (arXiv:2501.09747): slow motions need few tokens.

    The discrete cosine transform of every action dimension, times `scale` and rounded, gives one integer per frequency.
    These, minus `min_token`, are the characters of a text (lowest frequency first, all dimensions of it), which byte
    pair encoding converts to tokens. It has the members used by LeRobot's pi0_fast, which decodes itself.
    """

    bpe_tokenizer: Any
    scale: float
    min_token: int

    @classmethod
    def from_pretrained(cls, name: str, **options: Any) -> Self:
        """Read a folder, or a previously downloaded hub name; raises OSError if it does not exist.

        options: as passed by LeRobot to transformers; code in the folder is not executed.
        """
        from transformers import PreTrainedTokenizerFast
        from transformers.utils.hub import cached_file

        del options
        path: Any = cached_file(name, FAST_FILE)
        with read_errors(Path(path), failure=CheckpointError):
            settings = read_object(Path(path))
            scale, lowest_token = float(settings["scale"]), int(settings["min_token"])
        return cls(PreTrainedTokenizerFast.from_pretrained(name), scale, lowest_token)

    def __call__(self, actions: Any) -> list[Sequence[int]]:
        """Return the tokens of each row of normalised actions [N, P, A]."""
        from scipy.fft import dct

        waves: Any = dct(np.asarray(actions), axis=1, norm="ortho")
        frequencies = np.around(waves * self.scale)
        characters = np.maximum(frequencies - self.min_token, 0).astype(int)
        texts = ["".join(map(chr, row.flatten())) for row in characters]
        return [self.bpe_tokenizer(text)["input_ids"] for text in texts]


class _PlainTokenizer:
    """Replacement of transformers' AutoTokenizer that does not execute a tokenizer's code."""

    @staticmethod
    def from_pretrained(name: str, **options: Any) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(name, **{**options, "trust_remote_code": False})


@contextmanager
def tokenizers_as_data(config: Any) -> Iterator[None]:
    """Context in which LeRobot builds a policy of `config` without executing tokenizer code, as pi0_fast would."""
    if config.type != "pi0_fast":
        yield
        return
    from lerobot.policies.pi0_fast import modeling_pi0_fast

    module: Any = modeling_pi0_fast
    before = module.AutoProcessor, module.AutoTokenizer
    module.AutoProcessor, module.AutoTokenizer = FastTokenizer, _PlainTokenizer
    try:
        yield
    finally:
        module.AutoProcessor, module.AutoTokenizer = before


keep_former_names(
    __name__,
    {"Undrawn": "SkipWeightInit", "nothing_downloaded": "offline_loading", "bytes_a_weight": "bytes_per_weight"},
)
