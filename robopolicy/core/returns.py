"""Returns from recorded rewards: progress, success bonus and returns-to-go."""

import torch
from torch import Tensor

from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import DataError

SUCCESS = "success"
"""Name of the reward term for success."""

PROGRESS = "progress"
"""Name of the sum of all other reward terms."""


def progress_reward(episodes: Episodes) -> Tensor:
    """Return the reward [N] without the success term; DataError when the data has no rewards or lacks final frames."""
    if episodes.rewards is None or episodes.step_success is None:
        is_absent = {"next.reward": episodes.rewards is None, "next.success": episodes.step_success is None}
        columns = " and ".join(name for name, lacks in is_absent.items() if lacks)
        raise DataError(f"Training a world model needs rewards and success, but the dataset lacks {columns}.")
    if episodes.final_known is not None and not bool(episodes.final_known.all()):
        raise DataError("The dataset lacks final observations: record it again with 'robopolicy collect'.")
    terms = [value for name, value in episodes.rewards.items() if name != SUCCESS]
    return torch.stack(terms).sum(0) if terms else torch.zeros(episodes.step_count)


def success_bonus(episodes: Episodes) -> float:
    """Return the mean reward for success, 0 if there is none."""
    bonus = (episodes.rewards or {}).get(SUCCESS, torch.zeros(0))
    bonuses = bonus[bonus != 0]
    return float(bonuses.mean()) if len(bonuses) else 0.0


def discounted_sums(reward: Tensor, discount: Tensor, goes_on: Tensor) -> Tensor:
    """Return G_t = R_t + discount_t G_{t+1} if the episode continues after t, else R_t; all [B, T].

    Rewards after the last column count as zero.
    """
    following = torch.zeros_like(reward[:, 0])
    columns: list[Tensor] = []
    for column in reversed(range(reward.shape[1])):
        following = reward[:, column] + discount[:, column] * following * goes_on[:, column]
        columns.append(following)
    return torch.stack(columns[::-1], 1)


def returns_to_go(reward: Tensor, episodes: Episodes, discount: float) -> Tensor:
    """Return sum_{s >= t} discount^(s - t) reward_s within each episode, [N], of rewards [N]; summed in fp64."""
    place = torch.arange(len(reward)) - episodes.starts[episodes.episode_of_step]
    table = torch.zeros(len(episodes), int(episodes.lengths.max()), dtype=torch.float64)
    table[episodes.episode_of_step, place] = reward.double()
    goes_on = torch.arange(1, table.shape[1] + 1) < episodes.lengths[:, None]
    sums = discounted_sums(table, torch.full_like(table, discount), goes_on)
    return sums[episodes.episode_of_step, place].float()
