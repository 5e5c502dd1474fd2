"""Network blocks, encoders, normalisers and noise schedules: written once, used by policies and world models."""
