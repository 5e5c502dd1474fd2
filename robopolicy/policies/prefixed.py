"""Steps of a network that is given the beginning of its plan. Axes: B row, P predicted step, A action dimension."""

from torch import Tensor

from robopolicy.nn.prefix import with_prefix
from robopolicy.policies.network import Steps


class PrefixedSteps:
    """`Steps` of a network that is given the first count[b] [B] steps of `clean` [B, P, A], normalised actions."""

    def __init__(self, steps: Steps, clean: Tensor, count: Tensor):
        self.steps, self.clean, self.count = steps, clean, count

    def one(self, x: Tensor, step: int) -> Tensor:
        """Predict [B, P, A] of latents x [B, P, A] about to take `step`, whose given steps are not looked at."""
        return self.steps.one(with_prefix(x, self.clean, self.count), step)

    def several(self, x: Tensor, chosen: Tensor | None) -> Tensor:
        """Predict [B, k, P, A] as the network does when it is given nothing: what is scored."""
        return self.steps.several(x, chosen)
