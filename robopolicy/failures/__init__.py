"""Failure detectors: notice while a policy acts that its episode is going to fail."""
