"""Factors of variation of MuJoCo scenes: what they change, and how their values follow from an episode's seed."""
