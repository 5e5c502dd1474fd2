"""Single steps of recorded episodes, and what their rewards say: progress, and what success is worth."""

from dataclasses import dataclass

import torch
from torch import Tensor

from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import DataError
from robopolicy.core.spec import check_finite
from robopolicy.core.vectors import StateVector

SUCCESS = "success"
"""Name of the reward term that is paid for success."""

PROGRESS = "progress"
"""Name of the sum of all others."""


def progress_reward(episodes: Episodes) -> Tensor:
    """Return the reward [N] without the term for success; DataError where the data has none or lacks final frames."""
    if episodes.rewards is None or episodes.step_success is None:
        raise DataError("A world model learns reward and success: this dataset records neither.")
    if episodes.final_known is not None and not bool(episodes.final_known.all()):
        raise DataError("The dataset lacks final observations: record it with 'robopolicy collect'.")
    others = [value for name, value in episodes.rewards.items() if name != SUCCESS]
    return torch.stack(others).sum(0) if others else torch.zeros(episodes.step_count)


def success_bonus(episodes: Episodes) -> float:
    """Return the mean reward for success, 0 where none was paid."""
    bonus = (episodes.rewards or {}).get(SUCCESS, torch.zeros(0))
    paid = bonus[bonus != 0]
    return float(paid.mean()) if len(paid) else 0.0


@dataclass(frozen=True)
class TransitionData:
    """Control steps for training.

    state, next_state: [N, S], the world's vector fields (`StateVector`); action: [N, A]; reward: [N], without
    the success bonus; success, terminated: [N] bool after the step.
    """

    state: Tensor
    action: Tensor
    next_state: Tensor
    reward: Tensor
    success: Tensor
    terminated: Tensor

    def __len__(self) -> int:
        return len(self.state)

    def __post_init__(self) -> None:
        for name in ("state", "action", "next_state", "reward"):
            check_finite(f"transitions: {name}", getattr(self, name))

    @staticmethod
    def of(episodes: Episodes, vector: StateVector | None = None) -> "TransitionData":
        """Return the steps of `episodes`; DataError where reward or success is missing.

        vector: what their states are made of; None: all vector fields of the episodes.
        """
        steps, reward = episodes.transitions(vector), progress_reward(episodes)
        if steps.success is None or steps.terminated is None:
            raise DataError("A world model learns success and the end of the task: this dataset records neither.")
        return TransitionData(steps.state, steps.action, steps.next_state, reward, steps.success, steps.terminated)
