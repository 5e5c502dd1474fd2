"""Side models, trained together with the policy, that provide more information than the outcome: base classes, and
per-step rewards.

Process rewards, progress, action values: most are in `rl.experimental`. The protocol of a side model is
`robopolicy.rl.context.SideModel`: `annotate(rollouts, context) -> rollouts` trains on the rollouts and then adds its
predictions to their extras or rewards; `tree()` and `restore(tree)` save and restore its state.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from robopolicy.core.modules import Weights
from robopolicy.core.policy import ScoredPolicy, Trainable
from robopolicy.core.rollouts import Rollouts, critic_observation
from robopolicy.core.segments import Segments
from robopolicy.nn.optimisers import optimiser_tree, restore_optimiser
from robopolicy.nn.sharing import copy_trainable
from robopolicy.rl.advantages.tree import sampled_steps
from robopolicy.rl.context import Context, Tools, require_input
from robopolicy.rl.critic import StateFeatures
from robopolicy.rl.registry import Need, Slot, mechanism


class SideNetwork[N: Weights]:
    """A network (type N) with its Adam optimiser."""

    def __init__(self, network: N, rate: float):
        self.network = network
        self.weights = [weight for weight in network.parameters() if weight.requires_grad]
        self.optimiser = torch.optim.Adam(self.weights, lr=rate)

    def step(self, loss: Tensor) -> None:
        """Take one gradient step on a scalar `loss` [], with the gradient norm clipped to 1."""
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()  # pyright: ignore[reportUnknownMemberType]
        torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.optimiser.step()  # pyright: ignore[reportUnknownMemberType]

    def tree(self) -> dict[str, Any]:
        """Return weights and optimiser moments."""
        return {"network": self.network.state_dict(), "moments": optimiser_tree(self.optimiser)}

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Restore the state from `tree`."""
        self.network.load_state_dict(tree["network"])
        restore_optimiser(self.optimiser, tree["moments"])


class StatePerceptron(nn.Module):
    """MLP with Mish from `StateFeatures` and `extra` more inputs to `outputs` numbers."""

    def __init__(self, tools: Tools, extra: int, outputs: int, width: int):
        super().__init__()
        self.features = StateFeatures(tools.fields, tools.history, tools.instructions)
        self.layers = nn.Sequential(
            nn.Linear(self.features.features + extra, width), nn.Mish(), nn.Linear(width, width), nn.Mish()
        )
        self.head = nn.Linear(width, outputs)
        self.fitted = False

    def fit(self, rollouts: Rollouts) -> None:
        """Fit the standardisation of the state, on the first call only."""
        if not self.fitted:
            self.features.fit(critic_observation(rollouts, rollouts.alive))
            self.fitted = True

    def forward(self, observation: Mapping[str, Any], *extra: Tensor) -> Tensor:
        """Return outputs [N, outputs] for an observation [N, H, ...] and further inputs, each [N, ...]."""
        return self.head(self.layers(torch.cat([self.features(observation), *extra], -1)))


