"""TD3+BC: a deterministic actor that climbs Q and stays with the data (Fujimoto & Gu 2021, arXiv:2106.06860)."""

from torch import Tensor

from robopolicy.core.transitions import Transitions
from robopolicy.rl.offline.configuration import Td3BcConfig
from robopolicy.rl.offline.td3 import Td3, climb_and_stay


class Td3Bc(Td3):
    """The agent; actions are in [-1, 1]."""

    config: Td3BcConfig

    def actor_loss(self, batch: Transitions, action: Tensor) -> Tensor:
        """Return -alpha Q1 / mean|Q1| + (pi - a)^2, [], for what the actor would do, [B, A]; means over all."""
        return climb_and_stay(self.critics(batch.state, action)[0], action, batch.action, self.config.alpha)
