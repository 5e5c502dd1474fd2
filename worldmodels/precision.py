"""In which precision networks are run: bfloat16 where the hardware multiplies it."""

from typing import Literal

import torch

Precision = Literal["auto", "float32", "bfloat16"]


def autocast(precision: Precision, device: torch.device) -> torch.autocast:
    """Return the context in which networks run on `device`; "auto" is bfloat16 on CUDA and on CPUs with AMX tiles."""
    half = precision == "bfloat16"
    if precision == "auto":
        half = device.type == "cuda" or (device.type == "cpu" and torch.cpu._is_amx_tile_supported())
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=half)
