"""Shared foundations: protocols, specs, rollouts, random generators and run folders."""
