"""Core of the recurrent state-space model: maps frames to latents and back, independent of episodes.

After DreamerV3 (Hafner et al. 2023, arXiv:2301.04104): categorical latents, a block GRU, image networks.
Axes: N rows, M subsequences of T + 1 frames with T actions between them, V elements of standardised vectors, E
embedding, F summary of the latent, S categoricals of C classes, D deterministic units.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional

from robopolicy.core.errors import ConfigError
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.spec import Field
from robopolicy.nn.blocks import dense, perceptron
from robopolicy.nn.encoders import module_name
from worldmodels.configuration import UNIMIX, RssmConfig
from worldmodels.data import BOUND
from worldmodels.images.networks import ImageDecoder, ImageEncoder


def mix_with_uniform(logits: Tensor, share: float) -> Tensor:
    """Return log-probabilities [..., C] of the softmax of `logits` mixed with fraction `share` of the uniform
    distribution.
    """
    # Every class keeps share / C, so log-probabilities and KL stay finite when the two distributions disagree.
    return ((1 - share) * logits.softmax(-1) + share / logits.shape[-1]).log()


def draw(log_probability: Tensor, uniform: Tensor) -> Tensor:
    """Sample class indices [...] by inverse CDF at `uniform` [...]."""
    # Rounding may leave the cumulative sum below 1: a uniform beyond it means the last class.
    below = log_probability.detach().exp().cumsum(-1) <= uniform[..., None]
    return below.sum(-1).clamp(max=log_probability.shape[-1] - 1)


def straight_through(log_probability: Tensor, uniform: Tensor) -> Tensor:
    """Return one-hot samples [..., S, C] with the gradient of the probabilities (straight-through, Bengio 2013)."""
    probability = log_probability.exp()
    one_hot = functional.one_hot(draw(log_probability, uniform), probability.shape[-1])
    # p - p.detach() is 0 but has the gradient of p.
    return one_hot.to(probability.dtype) + probability - probability.detach()


def divergence(first: Tensor, second: Tensor) -> Tensor:
    """Return KL(first || second) [...] of products of S categoricals, given log-probabilities [..., S, C]."""
    return (first.exp() * (first - second)).sum((-2, -1))


def balanced_divergence(posterior: Tensor, prior: Tensor, free_nats: float) -> tuple[Tensor, Tensor]:
    """Return KL(posterior || prior) twice, [...]: one with gradient for the prior only, one for the posterior only.

    Below `free_nats` both are constant.
    """
    # DreamerV3's KL balancing: both terms have one value, and their weights say which of the two distributions moves
    # towards the other. Clamped at `free_nats` there is no gradient ("free bits").
    dynamics = divergence(posterior.detach(), prior).clamp_min(free_nats)
    representation = divergence(posterior, prior.detach()).clamp_min(free_nats)
    return dynamics, representation


class BlockLinear(nn.Module):
    """G parallel linear maps: [N, G, inputs] -> [N, G, outputs]."""

    def __init__(self, blocks: int, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(blocks, inputs, outputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.zeros(blocks, 1, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Map every block: [N, G, inputs] -> [N, G, outputs]."""
        return rearrange(torch.baddbmm(self.bias, rearrange(x, "n g i -> g n i"), self.weight), "g n o -> n g o")


class RecurrentCore(nn.Module):
    """The recurrent part: deterministic state [N, D] by a block GRU, prior and posterior over stochastic states.

    Each of the G blocks of the GRU reads its own units and the (shared) encoded state, sample and action. Deviation: an
    episode's initial state is a function of the first frame instead of zeros, so a start from one frame loses no
    information.
    """

    def __init__(self, *, deter: int, blocks: int, hidden: int, stochastic: int, classes: int, inputs: int):
        super().__init__()
        if deter % blocks:
            raise ConfigError(f"{deter} deterministic units cannot be divided into {blocks} equal blocks.")
        self.blocks = blocks
        self.stochastic = stochastic
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
        inputs = torch.cat([self.read_state(deter), self.read_sample(sample), action], -1)
        units = rearrange(deter, "n (g u) -> n g u", g=self.blocks)
        mixed = self.mix_shared(inputs) + self.mix_blocks(units).flatten(1)
        mixed = rearrange(functional.silu(self.mix_norm(mixed)), "n (g u) -> n g u", g=self.blocks)
        reset, candidate, update = self.gates(mixed).chunk(3, -1)
        # As in DreamerV3, a bias of -1 on the update gate: an untrained core keeps most of what it remembers.
        update = (update - 1).sigmoid()
        return (update * (reset.sigmoid() * candidate).tanh() + (1 - update) * units).flatten(1)

    def prior(self, deter: Tensor) -> Tensor:
        """Return log-probabilities [N, S, C] of the sample before its frame is observed."""
        logits = self.prior_head(deter)
        return mix_with_uniform(rearrange(logits, "n (s c) -> n s c", s=self.stochastic), UNIMIX)

    def posterior(self, deter: Tensor, frame: Tensor) -> Tensor:
        """Return log-probabilities [N, S, C] after a frame; `frame` is its embedding through `posterior_frame`."""
        logits = self.posterior_head(self.posterior_state(deter) + frame)
        return mix_with_uniform(rearrange(logits, "n (s c) -> n s c", s=self.stochastic), UNIMIX)


