"""Offline RL from recorded data: fit critics, build candidate policies from them, and accept the better ones through a
gate.
"""
