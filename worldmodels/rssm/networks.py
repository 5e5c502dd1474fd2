"""What a recurrent state-space model is made of: categorical latents, a block GRU, two-hot heads, image networks.

After DreamerV3 (Hafner et al. 2023, arXiv:2301.04104). Axes: N rows, D deterministic units, S categoricals of C
classes.
"""

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional

from robopolicy.core.errors import ConfigError
from robopolicy.nn.blocks import dense, perceptron


def unimixed(logits: Tensor, share: float) -> Tensor:
    """Return log-probabilities [..., C] of the softmax of `logits` mixed with `share` of the uniform distribution."""
    # Every class keeps share / C, so log-probabilities and KL stay finite when the two distributions disagree.
    return ((1 - share) * logits.softmax(-1) + share / logits.shape[-1]).log()


def draw(log_probability: Tensor, uniform: Tensor) -> Tensor:
    """Return class indices [...] by the inverse of the cumulative distribution at `uniform` [...]."""
    # Rounding may leave the cumulative sum below 1: a uniform beyond it means the last class.
    below = log_probability.detach().exp().cumsum(-1) <= uniform[..., None]
    return below.sum(-1).clamp(max=log_probability.shape[-1] - 1)


def straight_through(log_probability: Tensor, uniform: Tensor) -> Tensor:
    """Return one-hot samples [..., S, C] whose gradient is the probabilities' (Bengio 2013)."""
    probability = log_probability.exp()
    chosen = functional.one_hot(draw(log_probability, uniform), probability.shape[-1])
    # p - p.detach() is 0 but has the gradient of p.
    return chosen.to(probability.dtype) + probability - probability.detach()


def divergence(first: Tensor, second: Tensor) -> Tensor:
    """Return KL(first || second) [...] of products of S categoricals, given log-probabilities [..., S, C]."""
    return (first.exp() * (first - second)).sum((-2, -1))


def balanced_divergence(posterior: Tensor, prior: Tensor, free_nats: float) -> tuple[Tensor, Tensor]:
    """Return KL(posterior || prior) twice, [...]: its gradient moves only the prior, and only the posterior.

    Below `free_nats` both are constant.
    """
    # DreamerV3's KL balancing: both terms have one value, and their weights say which of the two distributions moves
    # towards the other. Clamped at `free_nats` there is no gradient ("free bits").
    dynamics = divergence(posterior.detach(), prior).clamp_min(free_nats)
    representation = divergence(posterior, prior.detach()).clamp_min(free_nats)
    return dynamics, representation


class BlockLinear(nn.Module):
    """G linear maps side by side: [N, G, inputs] -> [N, G, outputs]."""

    def __init__(self, blocks: int, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(blocks, inputs, outputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.zeros(blocks, 1, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Map every block: [N, G, inputs] -> [N, G, outputs]."""
        return rearrange(torch.baddbmm(self.bias, rearrange(x, "n g i -> g n i"), self.weight), "g n o -> n g o")


class RecurrentCore(nn.Module):
    """The recurrent part: deterministic state [N, D] by a block GRU, prior and posterior over stochastic states.

    Each of the G blocks of the GRU sees its own units and the (shared) encoded state, sample and action. Deviation: an
    episode's state begins as a function of the first frame instead of zeros, so that it is known as exactly in a start
    from one frame as it ever is.
    """

    def __init__(
        self, *, deter: int, blocks: int, hidden: int, stochastic: int, classes: int, unimix: float, inputs: int
    ):
        super().__init__()
        if deter % blocks:
            raise ConfigError(f"{deter} deterministic units do not make {blocks} equal blocks.")
        self.blocks = blocks
        self.stochastic = stochastic
        self.unimix = unimix
        flat, width = stochastic * classes, deter // blocks
        self.begin = perceptron(inputs, hidden, 1, deter)
        self.read_state, self.read_sample = dense(deter, hidden), dense(flat, hidden)
        self.mix_shared = nn.Linear(3 * hidden, deter)
        self.mix_blocks = BlockLinear(blocks, width, width)
        self.mix_norm = nn.RMSNorm(deter, eps=1e-4)
        self.gates = BlockLinear(blocks, width, 3 * width)
        self.prior_head = perceptron(deter, hidden, 1, flat)
        self.posterior_state = nn.Linear(deter, hidden)
        self.posterior_frame = nn.Linear(inputs, hidden, bias=False)
        self.posterior_head = nn.Sequential(nn.RMSNorm(hidden, eps=1e-4), nn.SiLU(), nn.Linear(hidden, flat))

    def start(self, embedding: Tensor) -> Tensor:
        """Return deterministic states [N, D] of episodes whose first frames have `embedding` [N, E]."""
        return self.begin(embedding).tanh()

    def step(self, deter: Tensor, sample: Tensor, action: Tensor) -> Tensor:
        """Return the next state [N, D] after `sample` [N, S * C] and encoded actions [N, hidden]."""
        shared = torch.cat([self.read_state(deter), self.read_sample(sample), action], -1)
        units = rearrange(deter, "n (g u) -> n g u", g=self.blocks)
        mixed = self.mix_shared(shared) + self.mix_blocks(units).flatten(1)
        mixed = rearrange(functional.silu(self.mix_norm(mixed)), "n (g u) -> n g u", g=self.blocks)
        reset, candidate, update = self.gates(mixed).chunk(3, -1)
        # As in DreamerV3, a bias of -1 on the update gate: an untrained core keeps most of what it remembers.
        update = (update - 1).sigmoid()
        return (update * (reset.sigmoid() * candidate).tanh() + (1 - update) * units).flatten(1)

    def prior(self, deter: Tensor) -> Tensor:
        """Return log-probabilities [N, S, C] of the sample before its frame is seen."""
        logits = self.prior_head(deter)
        return unimixed(rearrange(logits, "n (s c) -> n s c", s=self.stochastic), self.unimix)

    def posterior(self, deter: Tensor, frame: Tensor) -> Tensor:
        """Return log-probabilities [N, S, C] after a frame; `frame` is its embedding through `posterior_frame`."""
        logits = self.posterior_head(self.posterior_state(deter) + frame)
        return unimixed(rearrange(logits, "n (s c) -> n s c", s=self.stochastic), self.unimix)
