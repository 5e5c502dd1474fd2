"""Rewards of every step from a policy trained on outcomes alone (PRIME; OPRL: `rl.experimental`)."""

import torch
from torch import Tensor
from torch.nn import functional

from robopolicy.core.policy import ScoredPolicy, Trainable
from robopolicy.core.rollouts import Rollouts
from robopolicy.nn.sharing import copied
from robopolicy.rl.context import Context, Tools, given
from robopolicy.rl.registry import Need, Slot, mechanism
from robopolicy.rl.side_models.base import SideNetwork, minibatches, mixed_groups


class ImplicitReward(SideNetwork[Trainable]):
    """r = beta (log phi - log base) of every step, where phi is a copy of the policy trained on outcomes alone.

    Adds extras["process"] [B, T, K]. The sum over an episode is its logit of success (Rafailov et al. 2024,
    arXiv:2404.12358: a log-ratio is an advantage). On denoising chains the same holds with transition densities.
    """

    def __init__(self, tools: Tools, beta: float, rate: float, epochs: int, minibatch: int):
        phi = copied(tools.policy)
        super().__init__(phi, rate)
        self.tools = tools
        self.beta = beta
        self.epochs = epochs
        self.minibatch = minibatch

    def annotate(self, rollouts: Rollouts, context: Context) -> Rollouts:
        """Learn from the outcomes, then add the rewards of the model as it is now (PRIME's order).

        Only groups with different outcomes teach, as in PRIME's online filter: what is common to a start's episodes
        says nothing about its decisions.
        """
        with torch.no_grad():
            reference = self._logp(given(self.tools.base, "base"), rollouts)
        telling = mixed_groups(rollouts).nonzero().squeeze(-1)
        for places in minibatches(len(telling), self.minibatch, self.epochs, context):
            index = telling[places]
            part = rollouts.take(index)
            # The logit of success is the sum over all steps, so no single step is told what it was worth.
            logits = self.beta * (self._logp(self.network, part) - reference[index]).sum((1, 2))
            loss = self.loss(logits, part)
            # A minibatch without two different outcomes may have no loss (OPRL).
            if loss.requires_grad:
                self.step(loss)
        with torch.no_grad():
            process = self.beta * (self._logp(self.network, rollouts) - reference)
            total = process.sum((1, 2))
            won = rollouts.row_success
            right = ((total > total.mean()) == won).float().mean()
            if bool(won.all()) or not bool(won.any()):
                right = torch.full_like(right, torch.nan)  # where all end alike there is nothing to tell apart
        return rollouts.with_extras(process=process, process_accuracy=right.expand(rollouts.shape))

    def loss(self, logits: Tensor, rollouts: Rollouts) -> Tensor:
        """Return the loss of episode logits [b], a scalar; raises NotImplementedError here, each model has its own."""
        raise NotImplementedError

    def _logp(self, policy: ScoredPolicy, rollouts: Rollouts) -> Tensor:
        """Log-probabilities of all that was done, copied prefixes included, [b, t, K], 0 on padding."""
        alive = rollouts.alive
        logp = self.tools.score(policy, rollouts, alive).logp
        return logp.new_zeros(rollouts.mask.shape).index_put((alive,), logp)


@mechanism(
    Slot.MODEL, "prime", source="PRIME, arXiv:2502.01456", needs=(Need.EPISODES, Need.BASE), gives=(Need.IMPLICIT,)
)
class Prime(ImplicitReward):
    """Dense rewards from success labels alone: an implicit reward trained online with the outcomes' cross-entropy.

    L = CE(sigmoid(beta sum (log phi - log base)), success); use it with advantage=process_rloo. beta: the paper's is
    0.05 for sums over many tokens; denoising log-probabilities that are means over dimensions need more.
    """

    def __init__(self, tools: Tools, *, beta: float = 0.05, rate: float = 1e-4, epochs: int = 1, minibatch: int = 64):
        super().__init__(tools, beta, rate, epochs, minibatch)

    def loss(self, logits: Tensor, rollouts: Rollouts) -> Tensor:
        """Return the cross-entropy of logits [b], a scalar."""
        return functional.binary_cross_entropy_with_logits(logits, rollouts.row_success.to(logits.dtype))
