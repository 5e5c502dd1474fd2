"""Causal transformer over a window of frames, with rotary positions and a sink for attention.

The sink is one key and value per layer and head before all others: attention with nothing to look for ends there
instead of at an arbitrary frame, o = sum_j softmax([q k_0, q k_j])_j v_j, j = 0 included. Its variants are named by
what is learned: KV both, KV0 the key (v_0 = 0), K0V the value (k_0 = 0), K0V0 neither, which is a softmax with 1 added
to its denominator. Source: ReLIC's Sink-KV, arXiv:2410.02751; rotary positions: RoFormer, arXiv:2104.09864. Axes: N
row, H frame (oldest first), W width.
"""

from typing import Literal

import torch
from einops import rearrange
from torch import Tensor, nn

from robopolicy.core.errors import ConfigError

SinkVariant = Literal["KV", "KV0", "K0V", "K0V0"]


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    sink: Tensor | None,
    mask: Tensor | None = None,
    sink_value: Tensor | None = None,
) -> Tensor:
    """Return attention [N, h, Q, d] of queries [N, h, Q, d] to keys and values [N, h, H, d], scaled by d^-1/2.

    sink: its key [h, d], None for none; sink_value: [h, d], None for 0; mask: [Q, H] bool, the keys that a query may
    read.
    """
    scale = query.shape[-1] ** -0.5
    scores = scale * query @ keys.transpose(-1, -2)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if sink is None:
        return scores.softmax(-1) @ values
    resting = scale * torch.einsum("nhqd,hd->nhq", query, sink)[..., None]
    weights = torch.cat([resting, scores], -1).softmax(-1)
    output = weights[..., 1:] @ values
    return output if sink_value is None else output + weights[..., :1] * sink_value[:, None]


def rotate(vectors: Tensor, positions: Tensor) -> Tensor:
    """Rotate pairs of elements of [N, h, Q, d] by their positions [Q], so that products depend on distances alone."""
    half = vectors.shape[-1] // 2
    rates = 100.0 ** -torch.linspace(0, 1, half, device=vectors.device)
    angles = positions[:, None] * rates
    first, second = vectors[..., :half], vectors[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


class MemoryLayer(nn.Module):
    """One layer: attention and an MLP, each on normalised inputs and added to them.

    sink: a variant, see the module; None for no sink.
    """

    sink: Tensor | None
    sink_value: Tensor | None

    def __init__(self, width: int, heads: int, sink: SinkVariant | None):
        super().__init__()
        if width % (2 * heads):
            raise ConfigError(f"width={width} must be a multiple of twice the heads={heads}.")
        self.heads = heads
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.keys_values = nn.Linear(width, 2 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        shape = heads, width // heads
        self.sink_value = nn.Parameter(torch.zeros(shape)) if sink in ("KV", "K0V") else None
        if sink in ("K0V", "K0V0"):
            self.register_buffer("sink", torch.zeros(shape), persistent=False)
        else:
            self.sink = nn.Parameter(torch.zeros(shape)) if sink else None
        self.hidden = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))

    def forward(self, tokens: Tensor, last: bool) -> Tensor:
        """Return [N, H, W] for tokens [N, H, W], or only the last token's [N, 1, W]."""
        count, normed = tokens.shape[1], self.before(tokens)
        place = torch.arange(count, device=tokens.device)
        newest = slice(count - 1, None) if last else slice(None)
        split = "n t (h d) -> n h t d"
        keys, values = (rearrange(each, split, h=self.heads) for each in self.keys_values(normed).chunk(2, -1))
        query = rotate(rearrange(self.query(normed[:, newest]), split, h=self.heads), place[newest])
        mask = place[newest, None] >= place
        memories = attend(query, rotate(keys, place), values, self.sink, mask, self.sink_value)
        tokens = tokens[:, newest] + self.out(rearrange(memories, "n h t d -> n t (h d)"))
        return tokens + self.hidden(self.between(tokens))


class Memory(nn.Module):
    """Summarises H frames [N, H, inputs] as [N, width]: what the newest frame reads of all.

    Every frame is embedded alike; depth layers follow, of which the last computes the newest frame alone.
    """

    def __init__(self, inputs: int, width: int, depth: int, heads: int, sink: SinkVariant | None):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(inputs, width), nn.SiLU(), nn.Linear(width, width))
        self.layers = nn.ModuleList(MemoryLayer(width, heads, sink) for _ in range(depth))
        self.norm = nn.RMSNorm(width)

    def forward(self, frames: Tensor) -> Tensor:
        """Return [N, width] for frames [N, H, inputs], oldest first."""
        tokens = self.embed(frames)
        for place, layer in enumerate(self.layers):
            tokens = layer(tokens, place + 1 == len(self.layers))
        return self.norm(tokens[:, -1])
