"""Losses beside the policy's: (inputs) -> scalar, already scaled."""
