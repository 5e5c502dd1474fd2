"""Protocols, specs, rollouts, generators, run folders and conformance checks: what every floor above shares."""
