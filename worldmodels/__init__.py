"""Learned worlds: models that predict what actions lead to, wrapped as a `World`."""
