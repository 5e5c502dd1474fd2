"""Single steps of recorded episodes as world models learn from them."""

from dataclasses import replace

from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import DataError
from robopolicy.core.returns import progress_reward
from robopolicy.core.transitions import Transitions
from robopolicy.core.vectors import StateVector


def recorded_transitions(episodes: Episodes, vector: StateVector | None = None) -> Transitions:
    """Return the steps of `episodes` with their rewards for progress, without what success is paid.

    vector: what their states are made of; None: all vector fields of the episodes. Raises DataError where rewards,
    success or final frames are missing, NonFiniteError where the data is not finite.
    """
    progress = progress_reward(episodes)
    if episodes.terminated is None:
        raise DataError("A world model learns where the task ends: the dataset lacks next.terminated.")
    return replace(episodes.transitions(vector), reward=progress).check()