@dataclass(frozen=True)
class Unrolled:
    """Latents of subsequences.

    deter: [M, T + 1, D]; sample: [M, T + 1, S * C]; prior, posterior: log-probabilities [M, T + 1, S, C]; summary:
    input of decoders and heads, computed from deter and sample, [M, T + 1, F]; decoded: [M, T + 1, V], the first one is
    given; state: the same, but true where the frame was observed.
    """

    deter: Tensor
    sample: Tensor
    prior: Tensor
    posterior: Tensor
    summary: Tensor
    decoded: Tensor
    state: Tensor


class LatentDynamics(nn.Module):
    """Encoders, recurrent core and decoders of vectors with `elements` elements and of `images`, key -> field.

    The vector is carried together with the latent. Core and decoder read the last vector, observed or decoded, and the
    decoder predicts changes, so one step is as accurate as that of a model without a latent.
    """

    def __init__(self, config: RssmConfig, elements: int, actions: int, free: int, images: Mapping[str, Field]):
        super().__init__()
        size, self.images = config.networks, tuple(images)
        width, flat = size.hidden, size.stochastic * size.classes
        encoders: dict[str, nn.Module] = {}
        decoders: dict[str, nn.Module] = {}
        if elements:
            hidden = (dense(width, width) for _ in range(config.layers - 1))
            encoders["vector"] = nn.Sequential(dense(elements, width), *hidden)
        for key, field in images.items():
            encoders[module_name(key)] = ImageEncoder(field.shape, size.channels, width)
            decoders[module_name(key)] = ImageDecoder(field.shape, size.channels, width)
        self.encoders, self.decoders = nn.ModuleDict(encoders), nn.ModuleDict(decoders)
        self.core = RecurrentCore(
            deter=size.deter,
            blocks=size.blocks,
            hidden=width,
            stochastic=size.stochastic,
            classes=size.classes,
            inputs=len(encoders) * width,
        )
        self.input_encoder = dense(actions + elements, width)
        self.read_latent = dense(size.deter + flat, width)
        self.change_decoder = perceptron(width + elements, width, config.layers, free) if free else None

    def embed(self, state: Tensor, frames: Mapping[str, Tensor]) -> Tensor:
        """Return embeddings [M, T, E] of vectors [M, T, V] and images, key -> [M, T, height, width, 3]."""
        parts = [self.encoders["vector"](state)] if "vector" in self.encoders else []
        for key in self.images:
            flat = self.encoders[module_name(key)](rearrange(frames[key], "m t h w c -> (m t) h w c"))
            parts.append(flat.unflatten(0, state.shape[:2]))
        return torch.cat(parts, -1)

    def summary(self, deter: Tensor, sample: Tensor) -> Tensor:
        """Return the input of decoders and heads for a latent, [N, F]."""
        return self.read_latent(torch.cat([deter, sample], -1))

    def step(self, deter: Tensor, sample: Tensor, state: Tensor, action: Tensor) -> Tensor:
        """Return the deterministic state [N, D] after standardised actions [N, A] in vectors [N, V]."""
        return self.core.step(deter, sample, self.input_encoder(torch.cat([action, state], -1)))

    def advance(self, summary: Tensor, state: Tensor, spread: Tensor) -> Tensor:
        """Return the vector [N, V] after `state`, given the summary [N, F] of the new latent.

        spread: [free, V], effect of a change of the free elements on all elements.
        """
        if self.change_decoder is None:
            return state
        change = self.change_decoder(torch.cat([summary, state], -1))
        # Limited at every step: beyond the data an error would feed itself along a rollout.
        return (state + change @ spread).clamp(-BOUND, BOUND)

    def image(self, key: str, summary: Tensor) -> Tensor:
        """Return images [N, height, width, 3] in 0 to 1."""
        return self.decoders[module_name(key)](summary)

    def unroll(
        self, state: Tensor, embedding: Tensor, actions: Tensor, seen: Tensor, draws: Tensor, spread: Tensor
    ) -> Unrolled:
        """Unroll the model over subsequences of frames, vectors [M, T + 1, V] and embeddings [M, T + 1, E], and
        standardised actions [M, T, A].

        seen: [M, T + 1] bool, whether the frame is observed or predicted (the first is always observed); draws: [T + 1,
        M, S] uniforms for sampling.
        """
        # The frames' half of the posterior does not depend on the recurrence: one matrix product for all of them.
        core, frames = self.core, self.core.posterior_frame(embedding).unbind(1)
        deter = core.start(embedding[:, 0])
        sample = state[:, 0, :0]
        current = state[:, 0]
        steps = []
        for index, (frame, true) in enumerate(zip(frames, state.unbind(1), strict=True)):
            if index:
                deter = self.step(deter, sample, current, actions[:, index - 1])
            seen_mask = seen[:, index, None]
            # An unseen frame goes on from the prior and from its own decoded vector, exactly as imagination does.
            prior, posterior = core.prior(deter), core.posterior(deter, frame)
            sample = straight_through(torch.where(seen_mask[..., None], posterior, prior), draws[index]).flatten(1)
            summary = self.summary(deter, sample)
            decoded = self.advance(summary, current, spread) if index else true
            current = torch.where(seen_mask, true, decoded) if index else true
            steps.append((deter, sample, prior, posterior, summary, decoded, current))
        return Unrolled(*(torch.stack(values, 1) for values in zip(*steps, strict=True)))


keep_former_names(__name__, {"unimixed": "mix_with_uniform"})
