"""Steps as `LatentHeads` judge them: what they earn and whether they succeed, by the statistics of the data."""

from collections.abc import Mapping

import torch
from torch import Tensor

from robopolicy.core.returns import PROGRESS, SUCCESS
from worldmodels.data.statistics import Standardised
from worldmodels.heads.latent import LatentHeads
from worldmodels.heads.outputs import calibrated_threshold, quantiles_of
from worldmodels.protocol import Imagined


class Judged(Standardised):
    """A module with the buffers that turn what heads say into rewards, success and a calibrated uncertainty.

    success_bonus: the reward for reaching success. Change is the state's in one step.
    """

    success_bonus: float
    change_std: Tensor
    reward_mean: Tensor
    reward_std: Tensor
    success_threshold: Tensor
    uncertainty_quantiles: Tensor

    def register_thresholds(self) -> None:
        """Make the buffers that `set_thresholds` fills."""
        self.register_buffer("success_threshold", torch.zeros(()))
        self.register_buffer("uncertainty_quantiles", torch.zeros(101))

    def keep_scales(self, heads: LatentHeads) -> None:
        """Let `heads` know the units of states and rewards, once the statistics are known."""
        heads.keep_scales(self.state_std / self.change_std, self.reward_mean / self.reward_std)

    def standard_reward(self, reward: Tensor) -> Tensor:
        """Return rewards [...], in the world's units, in standard deviations from their mean."""
        return (reward - self.reward_mean) / self.reward_std

    @torch.no_grad()
    def set_thresholds(
        self, heads: LatentHeads, inputs: Tensor, reward: Tensor, success: Tensor, uncertainty: Tensor
    ) -> None:
        """Set the threshold of success, the quantiles of the uncertainty and what is paid on N held-out steps.

        inputs: [N, F], what the heads read; reward: [N], in standard deviations; success: [N] bool; uncertainty: [N].
        """
        heads.choose_reward(inputs, reward)
        self.success_threshold.copy_(calibrated_threshold(heads.success(inputs), success))
        self.uncertainty_quantiles.copy_(quantiles_of(uncertainty))

    def judged(
        self, heads: LatentHeads, inputs: Tensor, observation: Mapping[str, Tensor], uncertainty: Tensor
    ) -> Imagined:
        """Return one imagined step; success is terminal where the spec says so.

        inputs: [B, F], what the heads read; observation: key -> [B, *shape]; uncertainty: [B]. Rewards come out in the
        world's units.
        """
        success = heads.success(inputs) > self.success_threshold
        rewards = {
            PROGRESS: self.reward_mean + self.reward_std * heads.rewards(inputs),
            SUCCESS: self.success_bonus * success.to(inputs.dtype),
        }
        return Imagined(observation, rewards, success, torch.zeros_like(success), uncertainty)
