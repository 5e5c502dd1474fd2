"""What one log-probability ratio is about: a step, an action, a decision or an episode."""

from enum import Enum


class RatioLevel(Enum):
    """What one ratio is about, and whether the steps inside share the sum or the mean of their log-ratios.

    step: every step by itself (PPO on tokens, DPPO); action: the tokens of one control step (Rank-GRPO); decision: the
    whole chunk (ReinFlow, FPO); episode: everything (GSPO uses episode_mean).
    """

    STEP = "step"
    ACTION_SUM = "action_sum"
    ACTION_MEAN = "action_mean"
    DECISION_SUM = "decision_sum"
    DECISION_MEAN = "decision_mean"
    EPISODE_SUM = "episode_sum"
    EPISODE_MEAN = "episode_mean"

    @property
    def needs_all_steps(self) -> bool:
        """Whether a random choice of a decision's steps says something else: a sum, or which action a token is of."""
        return self not in (RatioLevel.STEP, RatioLevel.DECISION_MEAN, RatioLevel.EPISODE_MEAN)

    @property
    def shares_sums(self) -> bool:
        """Whether each of several steps holds the sum of all their log-ratios: who sums them again counts too much."""
        return self in (RatioLevel.ACTION_SUM, RatioLevel.DECISION_SUM, RatioLevel.EPISODE_SUM)

    @property
    def whole_episodes(self) -> bool:
        """Whether minibatches must hold whole episodes."""
        return self in (RatioLevel.EPISODE_SUM, RatioLevel.EPISODE_MEAN)
