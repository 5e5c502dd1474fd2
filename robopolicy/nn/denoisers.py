"""Denoisers: three networks with one call, `(x [..., P, A], time [...], condition [..., D]) -> [..., P, A]`.

The residual MLP of DPPO (arXiv:2409.00588), lean enough for fine-tuning on two CPU cores; a transformer over the steps
of a chunk, conditioned through adaptive layer norm (DiT, arXiv:2212.09748); a U-Net (`nn.unet`, which imports
diffusers). Each may be given the first actions of a chunk, so that it continues them (training-time RTC).

The leading axes broadcast, so K steps of one observation share its features: x [N, K, P, A], time [K] and condition
[N, 1, D]. What depends on time or condition alone is computed by `encode_time` and `encode_condition`, once a chain;
`denoise` is the step that is repeated. There is no dropout and no batch norm anywhere, so acting, scoring and averaged
weights agree exactly. Axes: P predicted step, A action dimension.
"""

from typing import Protocol

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import pad

from robopolicy.core.errors import ConfigError
from robopolicy.nn.blocks import TimeEmbedding
from robopolicy.nn.branches import Blocks, fresh
from robopolicy.nn.configuration import DenoiserKind


class ResidualMLP(nn.Module):
    """A first layer over [x, time, condition], `depth - 1` residual layers, a linear head.

    The first layer is split by input, so that the time's part is computed once for K steps and the condition's part
    once for N observations instead of N * K times each. Deviations: SiLU for Mish (half the time on a CPU), and hidden
    layers without bias (the first layer's biases run along the residual stream), so each is one fused addmm.
    """

    def __init__(self, prediction_steps: int, action_size: int, condition_size: int, width: int = 256, depth: int = 3):
        super().__init__()
        flat = prediction_steps * action_size
        self.time = TimeEmbedding(width)
        self.condition = nn.Linear(condition_size, width)
        self.latent = nn.Linear(flat, width, bias=False)
        self.hidden = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth - 1))
        self.head = nn.Linear(width, flat)
        self.activation = nn.SiLU()

    @property
    def block_names(self) -> tuple[str, ...]:
        """The hidden layers."""
        return tuple(f"{place}.hidden" for place in range(len(self.hidden)))

    def encode_time(self, time: Tensor) -> Tensor:
        """Return the time's part of the first layer, [..., width]."""
        return self.time(time)

    def encode_condition(self, condition: Tensor) -> Tensor:
        """Return the condition's part of the first layer, [..., width]."""
        return self.condition(condition)

    def denoise(self, x: Tensor, time_features: Tensor, condition_features: Tensor, blocks: Blocks = fresh) -> Tensor:
        """Predict [..., P, A] from latents x [..., P, A]; both features broadcast against x's leading axes."""
        flat = x.flatten(-2)
        context = (time_features + condition_features).expand(*flat.shape[:-1], -1)
        rows = torch.addmm(
            context.reshape(-1, context.shape[-1]), flat.reshape(-1, flat.shape[-1]), self.latent.weight.T
        )
        for place, layer in enumerate(self.hidden):
            assert isinstance(layer, nn.Linear)
            rows = self._layer(rows, layer.weight, blocks, place)
        return self.head(self.activation(rows)).view(x.shape)

    def _layer(self, rows: Tensor, weight: Tensor, blocks: Blocks, place: int) -> Tensor:
        """Return rows [N, width] and what a hidden layer adds to them."""
        if blocks is fresh:
            return torch.addmm(rows, self.activation(rows), weight.T)  # the sum inside the product
        return rows + blocks(place, lambda: self.activation(rows) @ weight.T)

    def forward(self, x: Tensor, time: Tensor, condition: Tensor) -> Tensor:
        """Predict [..., P, A] for latents x [..., P, A], times [...], conditions [..., D]."""
        return self.denoise(x, self.encode_time(time), self.encode_condition(condition))


_PARTS = 6
"""Modulations per block: shift, scale and gate of attention, and of the feed-forward layer."""


