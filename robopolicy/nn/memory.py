"""Causal transformer over a window of frames, with rotary positions and a sink for attention.

The sink is one key and value per layer and head before all others: attention with nothing to look for ends there
instead of at an arbitrary frame, o = sum_j softmax([q k_0, q k_j])_j v_j, j = 0 included. Its variants are named by
what is learned: KV both, KV0 the key (v_0 = 0), K0V the value (k_0 = 0), K0V0 neither, which is a softmax with 1 added
to its denominator. Source: ReLIC's Sink-KV, arXiv:2410.02751; rotary positions: RoFormer, arXiv:2104.09864.

A window of a young episode repeats its first frame: only the last of equal frames at its begin is read. So what a frame
reads is the same however many followed, and `MemoryCache` keeps the keys and values. Axes: N row, H frame (oldest
first), W width, h head, d element of a head, Q frame that reads, I input.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional

from robopolicy.core.errors import ConfigError

SinkVariant = Literal["KV", "KV0", "K0V", "K0V0"]


class KeysValues(NamedTuple):
    """Rotated keys and values of a layer, both [N, h, H, d]."""

    keys: Tensor
    values: Tensor


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    sink: Tensor | None,
    mask: Tensor | None = None,
    sink_value: Tensor | None = None,
) -> Tensor:
    """Return attention [N, h, Q, d] of queries [N, h, Q, d] to keys and values [N, h, H, d], scaled by d^-1/2.

    sink: its key [h, d], None for none; sink_value: [h, d], None for 0; mask: [Q, H] or [N, 1, Q, H] bool, the keys
    that a query may read.
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
    """Rotate pairs of elements of [N, h, Q, d] by their positions, [Q] or [N, 1, Q], so that products depend on
    distances alone.
    """
    half = vectors.shape[-1] // 2
    rates = 100.0 ** -torch.linspace(0, 1, half, device=vectors.device)
    angles = positions[..., None] * rates
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

    def keys_values_of(self, tokens: Tensor, places: Tensor) -> KeysValues:
        """Return the keys and values of tokens [N, H, W] at their places [N, H]."""
        keys, values = (self._split(each) for each in self.keys_values(self.before(tokens)).chunk(2, -1))
        return KeysValues(rotate(keys, places[:, None]), values)

    def forward(self, tokens: Tensor, places: Tensor, read: KeysValues, mask: Tensor) -> Tensor:
        """Return [N, Q, W] for tokens [N, Q, W] at their places [N, Q] that read those of mask [N, 1, Q, H]."""
        query = rotate(self._split(self.query(self.before(tokens))), places[:, None])
        memories = attend(query, read.keys, read.values, self.sink, mask, self.sink_value)
        tokens = tokens + self.out(rearrange(memories, "n h t d -> n t (h d)"))
        return tokens + self.hidden(self.between(tokens))

    def _split(self, vectors: Tensor) -> Tensor:
        return rearrange(vectors, "n t (h d) -> n h t d", h=self.heads)


def first_readings(frames: Tensor) -> Tensor:
    """Return [N, H] bool, False at frames [N, H, I] that only repeat the first one, which the next equals as well."""
    repeats = (frames[:, 1:] == frames[:, :-1]).all(-1).long().cumprod(1).bool()
    return functional.pad(~repeats, (0, 1), value=True)


class Memory(nn.Module):
    """Summarises H frames [N, H, inputs] as [N, width]: what the newest frame reads of all.

    Every frame is embedded alike; depth layers follow, of which the last computes the newest frame alone.
    """

    def __init__(self, inputs: int, width: int, depth: int, heads: int, sink: SinkVariant | None):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(inputs, width), nn.SiLU(), nn.Linear(width, width))
        self.layers = nn.ModuleList(MemoryLayer(width, heads, sink) for _ in range(depth))
        self.norm = nn.RMSNorm(width)

    def forward(self, frames: Tensor, recent: Tensor | None = None) -> Tensor:
        """Return [N, width] for frames [N, H, inputs], oldest first.

        recent: number [N] of the newest frames that gradients reach; the keys and values of those before are computed
        without gradient (None: all).
        """
        count = frames.shape[1]
        is_read = first_readings(frames)
        places = (is_read.cumsum(1) - 1).clamp_min(0)
        order = torch.arange(count, device=frames.device)
        # A frame also reads itself: one that nothing reads needs some key, or its softmax would not be finite.
        mask = (order[:, None] >= order) & is_read[:, None] | (order[:, None] == order)
        if recent is None or int(recent.min()) >= count:
            return self.summary(frames, places, mask[:, None], lambda _, own: own)
        newest = min(count, int(recent.max()))
        past: list[KeysValues] = []
        with torch.no_grad():
            self.summary(frames, places, mask[:, None], lambda _, own: past.append(own) or own)
        is_recent = order[-newest:] >= count - recent[:, None]

        def joined(number: int, own: KeysValues) -> KeysValues:
            chosen = is_recent[:, None, :, None]
            pairs = zip(past[number], own, strict=True)
            parts = [[old[:, :, :-newest], torch.where(chosen, new, old[:, :, -newest:])] for old, new in pairs]
            return KeysValues(*(torch.cat(part, 2) for part in parts))

        return self.summary(frames[:, -newest:], places[:, -newest:], mask[:, None, -newest:], joined)

    def summary(
        self, frames: Tensor, places: Tensor, mask: Tensor, read: Callable[[int, KeysValues], KeysValues]
    ) -> Tensor:
        """Return the last frame's [N, width], of frames [N, Q, inputs] at places [N, Q] with the mask [N, 1, Q, H].

        read: number of a layer, keys and values [N, h, Q, d] of these frames -> those that they read, [N, h, H, d].
        """
        tokens = self.embed(frames)
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, MemoryLayer)
            keys_values = read(number, layer.keys_values_of(tokens, places))
            newest = slice(-1, None) if number + 1 == len(self.layers) else slice(None)
            tokens = layer(tokens[:, newest], places[:, newest], keys_values, mask[:, :, newest])
        return self.norm(tokens[:, -1])


