"""What side models share: a network with its optimiser, a perceptron over the state, and what outcomes say.

A side model is learned beside the policy and says more than an outcome does: process rewards, progress, action values.
Its protocol is `robopolicy.rl.context.SideModel`: `annotate(rollouts, context) -> rollouts` learns from the rollouts
and then adds what it has to say to their extras or rewards; `tree()` and `restore(tree)` carry it over a restart.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from robopolicy.core.modules import Weights
from robopolicy.core.rollouts import Rollouts, visible
from robopolicy.core.segments import Segments
from robopolicy.nn.optimisers import optimiser_tree, restore_optimiser
from robopolicy.rl.context import Context, Tools
from robopolicy.rl.critic import StateFeatures


class SideNetwork[N: Weights]:
    """A network of kind N with its Adam optimiser."""

    def __init__(self, network: N, rate: float):
        self.network = network
        self.weights = [weight for weight in network.parameters() if weight.requires_grad]
        self.optimiser = torch.optim.Adam(self.weights, lr=rate)

    def step(self, loss: Tensor) -> None:
        """Take one step down the gradient of a scalar, `loss` [], its norm bounded by 1."""
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()  # pyright: ignore[reportUnknownMemberType]
        torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.optimiser.step()  # pyright: ignore[reportUnknownMemberType]

    def tree(self) -> dict[str, Any]:
        """Return weights and the optimiser's moments."""
        return {"network": self.network.state_dict(), "moments": optimiser_tree(self.optimiser)}

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Go on from `tree`."""
        self.network.load_state_dict(tree["network"])
        restore_optimiser(self.optimiser, tree["moments"])


class StatePerceptron(nn.Module):
    """`StateFeatures` and `extra` more inputs through an MLP with Mish to `outputs` numbers."""

    def __init__(self, tools: Tools, extra: int, outputs: int, width: int):
        super().__init__()
        self.features = StateFeatures(tools.fields, tools.history, tools.instructions)
        self.layers = nn.Sequential(
            nn.Linear(self.features.features + extra, width), nn.Mish(), nn.Linear(width, width), nn.Mish()
        )
        self.head = nn.Linear(width, outputs)
        self.fitted = False

    def fit(self, rollouts: Rollouts) -> None:
        """Fit the standardisation of the state, at the first call only."""
        if not self.fitted:
            self.features.fit(visible(rollouts, rollouts.alive))
            self.fitted = True

    def forward(self, observation: Mapping[str, Any], *extra: Tensor) -> Tensor:
        """Return [N, outputs] of an observation [N, H, ...] and further inputs, each [N, ...]."""
        return self.head(self.layers(torch.cat([self.features(observation), *extra], -1)))


class SidePerceptron(SideNetwork[StatePerceptron]):
    """A `SideNetwork` that is one perceptron; whether its inputs are standardised is part of its state."""

    def tree(self) -> dict[str, Any]:
        """Return weights, moments and whether the inputs are standardised."""
        return {**super().tree(), "fitted": self.network.fitted}

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Go on from `tree`."""
        super().restore(tree)
        self.network.fitted = tree["fitted"]


def minibatches(count: int, size: int, epochs: int, context: Context) -> Iterator[Tensor]:
    """Yield the indices [<= size] of minibatches of `count` rows, in a fresh order every epoch; none of no rows."""
    for _ in range(epochs if count else 0):
        order = torch.randperm(count, generator=context.generator, device=context.generator.device)
        yield from torch.split(order, size)


def mixed_groups(rollouts: Rollouts) -> Tensor:
    """Return which rows are of groups in which some episodes did better than others, [B] bool."""
    groups = Segments.of(rollouts.group)
    return (groups.maximum(rollouts.row_return) - groups.minimum(rollouts.row_return))[groups.index] > 1e-6


def succeeds_later(rollouts: Rollouts) -> Tensor:
    """Return whether an episode succeeds at a decision or after it, before it ends, [B, T] bool."""
    won = torch.zeros_like(rollouts.success[:, 0])
    columns: list[Tensor] = []
    for column in reversed(range(rollouts.shape[1])):
        won = (rollouts.success[:, column] & rollouts.alive[:, column]) | (won & ~rollouts.ended[:, column])
        columns.append(won)
    return torch.stack(columns[::-1], 1)


def rows_of(observation: Mapping[str, Tensor], index: Tensor) -> dict[str, Tensor]:
    """Return the rows index [n] of every field."""
    return {key: value[index] for key, value in observation.items()}


def device_of(tools: Tools) -> torch.device:
    """Return where the policy is, and a model beside it should be."""
    return next(tools.policy.parameters()).device
