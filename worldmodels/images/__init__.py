"""Shared parts of image world models: decoding, and state prediction from frames."""