class TransformerBlock(nn.Module):
    """Pre-norm self-attention and feed-forward, both modulated by [N, 6, width]."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))

    def forward(self, tokens: Tensor, modulation: Tensor, blocks: Blocks = fresh, place: int = 0) -> Tensor:
        """Return tokens [N, P, width] of tokens [N, P, width] under modulation [N, 6, width].

        place: of this block in the network; its branches are number 2 place and 2 place + 1 of `blocks`.
        """
        shift, scale, gate, shift_forward, scale_forward, gate_forward = modulation[:, :, None].unbind(1)
        attended = blocks(2 * place, lambda: self._attend(torch.addcmul(shift, self.norm(tokens), 1 + scale)))
        # The gates are not part of a branch: they follow the time also where its output is remembered.
        mixed = torch.addcmul(tokens, gate, attended)
        fed = blocks(
            2 * place + 1,
            lambda: self.feed_forward(torch.addcmul(shift_forward, self.norm(mixed), 1 + scale_forward)),
        )
        return torch.addcmul(mixed, gate_forward, fed)

    def _attend(self, hidden: Tensor) -> Tensor:
        query, key, value = rearrange(self.attention_in(hidden), "n p (s h d) -> s n h p d", s=3, h=self.heads)
        mixed = rearrange(functional.scaled_dot_product_attention(query, key, value), "n h p d -> n p (h d)")
        return self.attention_out(mixed)


class TransformerDenoiser(nn.Module):
    """One token per chunk step; time and condition enter as modulations, each projected once a chain.

    Deviation from DiT: the modulation is linear in SiLU(time) and in SiLU(condition) apart, so the time's part is a
    table over the K steps and the condition's part is computed once for all of them. No dropout. Raises ConfigError
    unless heads divide the width.
    """

    def __init__(
        self,
        prediction_steps: int,
        action_size: int,
        condition_size: int,
        width: int = 256,
        depth: int = 4,
        heads: int = 4,
    ):
        super().__init__()
        if width % heads:
            raise ConfigError(f"width {width} is not a multiple of heads {heads}: choose one that is.")
        self.width, self.depth = width, depth
        modulation = (_PARTS * depth + 2) * width
        self.time = nn.Sequential(TimeEmbedding(width), nn.SiLU(), nn.Linear(width, modulation))
        self.condition = nn.Sequential(
            nn.Linear(condition_size, width),
            nn.SiLU(),
            nn.Linear(width, width),
            nn.SiLU(),
            nn.Linear(width, modulation),
        )
        self.embedding = nn.Linear(action_size, width)
        self.position = nn.Parameter(torch.randn(prediction_steps, width) * 0.02)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.head = nn.Linear(width, action_size)

    @property
    def block_names(self) -> tuple[str, ...]:
        """Attention and feed-forward layer of every block."""
        return tuple(f"{place}.{part}" for place in range(self.depth) for part in ("attention", "feed_forward"))

    def encode_time(self, time: Tensor) -> Tensor:
        """Return the time's part of all modulations, [..., (6 depth + 2) width]."""
        return self.time(time)

    def encode_condition(self, condition: Tensor) -> Tensor:
        """Return the condition's part of all modulations, [..., (6 depth + 2) width]."""
        return self.condition(condition)

    def denoise(self, x: Tensor, time_features: Tensor, condition_features: Tensor, blocks: Blocks = fresh) -> Tensor:
        """Predict [..., P, A] from latents x [..., P, A]; both features broadcast against x's leading axes."""
        tokens, modulation = self._begin(x, time_features, condition_features)
        for index, block in enumerate(self.blocks):
            tokens = block(tokens, modulation[:, _PARTS * index : _PARTS * (index + 1)], blocks, index)
        return self._end(tokens, modulation).view(x.shape)

    def hold(self, x: Tensor, time_features: Tensor, condition_features: Tensor, outputs: Tensor) -> Tensor:
        """`denoise` where every block's output is known, [N, 2 depth, P, width]: one weighted sum of them all."""
        tokens, modulation = self._begin(x, time_features, condition_features)
        gates = modulation[:, :-2].unflatten(1, (2 * self.depth, _PARTS // 2))[:, :, -1, None]
        return self._end(tokens + (gates * outputs).sum(1), modulation).view(x.shape)

    def _begin(self, x: Tensor, time_features: Tensor, condition_features: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens [N, P, width] and modulations [N, 6 depth + 2, width]; N rows are x's leading axes together."""
        modulation = (time_features + condition_features).expand(*x.shape[:-2], -1)
        modulation = modulation.reshape(-1, _PARTS * self.depth + 2, self.width)
        return self.embedding(x.reshape(-1, *x.shape[-2:])) + self.position, modulation

    def _end(self, tokens: Tensor, modulation: Tensor) -> Tensor:
        """Return predictions [N, P, A] of tokens [N, P, width]."""
        shift, scale = modulation[:, -2:, None].unbind(1)
        return self.head(torch.addcmul(shift, self.norm(tokens), 1 + scale))

    def forward(self, x: Tensor, time: Tensor, condition: Tensor) -> Tensor:
        """Predict [..., P, A] for latents x [..., P, A], times [...], conditions [..., D]."""
        return self.denoise(x, self.encode_time(time), self.encode_condition(condition))


class Denoiser(Protocol):
    """What the three networks share; E and F are sizes of their own."""

    @property
    def block_names(self) -> tuple[str, ...]:
        """Names of the residual branches, in the order of their computation."""
        ...

    def encode_time(self, time: Tensor) -> Tensor:
        """Features [..., E] of times [...] in [0, 1]."""
        ...

    def encode_condition(self, condition: Tensor) -> Tensor:
        """Features [..., F] of conditions [..., D]."""
        ...

    def denoise(self, x: Tensor, time_features: Tensor, condition_features: Tensor, blocks: Blocks = fresh) -> Tensor:
        """Predict [..., P, A] from latents [..., P, A]; the features broadcast against its leading axes."""
        ...

    def __call__(self, x: Tensor, time: Tensor, condition: Tensor) -> Tensor:
        """`denoise` with both features computed here."""
        ...


def make_denoiser(
    kind: DenoiserKind, prediction_steps: int, action_size: int, condition_size: int, width: int, depth: int, heads: int
) -> Denoiser:
    """Build a denoiser of chunks [P, A] = [prediction_steps, action_size] under conditions of `condition_size`.

    depth: hidden layers (MLP), blocks (transformer) or resolutions (U-Net); heads: of the transformer only. Raises
    ConfigError when a size is below 1.
    """
    if min(prediction_steps, action_size, condition_size, width, depth, heads) < 1:
        raise ConfigError("Denoiser sizes must be at least 1.")
    if kind is DenoiserKind.MLP:
        return ResidualMLP(prediction_steps, action_size, condition_size, width, depth)
    if kind is DenoiserKind.TRANSFORMER:
        return TransformerDenoiser(prediction_steps, action_size, condition_size, width, depth, heads)
    from robopolicy.nn.unet import UNetDenoiser  # imports diffusers, which takes seconds

    return UNetDenoiser(prediction_steps, action_size, condition_size, width, depth)


class PrefixDenoiser(nn.Module):
    """A `Denoiser` of latents [..., P, A], or [..., P, A + 1] where the last channel says which steps are given (1).

    Given steps hold clean actions, whatever the time is; what is predicted there means nothing. inner: a denoiser of A
    + 1 channels. Deviation from Black et al. 2025 (arXiv:2512.05964), who tell each step its own time, which is that of
    clean actions where they are given: one bit says as much, and any denoiser can read it.
    """

    def __init__(self, inner: Denoiser, action_size: int):
        super().__init__()
        self.inner, self.action_size = inner, action_size

    @property
    def block_names(self) -> tuple[str, ...]:
        """Those of the denoiser inside."""
        return self.inner.block_names

    def encode_time(self, time: Tensor) -> Tensor:
        """Features [..., E] of times [...]; see `Denoiser`."""
        return self.inner.encode_time(time)

    def encode_condition(self, condition: Tensor) -> Tensor:
        """Features [..., F] of conditions [..., D]; see `Denoiser`."""
        return self.inner.encode_condition(condition)

    def denoise(self, x: Tensor, time_features: Tensor, condition_features: Tensor, blocks: Blocks = fresh) -> Tensor:
        """Predict [..., P, A] from latents [..., P, A] or [..., P, A + 1]; see `Denoiser`."""
        told = pad(x, (0, 1)) if x.shape[-1] == self.action_size else x
        return self.inner.denoise(told, time_features, condition_features, blocks)[..., : self.action_size]

    def forward(self, x: Tensor, time: Tensor, condition: Tensor) -> Tensor:
        """Predict [..., P, A] for latents x [..., P, A or A + 1], times [...], conditions [..., D]."""
        return self.denoise(x, self.encode_time(time), self.encode_condition(condition))


def draw_counts(samples: int, most: int, decay: float, generator: torch.Generator) -> Tensor:
    """Draw how many steps each of so many samples is given, [N] int64 in 0 .. most, n with probability ~ exp(-decay n).

    decay 0: all alike. A sample that is given much has little left to learn, so a few of them teach it, and the many
    that are given nothing keep what the policy does without a delay. FluxVLA's training-time RTC recommends such a law
    too, with temperature 1 / decay.
    """
    if decay == 0:
        return torch.randint(most + 1, (samples,), generator=generator, device=generator.device)
    weights = torch.exp(-decay * torch.arange(most + 1, dtype=torch.float64, device=generator.device))
    return torch.multinomial(weights, samples, replacement=True, generator=generator)


def with_prefix(x: Tensor, clean: Tensor, count: Tensor) -> Tensor:
    """Return latents [N, P, A + 1] whose first count[n] steps are those of `clean` and flagged as given.

    x, clean: [N, P, A]; count: [N] int64.
    """
    given = given_steps(count, x.shape[1])[..., None]
    return torch.cat([torch.where(given, clean, x), given.to(x.dtype)], -1)


def given_steps(count: Tensor, steps: int) -> Tensor:
    """Return which of P = `steps` steps are given, [N, P] bool: the first count[n]."""
    return torch.arange(steps, device=count.device) < count[:, None]
