"""Denoising networks: three architectures with one signature, `(x [..., P, A], time [...], condition [..., D]) -> [...,
P, A]`.

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
    """First layer over [x, time, condition], `depth - 1` residual layers, and a linear head.

    The first layer is split by input, so that the time part is computed once for K steps and the condition part once
    for N observations instead of N * K times each. Differences: SiLU instead of Mish (half the time on a CPU), and
    hidden layers without bias (the first layer's biases propagate along the residual stream), so each is one fused
    addmm.
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
        """Names of the hidden layers."""
        return tuple(f"{place}.hidden" for place in range(len(self.hidden)))

    def encode_time(self, time: Tensor) -> Tensor:
        """Return the time part of the first layer, [..., width]."""
        return self.time(time)

    def encode_condition(self, condition: Tensor) -> Tensor:
        """Return the condition part of the first layer, [..., width]."""
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
        """Return rows [N, width] and the residual that a hidden layer adds to them."""
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
        """Transform tokens [N, P, width] under modulation [N, 6, width]; returns [N, P, width].

        place: index of this block in the network; its branches have indices 2 place and 2 place + 1 in `blocks`.
        """
        shift, scale, gate, shift_forward, scale_forward, gate_forward = modulation[:, :, None].unbind(1)
        attended = blocks(2 * place, lambda: self._attend(torch.addcmul(shift, self.norm(tokens), 1 + scale)))
        # The gates are not part of a branch: they follow the time also where its output is remembered.
        mixed = torch.addcmul(tokens, gate, attended)
        feed_forward = blocks(
            2 * place + 1,
            lambda: self.feed_forward(torch.addcmul(shift_forward, self.norm(mixed), 1 + scale_forward)),
        )
        return torch.addcmul(mixed, gate_forward, feed_forward)

    def _attend(self, hidden: Tensor) -> Tensor:
        query, key, value = rearrange(self.attention_in(hidden), "n p (s h d) -> s n h p d", s=3, h=self.heads)
        mixed = rearrange(functional.scaled_dot_product_attention(query, key, value), "n h p d -> n p (h d)")
        return self.attention_out(mixed)


class TransformerDenoiser(nn.Module):
    """One token per chunk step; time and condition enter as modulations, each projected once per chain.

    Difference from DiT: the modulation is a sum of linear functions of SiLU(time) and of SiLU(condition), so the time
    part is a table over the K steps and the condition part is computed once for all of them. No dropout. Raises
    ConfigError unless heads divide the width.
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
            raise ConfigError(f"width={width} must be a multiple of heads={heads}.")
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
        """Names of the attention and feed-forward layers of every block."""
        return tuple(f"{place}.{part}" for place in range(self.depth) for part in ("attention", "feed_forward"))

    def encode_time(self, time: Tensor) -> Tensor:
        """Return the time part of all modulations, [..., (6 depth + 2) width]."""
        return self.time(time)

    def encode_condition(self, condition: Tensor) -> Tensor:
        """Return the condition part of all modulations, [..., (6 depth + 2) width]."""
        return self.condition(condition)

    def denoise(self, x: Tensor, time_features: Tensor, condition_features: Tensor, blocks: Blocks = fresh) -> Tensor:
        """Predict [..., P, A] from latents x [..., P, A]; both features broadcast against x's leading axes."""
        tokens, modulation = self._begin(x, time_features, condition_features)
        for index, block in enumerate(self.blocks):
            tokens = block(tokens, modulation[:, _PARTS * index : _PARTS * (index + 1)], blocks, index)
        return self._end(tokens, modulation).view(x.shape)

    def hold(self, x: Tensor, time_features: Tensor, condition_features: Tensor, outputs: Tensor) -> Tensor:
        """`denoise` with all block outputs cached, [N, 2 depth, P, width], as one weighted sum."""
        tokens, modulation = self._begin(x, time_features, condition_features)
        gates = modulation[:, :-2].unflatten(1, (2 * self.depth, _PARTS // 2))[:, :, -1, None]
        return self._end(tokens + (gates * outputs).sum(1), modulation).view(x.shape)

    def _begin(self, x: Tensor, time_features: Tensor, condition_features: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens [N, P, width] and modulations [N, 6 depth + 2, width]; the N rows are x's flattened leading
        axes.
        """
        modulation = (time_features + condition_features).expand(*x.shape[:-2], -1)
        modulation = modulation.reshape(-1, _PARTS * self.depth + 2, self.width)
        return self.embedding(x.reshape(-1, *x.shape[-2:])) + self.position, modulation

    def _end(self, tokens: Tensor, modulation: Tensor) -> Tensor:
        """Return predictions [N, P, A] from tokens [N, P, width]."""
        shift, scale = modulation[:, -2:, None].unbind(1)
        return self.head(torch.addcmul(shift, self.norm(tokens), 1 + scale))

    def forward(self, x: Tensor, time: Tensor, condition: Tensor) -> Tensor:
        """Predict [..., P, A] for latents x [..., P, A], times [...], conditions [..., D]."""
        return self.denoise(x, self.encode_time(time), self.encode_condition(condition))


class Denoiser(Protocol):
    """Common interface of the three networks; feature sizes E and F differ between networks."""

    @property
    def block_names(self) -> tuple[str, ...]:
        """Names of the residual branches in computation order."""
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
        """Compute both features and call `denoise`."""
        ...


def make_denoiser(
    kind: DenoiserKind, prediction_steps: int, action_size: int, condition_size: int, width: int, depth: int, heads: int
) -> Denoiser:
    """Build a denoiser of chunks [P, A] = [prediction_steps, action_size] for conditions of size `condition_size`.

    depth: hidden layers (MLP), blocks (transformer) or resolutions (U-Net); heads: for the transformer only. Raises
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
    """A `Denoiser` of latents [..., P, A], or [..., P, A + 1] with a last channel that marks given steps (1).

    Given steps contain clean actions at any time; predictions there are ignored. inner: a denoiser with A + 1 channels.
    Difference from Black et al. 2025 (arXiv:2512.05964), who pass a separate time per step (that of clean actions for
    given steps): one bit is sufficient and works with any denoiser.
    """

    def __init__(self, inner: Denoiser, action_size: int):
        super().__init__()
        self.inner, self.action_size = inner, action_size

    @property
    def block_names(self) -> tuple[str, ...]:
        """Block names of the inner denoiser."""
        return self.inner.block_names

    def encode_time(self, time: Tensor) -> Tensor:
        """Features [..., E] of times [...]; see `Denoiser`."""
        return self.inner.encode_time(time)

    def encode_condition(self, condition: Tensor) -> Tensor:
        """Features [..., F] of conditions [..., D]; see `Denoiser`."""
        return self.inner.encode_condition(condition)

    def denoise(self, x: Tensor, time_features: Tensor, condition_features: Tensor, blocks: Blocks = fresh) -> Tensor:
        """Predict [..., P, A] from latents [..., P, A] or [..., P, A + 1]; see `Denoiser`."""
        padded = pad(x, (0, 1)) if x.shape[-1] == self.action_size else x
        return self.inner.denoise(padded, time_features, condition_features, blocks)[..., : self.action_size]

    def forward(self, x: Tensor, time: Tensor, condition: Tensor) -> Tensor:
        """Predict [..., P, A] for latents x [..., P, A or A + 1], times [...], conditions [..., D]."""
        return self.denoise(x, self.encode_time(time), self.encode_condition(condition))


def draw_counts(samples: int, most: int, decay: float, generator: torch.Generator) -> Tensor:
    """Draw the number of given steps for each of `samples` samples, [N] int64 in 0 .. most, n with probability ~
    exp(-decay n).

    decay 0: uniform. A sample with a long prefix has little left to predict, so few of them suffice, and the many
    without prefix preserve the behaviour without latency. FluxVLA's training-time RTC recommends the same distribution
    with temperature 1 / decay.
    """
    if decay == 0:
        return torch.randint(most + 1, (samples,), generator=generator, device=generator.device)
    weights = torch.exp(-decay * torch.arange(most + 1, dtype=torch.float64, device=generator.device))
    return torch.multinomial(weights, samples, replacement=True, generator=generator)


def with_prefix(x: Tensor, clean: Tensor, count: Tensor) -> Tensor:
    """Return latents [N, P, A + 1] whose first count[n] steps are copied from `clean` and marked as given.

    x, clean: [N, P, A]; count: [N] int64.
    """
    given_mask = given_steps(count, x.shape[1])[..., None]
    return torch.cat([torch.where(given_mask, clean, x), given_mask.to(x.dtype)], -1)


def given_steps(count: Tensor, steps: int) -> Tensor:
    """Return the mask of given steps among P = `steps` steps, [N, P] bool: the first count[n]."""
    return torch.arange(steps, device=count.device) < count[:, None]