class MemoryCache:
    """Keys and values of the frames that each row has read, for acting: only new frames are computed.

    The frames are kept as well and compared, so a row whose episode begins anew or is restored, or whose window has
    moved past its first frame, is read again from where it differs, and everything is after a change of the weights.
    Copies and stored policies begin with an empty one.
    """

    def __init__(self):
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.layers: list[KeysValues] = []
        self.weights: Tensor | None = None
        self.frames: Tensor | None = None
        self.count: Tensor | None = None

    def __reduce__(self) -> tuple[type["MemoryCache"], tuple[()]]:
        return MemoryCache, ()

    @torch.no_grad()
    def read(self, memory: Memory, frames: Tensor) -> Tensor:
        """Return the summaries [N, width] of frames [N, H, inputs], equal to those of `memory`."""
        rows, history, inputs = frames.shape
        count = first_readings(frames).sum(1)
        longest = int(count.max())
        order = torch.arange(longest, device=frames.device)
        # The frames of a row from place 0 on, whatever its window repeats before them.
        index = (history - count[:, None] + order).clamp_max(history - 1)
        frames = frames.gather(1, index[..., None].expand(-1, -1, inputs))
        self._allocate(memory, frames, history)
        assert self.frames is not None and self.count is not None
        same = (frames == self.frames[:, :longest]).all(-1) & (order < count.minimum(self.count)[:, None])
        known = same.long().cumprod(1).sum(1).minimum(count - 1)
        new = int((count - known).max())
        places = (count[:, None] - new + order[:new]).clamp_min(0)
        every_row = torch.arange(rows, device=frames.device)[:, None]

        def stored(number: int, own: KeysValues) -> KeysValues:
            for all_places, new_places in zip(self.layers[number], own, strict=True):
                all_places[every_row, :, places] = new_places.transpose(1, 2)
            return KeysValues(*(each[:, :, :longest] for each in self.layers[number]))

        self.count = self.count.minimum(places[:, 0])  # what an interruption would leave
        mask = order <= places[:, None, :, None]
        summary = memory.summary(frames[every_row, places], places, mask, stored)
        self.frames[:, :longest], self.count = frames, count
        return summary

    def _allocate(self, memory: Memory, frames: Tensor, history: int) -> None:
        """Forget all after a change of the weights or the number of rows, and make place for frames [N, L, inputs]."""
        rows, longest, inputs = frames.shape
        weights = torch.cat([weight.flatten() for weight in memory.parameters()])
        old = self.frames
        if (
            old is None
            or (len(old), old.device, old.is_inference()) != (rows, frames.device, frames.is_inference())
            or not torch.equal(weights, self.weights if self.weights is not None else weights[:0])
        ):
            self.clear()
            self.weights, self.count = weights, frames.new_zeros(rows, dtype=torch.int64)
            self.frames = frames.new_zeros((rows, 0, inputs))
            layer = memory.layers[0]
            assert isinstance(layer, MemoryLayer)
            empty = frames.new_zeros((rows, layer.heads, 0, layer.out.in_features // layer.heads))
            self.layers = [KeysValues(empty, empty) for _ in memory.layers]
        assert self.frames is not None
        have = self.frames.shape[1]
        if have < longest:
            more = min(history, max(longest, 2 * have)) - have
            self.frames = functional.pad(self.frames, (0, 0, 0, more))
            self.layers = [
                KeysValues(*(functional.pad(each, (0, 0, 0, more)) for each in layer)) for layer in self.layers
            ]
