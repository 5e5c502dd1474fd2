"""Models learned beside the policy that say more than an outcome does: process rewards, progress, action values.

A model is a class with `annotate(rollouts, context) -> rollouts`, which learns from the rollouts and then adds what it
has to say to their extras or rewards; `tree()` and `restore(tree)` carry it over a restart.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from robopolicy.core.policy import Scores, TensorObservation
from robopolicy.core.rollouts import Rollouts, visible
from robopolicy.core.segments import Segments
from robopolicy.core.spec import Field
from robopolicy.rl.context import Context
from robopolicy.rl.critic import StateFeatures


@dataclass(frozen=True)
class Tools:
    """What a model may build on.

    policy: what is fine-tuned; base: a frozen copy of what it came from; teacher: another policy or None; fields: what
    the world shows, by key; history: H frames; instructions: of the world; observe: (rollouts, where [B, T]) -> the
    observation that a policy is given; score: (policy, rollouts, where [B, T]) -> differentiable scores of the n
    decisions `where`.
    """

    policy: Any
    base: Any
    teacher: Any
    fields: Mapping[str, Field]
    history: int
    instructions: tuple[str, ...]
    observe: Callable[[Rollouts, Tensor], TensorObservation]
    score: Callable[[Any, Rollouts, Tensor], Scores]


class SideModel(Protocol):
    """See the module."""

    def annotate(self, rollouts: Rollouts, context: Context) -> Rollouts:
        """Learn from the rollouts, then add to their extras or rewards."""
        ...

    def tree(self) -> dict[str, Any]:
        """Return what `restore` needs."""
        ...

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Go on from `tree`."""
        ...


class _Learned:
    """A network with its Adam optimiser, and minibatches of rows."""

    def __init__(self, network: nn.Module, rate: float):
        self.network = network
        self.weights = [weight for weight in network.parameters() if weight.requires_grad]
        self.optimiser = torch.optim.Adam(self.weights, lr=rate)

    def step(self, loss: Tensor) -> None:
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.optimiser.step()

    def tree(self) -> dict[str, Any]:
        """Return weights and the optimiser's moments."""
        moments = {str(key): value for key, value in self.optimiser.state_dict()["state"].items()}
        return {"network": self.network.state_dict(), "moments": moments}

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Go on from `tree`."""
        self.network.load_state_dict(tree["network"])
        state = self.optimiser.state_dict()
        self.optimiser.load_state_dict({**state, "state": {int(key): value for key, value in tree["moments"].items()}})


def _batches(count: int, size: int, epochs: int, context: Context) -> Iterator[Tensor]:
    for _ in range(epochs):
        yield from torch.randperm(count, generator=context.generator, device=context.generator.device).split(size)


class _Perceptron(nn.Module):
    """`StateFeatures` and more inputs through an MLP with Mish to `outputs` numbers."""

    def __init__(self, tools: Tools, extra: int, outputs: int, width: int):
        super().__init__()
        self.features = StateFeatures(tools.fields, tools.history, tools.instructions)
        self.layers = nn.Sequential(
            nn.Linear(self.features.features + extra, width), nn.Mish(), nn.Linear(width, width), nn.Mish()
        )
        self.head = nn.Linear(width, outputs)
        self.fitted = False

    def fit(self, rollouts: Rollouts) -> None:
        if not self.fitted:
            self.features.fit(visible(rollouts, rollouts.alive))
            self.fitted = True

    def forward(self, observation: Mapping[str, Any], *extra: Tensor) -> Tensor:
        return self.head(self.layers(torch.cat([self.features(observation), *extra], -1)))


def mixed_groups(rollouts: Rollouts) -> Tensor:
    """Return which rows are of groups in which some episodes did better than others, [B] bool."""
    groups = Segments.of(rollouts.group)
    return (groups.maximum(rollouts.row_return) - groups.minimum(rollouts.row_return))[groups.index] > 1e-6


def succeeds_later(rollouts: Rollouts) -> Tensor:
    """Return whether an episode succeeds at a decision or after it, before it ends, [B, T] bool."""
    won = torch.zeros_like(rollouts.success[:, 0])
    columns = []
    for column in reversed(range(rollouts.shape[1])):
        won = (rollouts.success[:, column] & rollouts.alive[:, column]) | (won & ~rollouts.ended[:, column])
        columns.append(won)
    return torch.stack(columns[::-1], 1)


def _take(observation: Mapping[str, Tensor], index: Tensor) -> dict[str, Tensor]:
    return {key: value[index] for key, value in observation.items()}


def _device(tools: Tools) -> torch.device:
    return next(tools.policy.parameters()).device


def _unknown(option: str, value: str, known: tuple[str, ...]) -> Exception:
    from robopolicy.core.errors import ConfigError, did_you_mean

    return ConfigError(f"finetune.options.{option}={value} is not known.{did_you_mean(value, known)}")
