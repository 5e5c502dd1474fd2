"""World models: learned dynamics that predict the outcome of actions, wrapped as a `World`. Imported lazily."""

import importlib
from typing import TYPE_CHECKING, Any

from robopolicy.core.former_modules import keep_former_modules

if TYPE_CHECKING:
    from worldmodels.checkpoint import load_world_model, save_world_model

__all__ = ["load_world_model", "save_world_model"]

keep_former_modules()


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("worldmodels.checkpoint"), name)
