"""Conformance suites: what a world, a controller, a policy and a world model promise, checked on anybody's class."""
