"""An exponential moving average of past policies, to clip around where the policy that acted is long gone.

Source: PPO-EWMA, Hilton et al. 2022, arXiv:2110.00641; taken up for asynchronous collection where old log-probabilities
are missing by Missing Old Logits, arXiv:2605.12070.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from robopolicy.core.policy import ScoredPolicy, TensorObservation, Trainable
from robopolicy.nn.pieces import scores_of
from robopolicy.nn.sharing import copied


class PolicyAverage:
    """The average of the weights after every update, the newest with weight 1, each earlier one `decay` of its next.

        mean_n = sum_i decay^(n - i) w_i / sum_i decay^(n - i),   i = 0 (the policy as it came) .. n

    decay: in [0, 1), 0 is the policy itself; its centre of mass lies decay / (1 - decay) updates back.
    """

    def __init__(self, policy: Trainable, decay: float):
        self.decay, self.total = decay, 1.0
        mean = copied(policy)
        self._learning = [weight for weight in mean.parameters() if weight.requires_grad]
        self._mean: Trainable = mean.requires_grad_(False).eval()
        self._before: tuple[float, list[Tensor]] | None = None

    @property
    def policy(self) -> ScoredPolicy:
        """The average, frozen."""
        return self._mean

    def log_prob(self, observation: TensorObservation, latents: Mapping[str, Tensor]) -> Tensor:
        """Return the log-probabilities [N, K] of recorded decisions under the average, without gradient."""
        with torch.no_grad():
            return scores_of(self._mean, observation, latents).logp

    @torch.no_grad()
    def update(self, policy: Trainable) -> None:
        """Take in the weights after an update."""
        self._before = self.total, [weight.clone() for weight in self._learning]
        self.total = self.decay * self.total + 1
        learning = (weight for weight in policy.parameters() if weight.requires_grad)
        for mean, weight in zip(self._learning, learning, strict=True):
            mean.lerp_(weight, 1 / self.total)

    @torch.no_grad()
    def take_back(self) -> None:
        """Undo the last update, if there is one."""
        if self._before is None:
            return
        self.total, weights = self._before
        for mean, before in zip(self._learning, weights, strict=True):
            mean.copy_(before)
        self._before = None

    def tree(self) -> dict[str, Any]:
        """Return everything that changes, for a checkpoint."""
        return {"total": self.total, "policy": self._mean.state_dict()}

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Go on from `tree`."""
        self.total = tree["total"]
        self._mean.load_state_dict(tree["policy"])
