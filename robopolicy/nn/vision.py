"""Frozen vision models of transformers (extra `vla`), read from a folder written by save_pretrained.

DINOv2 and DINOv3, CLIP, SigLIP, ViT and the like read images; V-JEPA 2 reads videos, here a frame that stands still.
Nothing is downloaded, no code in a folder is run, and weights are read from safetensors only. A checkpoint keeps what
it uses: the model's config and weights, its pixel statistics and its image size.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from einops import rearrange
from safetensors import SafetensorError
from torch import Tensor
from torch.nn import functional

from robopolicy.core.errors import CheckpointError, ConfigError, require_extra
from robopolicy.core.storage import read_object
from robopolicy.nn.language import EXTRA
from robopolicy.nn.pretrained import quiet_logger

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Pixel statistics of ImageNet, for vision models whose folder names none."""

VIDEO = "pixel_values_videos"
"""Input of models that read videos."""


def is_vision_folder(folder: Path) -> bool:
    """Return whether `folder` was written by save_pretrained of transformers, and is no checkpoint of ours."""
    try:
        description = read_object(folder / "config.json")
    except CheckpointError:
        return False
    return "model_type" in description and "kind" not in description


def load_vision_model(folder: Path, setting: str) -> "tuple[PreTrainedModel, dict[str, Any]]":
    """Load the vision model in a local folder, frozen, and its pixels: {"mean", "std", "size"}.

    Of a model of images and text (CLIP, SigLIP) only the vision part. setting: which names the folder, for errors.
    Raises ConfigError when the folder is missing, is no vision model, has no safetensors, or lacks weights.
    """
    transformers = require_extra("transformers", EXTRA)
    if not folder.is_dir():
        raise ConfigError(
            f"{setting}={folder}: this folder does not exist. Use one written by save_pretrained, for "
            "example of DINOv2, CLIP or SigLIP."
        )
    try:
        with quiet_logger():
            config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
            config = getattr(config, "vision_config", config)
            model, information = transformers.AutoModel.from_pretrained(
                folder,
                config=config,
                dtype=torch.float32,
                trust_remote_code=False,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, KeyError, TypeError, ImportError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"{setting}={folder} could not be loaded as a vision model: {reason}") from error
    if _side(model) is None or not hasattr(model.config, "hidden_size"):
        raise ConfigError(f"{setting}={folder} is a {model.config.model_type} model, not a vision model.")
    missing = [name for name in information["missing_keys"] if "pooler" not in name and "mask_token" not in name]
    if missing:
        raise ConfigError(
            f"{setting}={folder} lacks {len(missing)} weights, such as {sorted(missing)[0]}: they would be "
            "random. Download the complete checkpoint."
        )
    try:
        processor = read_object(folder / "preprocessor_config.json")
    except CheckpointError:
        processor = {}
    mean, std = processor.get("image_mean") or MEAN, processor.get("image_std") or STD
    pixels = {"mean": list(mean), "std": list(std), "size": _side(model)}
    return model.requires_grad_(False), {**pixels, "size": _image_size(model, pixels, processor)}


def _image_size(model: "PreTrainedModel", pixels: Mapping[str, Any], processor: Mapping[str, Any]) -> Any:
    """Return the image size of the folder's processor if the model reads such images (DINOv2's config has the largest
    size instead, with six times as many patches), else that of its config.
    """
    crop = processor.get("crop_size") or processor.get("size") or {}
    if not isinstance(crop, Mapping) or not {"height", "width"} <= crop.keys():
        return pixels["size"]
    size = [int(crop["height"]), int(crop["width"])]
    try:
        feature_maps(model, {**pixels, "size": size}, torch.zeros(1, 8, 8, 3, dtype=torch.uint8))
    except (ValueError, RuntimeError, ConfigError):
        return pixels["size"]
    return size


def _side(model: "PreTrainedModel") -> Any:
    """Return the image size of a vision model's config, a number or [height, width], or None."""
    return getattr(model.config, "image_size", None) or getattr(model.config, "crop_size", None)


def vision_output(model: "PreTrainedModel", pixels: Mapping[str, Any], frames: Tensor) -> Any:
    """Return the output of a vision model for uint8 images [N, height, width, 3], resized to its image size."""
    size = pixels.get("size") or _side(model)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    images = frames.permute(0, 3, 1, 2).float() / 255
    images = functional.interpolate(images, (int(height), int(width)), mode="bilinear", antialias=True)
    mean, std = (images.new_tensor(pixels[name])[:, None, None] for name in ("mean", "std"))
    images = (images - mean) / std
    if model.main_input_name != VIDEO:
        return model.eval()(pixel_values=images)
    clip = images[:, None].repeat(1, int(model.config.tubelet_size), 1, 1, 1)
    return model.eval()(**{VIDEO: clip}, skip_predictor=True)


@torch.no_grad()
def pooled_features(model: "PreTrainedModel", pixels: Mapping[str, Any], frames: Tensor) -> Tensor:
    """Return features [N, D] of uint8 images [N, height, width, 3]: the pooled output, else the mean token."""
    output = vision_output(model, pixels, frames)
    pooled = getattr(output, "pooler_output", None)
    return output.last_hidden_state.mean(1) if pooled is None else pooled.flatten(1)


@torch.no_grad()
def feature_maps(model: "PreTrainedModel", pixels: Mapping[str, Any], frames: Tensor) -> Tensor:
    """Return the features of every patch, [N, D, rows, columns], of uint8 images [N, height, width, 3].

    Tokens that stand for no patch (class, registers) come first and are left out. Raises ConfigError when the patches
    form no grid.
    """
    tokens = vision_output(model, pixels, frames).last_hidden_state
    size, patch = pixels.get("size") or _side(model), model.config.patch_size
    sizes = size if isinstance(size, list | tuple) else (size, size)
    patches = patch if isinstance(patch, list | tuple) else (patch, patch)
    rows, columns = (int(side) // int(part) for side, part in zip(sizes, patches, strict=True))
    if tokens.ndim != 3 or tokens.shape[1] < rows * columns:
        raise ConfigError(
            f"A {model.config.model_type} model has features of shape {list(tokens.shape[1:])}, not one for each of "
            f"{rows} x {columns} patches: use a vision transformer, such as DINOv2 or V-JEPA 2."
        )
    return rearrange(tokens[:, -rows * columns :], "n (h w) d -> n d h w", h=rows)
