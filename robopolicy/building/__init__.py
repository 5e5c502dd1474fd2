"""Builds what the configuration names: worlds, policies, planners, and what they learn from and are judged by."""
