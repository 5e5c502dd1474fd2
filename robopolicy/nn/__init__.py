"""Network blocks, encoders, normalisers and noise schedules, shared by policies and world models."""
