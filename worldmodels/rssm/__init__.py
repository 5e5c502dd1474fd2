"""The recurrent state-space model (DreamerV3)."""
