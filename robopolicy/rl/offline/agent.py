"""What every agent that learns from batches does alike: how it is asked, and how it is saved."""

import copy
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from robopolicy.core.candidates import ScoreCandidates
from robopolicy.core.policy import TensorObservation
from robopolicy.core.transitions import Transitions
from robopolicy.nn.optimisers import optimiser_tree, restore_optimiser
from robopolicy.rl.offline.interface import Interface
from robopolicy.rl.offline.networks import Critics


class OfflineAgent(torch.nn.Module, ABC):
    """A critic and an actor with the optimisers that move them, by name; `config` has the discount of a step.

    States are vectors [N, S], actions vectors [N, A] in [-1, 1]: of one step, or of a whole chunk laid out flat. It is
    made by Class(config, state, action, seed) with the sizes S and A.
    """

    config: Any
    critics: Critics
    optimisers: dict[str, torch.optim.Optimizer]

    @abstractmethod
    def fit_statistics(self, state: Tensor) -> None:
        """Standardise states as these [N, S] are, everywhere alike; nothing else about them is learned."""

    def begin(self, data: Transitions) -> None:
        """Learn from `data` from now on: N transitions, states [N, S], actions [N, A] in [-1, 1].

        Called once before the first update, again after `restore` with the same data (which is not saved), and where
        the data has changed. Raises DataError where the data lacks what this agent learns from.
        """
        self.fit_statistics(data.state)

    @abstractmethod
    def update(self, batch: Transitions, generator: torch.Generator) -> dict[str, Tensor]:
        """Take one step of everything on transitions [N]; returns figures by name, scalars."""

    @abstractmethod
    def act(self, state: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return actions [N, A], without noise where there is no generator."""

    @abstractmethod
    def value(self, state: Tensor) -> Tensor:
        """Return what it expects to earn from states [N, S] on, [N]."""

    def action_values(self, state: Tensor, action: Tensor) -> Tensor:
        """Return every critic's Q [M, N], differentiable in the actions; their smallest is what agents trust."""
        return self.critics(state, action)

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
        """Return a copy of weights and moments, as files can hold it."""
        moments = {name: optimiser_tree(each) for name, each in self.optimisers.items()}
        return copy.deepcopy({"weights": dict(self.state_dict()), "optimisers": moments})

    def restore(self, tree: dict[str, Any]) -> None:
        """Go on from `tree`."""
        self.load_state_dict(tree["weights"])
        for name, optimiser in self.optimisers.items():
            restore_optimiser(optimiser, tree["optimisers"][name])


def smallest_value(critic: OfflineAgent, interface: Interface) -> ScoreCandidates:
    """Return what scores candidates, chunks [N, C, A] in the world's units, by the smallest member of `critic`, [N]."""

    def score(several: TensorObservation, actions: Tensor) -> Tensor:
        return critic.action_values(interface.state(several), interface.to_agent(actions)).amin(0)

    return score
