"""Learned worlds: models that predict what actions lead to, wrapped as a `World`."""

from worldmodels.checkpoint import load_world_model, save_world_model

__all__ = ["load_world_model", "save_world_model"]
