"""Benchmarks: each file has the settings, the measurement and the tables of one claim (README.md)."""
