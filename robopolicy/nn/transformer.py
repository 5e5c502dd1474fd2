"""A transformer denoiser over the steps of a chunk, conditioned through adaptive layer norm (DiT, arXiv:2212.09748)."""

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional

from robopolicy.core.errors import ConfigError
from robopolicy.nn.blocks import TimeEmbedding
from robopolicy.nn.branches import Blocks, fresh

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
