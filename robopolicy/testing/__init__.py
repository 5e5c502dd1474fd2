"""Conformance tests for any implementation of a world, a controller, a policy or a world model."""
