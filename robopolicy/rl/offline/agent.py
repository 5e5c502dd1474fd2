"""What every agent that learns from batches is saved by."""

import copy
from typing import Any

import torch
from torch import Tensor


class OfflineAgent(torch.nn.Module):
    """Networks with the optimisers that move them, by name; `config` has the discount of a step."""

    config: Any
    optimisers: dict[str, torch.optim.Optimizer]

    @property
    def discount(self) -> float:
        """What a reward is worth one step later."""
        return self.config.discount

    def step(self, name: str, loss: Tensor) -> None:
        """Take one step of an optimiser down the gradient of `loss` [], a scalar; it reaches no other weights."""
        optimiser = self.optimisers[name]
        optimiser.zero_grad()
        own = [parameter for group in optimiser.param_groups for parameter in group["params"]]
        loss.backward(inputs=own)  # pyright: ignore[reportUnknownMemberType]
        optimiser.step()

    def tree(self) -> dict[str, Any]:
        """Return a copy of weights and moments."""
        moments = {name: each.state_dict() for name, each in self.optimisers.items()}
        return copy.deepcopy({"weights": dict(self.state_dict()), "optimisers": moments})

    def restore(self, tree: dict[str, Any]) -> None:
        """Go on from `tree`."""
        self.load_state_dict(tree["weights"])
        for name, optimiser in self.optimisers.items():
            optimiser.load_state_dict(tree["optimisers"][name])
