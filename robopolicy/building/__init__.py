"""Builds the configured objects: worlds, policies, planners, learning inputs and evaluators."""
