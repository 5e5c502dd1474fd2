"""Protocols, specs, rollouts, generators and run folders: what every floor above shares."""
