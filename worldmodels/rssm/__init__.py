"""Recurrent state-space model (DreamerV3)."""