class SidePerceptron(SideNetwork[StatePerceptron]):
    """A `SideNetwork` with one MLP; whether its inputs are standardised is part of its state."""

    def tree(self) -> dict[str, Any]:
        """Return weights, moments and whether the inputs are standardised."""
        return {**super().tree(), "fitted": self.network.fitted}

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Restore the state from `tree`."""
        super().restore(tree)
        self.network.fitted = tree["fitted"]


def minibatches(count: int, size: int, epochs: int, context: Context) -> Iterator[Tensor]:
    """Yield the indices [<= size] of minibatches of `count` rows, reshuffled every epoch; nothing for zero rows."""
    for _ in range(epochs if count else 0):
        order = torch.randperm(count, generator=context.generator, device=context.generator.device)
        yield from torch.split(order, size)


def mixed_groups(rollouts: Rollouts, outcome: Tensor) -> Tensor:
    """Return a mask of rows in groups with different outcomes, [B] bool; outcome: [B]."""
    groups = Segments.of(rollouts.group)
    return (groups.maximum(outcome) - groups.minimum(outcome))[groups.index] > 1e-6


def succeeds_later(rollouts: Rollouts) -> Tensor:
    """Return whether an episode succeeds during a chunk or later, before it ends, [B, T] bool."""
    succeeds = torch.zeros_like(rollouts.success[:, 0])
    columns: list[Tensor] = []
    for column in reversed(range(rollouts.shape[1])):
        succeeds = (rollouts.success[:, column] & rollouts.alive[:, column]) | (succeeds & ~rollouts.ended[:, column])
        columns.append(succeeds)
    return torch.stack(columns[::-1], 1)


def rows_of(observation: Mapping[str, Tensor], index: Tensor) -> dict[str, Tensor]:
    """Select the rows index [n] of every field."""
    return {key: value[index] for key, value in observation.items()}


def device_of(tools: Tools) -> torch.device:
    """Return the device of the policy, on which its side models are placed."""
    return next(tools.policy.parameters()).device


class ImplicitReward(SideNetwork[Trainable]):
    """r = beta (log phi - log reference) of every step, with phi a copy of the policy trained on outcomes only.

    The reference is the frozen base policy, or what a model's `reference` returns.

    Adds extras["process"] [B, T, K]. The sum over an episode is its success logit (Rafailov et al. 2024,
    arXiv:2404.12358: a log-ratio is an advantage). The same holds for denoising chains with transition densities.
    """

    def __init__(self, tools: Tools, beta: float, rate: float, epochs: int, minibatch: int):
        phi = copy_trainable(tools.policy)
        super().__init__(phi, rate)
        self.tools = tools
        self.beta = beta
        self.epochs = epochs
        self.minibatch = minibatch

    def annotate(self, rollouts: Rollouts, context: Context) -> Rollouts:
        """Train on the outcomes, then add the rewards of the updated model (PRIME's order).

        Only groups with different outcomes are used, as in PRIME's online filter: if all episodes of an initial state
        have the same outcome, it is not informative about their chunks.
        """
        sampled = sampled_steps(rollouts)
        with torch.no_grad():
            reference = self._logp(self.reference(), rollouts, sampled)
        telling = mixed_groups(rollouts, self.outcome(rollouts)).nonzero().squeeze(-1)
        for places in minibatches(len(telling), self.minibatch, self.epochs, context):
            index = telling[places]
            part = rollouts.take(index)
            # The logit of success is the sum over all steps, so no single step is told what it was worth.
            logits = self.beta * (self._logp(self.network, part, sampled[index]) - reference[index]).sum((1, 2))
            loss = self.loss(logits, part)
            # A minibatch without two different outcomes may have no loss (OPRL).
            if loss.requires_grad:
                self.step(loss)
        with torch.no_grad():
            process = self.beta * (self._logp(self.network, rollouts, sampled) - reference)
            total = process.sum((1, 2))
            row_success = rollouts.row_success
            right = ((total > total.mean()) == row_success).float().mean()
            if bool(row_success.all()) or not bool(row_success.any()):
                right = torch.full_like(right, torch.nan)  # where all end alike there is nothing to tell apart
        return rollouts.with_extras(process=process, process_accuracy=right.expand(rollouts.shape))

    def loss(self, logits: Tensor, rollouts: Rollouts) -> Tensor:
        """Return the loss of episode logits [b], a scalar; raises NotImplementedError here because each model defines
        its own.
        """
        raise NotImplementedError

    def reference(self) -> ScoredPolicy:
        """Return the policy that phi is compared with."""
        return require_input(self.tools.base, "base")

    def outcome(self, rollouts: Rollouts) -> Tensor:
        """Return the outcome by which groups are mixed, [B]: the return."""
        return rollouts.row_return

    def _logp(self, policy: ScoredPolicy, rollouts: Rollouts, sampled: Tensor) -> Tensor:
        """Log-probabilities of the `sampled` steps [b, t, K], those of copied prefixes too, [b, t, K], 0 elsewhere."""
        alive = rollouts.alive
        logp = self.tools.score(policy, rollouts, alive).logp
        return torch.where(sampled, logp.new_zeros(rollouts.mask.shape).index_put((alive,), logp), 0.0)


@mechanism(
    Slot.MODEL, "prime", source="PRIME, arXiv:2502.01456", needs=(Need.EPISODES, Need.BASE), gives=(Need.IMPLICIT,)
)
class Prime(ImplicitReward):
    """Dense rewards from success labels only: an implicit reward trained online with cross-entropy on outcomes.

    L = CE(sigmoid(beta sum (log phi - log base)), success); use it with advantage=process_rloo. beta: the paper's 0.05
    is for sums over many tokens; denoising log-probabilities that are means over dimensions need more.
    """

    def __init__(self, tools: Tools, *, beta: float = 0.05, rate: float = 1e-4, epochs: int = 1, minibatch: int = 64):
        super().__init__(tools, beta, rate, epochs, minibatch)

    def outcome(self, rollouts: Rollouts) -> Tensor:
        """Return the success [B]: dense rewards that differ tell nothing about a group that failed altogether."""
        return rollouts.row_success.double()

    def loss(self, logits: Tensor, rollouts: Rollouts) -> Tensor:
        """Return the cross-entropy of logits [b], a scalar."""
        return functional.binary_cross_entropy_with_logits(logits, rollouts.row_success.to(logits.dtype))
