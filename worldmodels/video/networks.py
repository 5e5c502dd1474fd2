"""Networks of the latent video model: an autoencoder of single views, and a transformer over frames of latents.

After Ctrl-World (Guo et al. 2025, arXiv:2510.10125): all views of a frame are predicted jointly, every frame has its
own action, and sparse history frames have the robot's pose as condition. The blocks are DiT's (Peebles and Xie 2023,
arXiv:2212.09748) with one modulation per frame, as IRASim conditions them (Zhu et al. 2024, arXiv:2406.14540). Axes: N
rows, K history frames, F future frames, S tokens per frame, W width, A action dimension, P pose elements. Views of one
frame are stacked in height; latents are float [..., C, height, width], standardised.
"""

from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import Any, cast

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional

from robopolicy.core.errors import ConfigError
from robopolicy.nn.blocks import TimeEmbedding
from robopolicy.nn.branches import FEED_FORWARD, Blocks, Caching, fresh
from robopolicy.nn.configuration import Precision
from robopolicy.nn.edm import Network
from robopolicy.nn.precision import autocast
from worldmodels.configuration import VideoSize

VISIBLE = 0.2
"""Distance from the mean image (2 is from black to white) at which a pixel has full weight."""

QUIET = -6.0
"""Log-variance of encoded latents before training: little noise, so that images become sharp early."""

Past = list[tuple[Tensor, Tensor]]
"""Keys and values [N, heads, K * S, W / heads] of the history's tokens, block by block."""


class ViewAutoencoder(nn.Module):
    """diffusers' AutoencoderKL applied to each view of a frame separately, with standardised latents.

    Squares of 2 x 2 pixels become channels first: a CPU is fast on few pixels with many channels. The input is the
    difference of a view from its camera's mean image, so static content needs no capacity. The mean image is a buffer,
    as are the means and deviations of latents (the usual scaling factor). Axes: V views of a frame.
    """

    background: Tensor
    mean: Tensor
    std: Tensor
    precision: Precision

    def __init__(self, sizes: VideoSize, views: int, height: int, width: int, precision: Precision):
        from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL  # seconds to import

        super().__init__()
        count, self.precision = len(sizes.channels), precision
        self.factor = 2**count
        if height % self.factor or width % self.factor:
            raise ConfigError(
                f"This autoencoder reduces images by a factor of {self.factor}, which does not divide {height} x "
                f"{width}: use another camera size, or fewer worldmodel.config.channels."
            )
        make: Any = AutoencoderKL
        self.network = make(
            in_channels=12,
            out_channels=12,
            down_block_types=("DownEncoderBlock2D",) * count,
            up_block_types=("UpDecoderBlock2D",) * count,
            block_out_channels=sizes.channels,
            layers_per_block=1,
            latent_channels=sizes.latent,
            norm_num_groups=8,
            mid_block_add_attention=False,
        )
        nn.init.constant_(self.network.quant_conv.bias[sizes.latent :], QUIET)
        self.register_buffer("background", torch.zeros(views, 3, height, width))
        self.register_buffer("mean", torch.zeros(sizes.latent))
        self.register_buffer("std", torch.ones(sizes.latent))

    def encode(self, pixels: Tensor) -> Tensor:
        """Return standardised latents [N, C, V * height / factor, width / factor] of views [N, V, 3, height, width]."""
        # The mean and no sample: a frame has one latent.
        latents = self._posterior(pixels).mode().float()
        latents = (latents - self.mean[:, None, None]) / self.std[:, None, None]
        return rearrange(latents, "(n v) c h w -> n c (v h) w", v=len(self.background))

    def decode(self, latents: Tensor) -> Tensor:
        """Return pixels [N, V, 3, height, width] of standardised latents, shaped as `encode` returns them."""
        raw = rearrange(latents, "n c (v h) w -> (n v) c h w", v=len(self.background))
        return self._decode(raw * self.std[:, None, None] + self.mean[:, None, None])

    def losses(self, pixels: Tensor, moving: float, generator: torch.Generator) -> dict[str, Tensor]:
        """Return {"pixels", "divergence"}, each [N], of views; pixels that differ from the background weigh up to 1 +
        `moving`.
        """
        posterior = self._posterior(pixels)
        mean, deviation = posterior.mean.float(), posterior.std.float()
        noise = torch.randn(mean.shape, generator=generator, device=generator.device).to(mean.device)
        distance = (pixels - self.background).abs().mean(2, keepdim=True)
        weight = 1 + moving * (distance / VISIBLE).clamp(max=1)
        # Weights of mean 1 keep the loss on one scale, however much of the image moves.
        error = (weight / weight.mean()) * (self._decode(mean + deviation * noise) - pixels).square()
        # KL(N(mean, deviation^2) || N(0, 1)), averaged over the latent's elements.
        divergence = 0.5 * (mean.square() + deviation.square() - 1 - 2 * deviation.log()).mean((1, 2, 3))
        return {
            "pixels": error.mean((1, 2, 3, 4)),
            "divergence": divergence.unflatten(0, pixels.shape[:2]).mean(1),
        }

    def _posterior(self, pixels: Tensor) -> Any:
        views = (pixels - self.background).flatten(0, 1)
        with autocast(self.precision, pixels.device):
            return self.network.encode(functional.pixel_unshuffle(views, 2)).latent_dist

    def _decode(self, raw: Tensor) -> Tensor:
        with autocast(self.precision, raw.device):
            output = self.network.decode(raw).sample
        views = functional.pixel_shuffle(output.float(), 2)
        return views.unflatten(0, (-1, len(self.background))) + self.background


class FrameBlock(nn.Module):
    """Attention over the tokens of several frames and a feed-forward layer, both modulated by their frame."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulation = nn.Linear(width, 6 * width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.expand, self.shrink = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        # DiT's adaLN-Zero: shift, scale and gate are 0, so every block begins as the identity.
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def observe(
        self,
        tokens: Tensor,
        condition: Tensor,
        remembered: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return tokens [N, T, S, W] that attend to one another and to what is remembered, and their own keys and
        values; otherwise as `forward`.
        """
        first, second = self._moves(condition)
        mixed, key_value = self._attend(tokens, first, remembered, mask)
        tokens = torch.addcmul(tokens, first[2], mixed)
        return torch.addcmul(tokens, second[2], self._feed(tokens, second)), key_value

    def forward(
        self,
        tokens: Tensor,
        condition: Tensor,
        remembered: tuple[Tensor, Tensor],
        mask: Tensor | None,
        blocks: Blocks = fresh,
        place: int = 0,
    ) -> Tensor:
        """Return tokens [N, T, S, W].

        condition: [N, T, W], one per frame; remembered: keys and values of other frames to attend to as well; mask: [T
        * S, all keys], keys that each token may attend to (None: all); place: index of its first branch of two.
        """
        first, second = self._moves(condition)
        mixed = blocks(place, lambda: self._attend(tokens, first, remembered, mask)[0])
        between = torch.addcmul(tokens, first[2], mixed)
        return torch.addcmul(between, second[2], blocks(place + 1, lambda: self._feed(between, second)))

    def _moves(self, condition: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return shift, scale and gate [N, T, 1, W] of attention and of the feed-forward layer."""
        moves = self.modulation(condition)[:, :, None].chunk(6, -1)
        return moves[:3], moves[3:]

    def _attend(
        self,
        tokens: Tensor,
        moves: Sequence[Tensor],
        remembered: tuple[Tensor, Tensor] | None,
        mask: Tensor | None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the ungated attention output, [N, T, S, W], and the tokens' own keys and values."""
        hidden = torch.addcmul(moves[0], self.norm(tokens), 1 + moves[1])
        hidden = rearrange(hidden, "n t s w -> n (t s) w")
        query, key, value = rearrange(self.query_key_value(hidden), "n l (p h d) -> p n h l d", p=3, h=self.heads)
        own_pair = (key, value)
        if remembered is not None:
            key, value = (torch.cat(pair, 2) for pair in zip(remembered, own_pair, strict=True))
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.mix(rearrange(mixed, "n h (t s) d -> n t s (h d)", t=tokens.shape[1])), own_pair

    def _feed(self, tokens: Tensor, moves: Sequence[Tensor]) -> Tensor:
        """Return the ungated output of the feed-forward layer, [N, T, S, W]."""
        hidden = torch.addcmul(moves[0], self.norm(tokens), 1 + moves[1])
        return self.shrink(functional.silu(self.expand(hidden)))


class ViewBlock(nn.Module):
    """A residual block of two convolutions over the latents of single views, modulated by their frame."""

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(8, channels, affine=False) for _ in range(2))
        self.convolutions = nn.ModuleList(nn.Conv2d(channels, channels, 3, 1, 1) for _ in range(2))
        self.modulation = nn.Linear(width, 2 * channels)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x: Tensor, condition: Tensor, blocks: Blocks = fresh, place: int = 0) -> Tensor:
        """Return maps [M, channels, height, width] under conditions [M, W]; place: index of its branch."""
        return x + blocks(place, lambda: self._convolve(x, condition))

    def _convolve(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale = self.modulation(condition)[:, :, None, None].chunk(2, 1)
        hidden = self.convolutions[0](functional.silu(self.norms[0](x)))
        hidden = torch.addcmul(shift, self.norms[1](hidden), 1 + scale)
        return self.convolutions[1](functional.silu(hidden))


class VideoTransformer(nn.Module):
    """Predicts the latent difference of F future frames from the current one, given K history frames.

    History tokens attend to history alone, so `remember` computes them once for all denoising steps. A future frame
    attends to the history, to itself and to the future frames before it. A chunk of F frames thus trains every shorter
    one, and frames can be imagined one by one. Each future frame is conditioned on the action before it and on the sum
    of all since the current one; each history frame on its action, pose and noise. Conditions enter by adaptive layer
    norm and as a summand of the tokens. Convolutions around the transformer work at the latents' own resolution, as in
    a U-Net; small motions are handled there and learned sooner.
    """

    precision: Precision

    def __init__(
        self,
        sizes: VideoSize,
        latent: tuple[int, int, int],
        *,
        views: int,
        history: int,
        chunk: int,
        actions: int,
        poses: int,
        precision: Precision,
    ):
        super().__init__()
        channels, height, width = latent
        if height % sizes.patch or width % sizes.patch:
            raise ConfigError(f"Latents of {height} x {width} cannot be divided into patches of {sizes.patch}.")
        if sizes.width % sizes.heads:
            raise ConfigError(f"width={sizes.width} must be a multiple of heads={sizes.heads}.")
        self.history = history
        self.chunk = chunk
        self.precision = precision
        self.patch, self.grid = sizes.patch, (height // sizes.patch, width // sizes.patch)
        area, wide = channels * sizes.patch**2, sizes.width
        self.past, self.future = nn.Linear(area, wide), nn.Linear(sizes.maps * sizes.patch**2, wide)
        self.views = views
        self.enter = nn.Conv2d(2 * channels, sizes.maps, 3, 1, 1)
        self.fine = nn.ModuleList(ViewBlock(sizes.maps, wide) for _ in range(3))
        self.leave = nn.Conv2d(sizes.maps, channels, 3, 1, 1)
        self.position = nn.Parameter(0.02 * torch.randn(self.grid[0] * self.grid[1], wide))
        self.slots = nn.Parameter(0.02 * torch.randn(history + chunk, wide))
        self.action, self.pose = _embedding(2 * actions, wide), _embedding(poses, wide)
        self.unknown = nn.Parameter(0.02 * torch.randn(wide))
        self.noise, self.level = _embedding(1, wide), TimeEmbedding(wide)
        self.summand = nn.Linear(wide, wide)
        self.blocks = nn.ModuleList(FrameBlock(wide, sizes.heads) for _ in range(sizes.depth))
        self.norm, self.last = nn.LayerNorm(wide, elementwise_affine=False), nn.Linear(wide, 2 * wide)
        self.head = nn.Linear(wide, sizes.maps * sizes.patch**2)
        # An untrained network predicts no change: the present frame again.
        nn.init.zeros_(self.leave.weight)
        nn.init.zeros_(cast(Tensor, self.leave.bias))

    def remember(self, history: Tensor, actions: Tensor, poses: Tensor, noise: Tensor) -> Past:
        """Return the keys and values that future frames attend to.

        history: latents [N, K, C, height, width], oldest first, the current frame last; actions: [N, K, A], before each
        frame; poses: [N, K, P]; noise: [N, K], standard deviation of the noise added to them.
        """
        slots = self.slots[: history.shape[1]]
        with autocast(self.precision, history.device):
            # The second half, the sum of actions since the present frame, is zero in the history.
            embedded = self.action(torch.cat([actions, torch.zeros_like(actions)], -1))
            condition = slots + embedded + self.pose(poses) + self.noise(noise[..., None])
            tokens = self.past(self._patches(history)) + self.position + self.summand(condition)[:, :, None]
            memory: Past = []
            for block in self.blocks:
                tokens, key_value = cast(FrameBlock, block).observe(tokens, condition)
                memory.append(key_value)
        return memory

    @property
    def block_names(self) -> tuple[str, ...]:
        """Names of the residual branches, in order of computation."""
        inner = [f"{place}.{name}" for place in range(len(self.blocks)) for name in ("attention", FEED_FORWARD)]
        before, *after = (f"fine.{place}.convolutions" for place in range(len(self.fine)))
        return (before, *inner, *after)

    def network(
        self,
        memory: Past,
        present: Tensor,
        actions: Tensor,
        known: Tensor | None = None,
        caching: Caching | None = None,
    ) -> Network:
        """Return EDM's F over changes [N, F, C, height, width] from the current latents [N, C, height, width].

        actions: [N, F, A], standardised, before each frame; known: [N, F] bool, False masks an action; caching: cache
        of block outputs between calls of F, which then belongs to one chain.
        """
        predict = partial(self._predict, memory=memory, present=present, actions=actions, known=known)
        if caching is None:
            return predict
        chain, calls = caching.begin(), count()
        return lambda noisy, level: predict(noisy, level, blocks=chain.at(next(calls)))

    def _predict(
        self,
        noisy: Tensor,
        level: Tensor,
        memory: Past,
        present: Tensor,
        actions: Tensor,
        known: Tensor | None,
        blocks: Blocks = fresh,
    ) -> Tensor:
        with autocast(self.precision, noisy.device):
            slots = self.slots[self.history : self.history + noisy.shape[1]]
            # EDM's label, log(sigma) / 4, becomes a time in [0, 1].
            condition = slots + self.embedded(actions, known) + self.level(0.25 + level / 4)[:, None]
        return self.denoise(noisy, present, condition, memory, blocks)

    def embedded(self, actions: Tensor, known: Tensor | None) -> Tensor:
        """Return embeddings [N, F, W] of actions [N, F, A] before each frame; known: [N, F] bool, False hides one."""
        # A hidden action counts as zero in the sum as well; `unknown` tells it apart from an action that is zero.
        masked_actions = actions if known is None else actions * known[..., None]
        # Divided by the chunk's length, the sum has the scale of a single action.
        embedded = self.action(torch.cat([masked_actions, masked_actions.cumsum(1) / self.chunk], -1))
        if known is not None:
            hidden = embedded + self.unknown.to(embedded.dtype)
            embedded = torch.where(known[..., None], embedded, hidden)
        return embedded

    def denoise(
        self, noisy: Tensor, present: Tensor, condition: Tensor, memory: Past, blocks: Blocks = fresh
    ) -> Tensor:
        """Return the output [N, F, C, height, width] for noisy frames of this shape after the latents `present` [N, C,
        height, width]; condition: [N, F, W], one per frame.
        """
        frames = noisy.shape[1]
        with autocast(self.precision, noisy.device):
            tokens, maps, each = self._enter(noisy, present, condition, blocks)
            mask = self._mask(frames, memory, noisy.device)
            for place, (block, past) in enumerate(zip(self.blocks, memory, strict=True)):
                tokens = block(tokens, condition, past, mask, blocks, 1 + 2 * place)
            shift, scale = self.last(condition)[:, :, None].chunk(2, -1)
            output = self.head(torch.addcmul(shift, self.norm(tokens), 1 + scale))
            size = {"v": self.views, "x": self.grid[1], "p": self.patch, "q": self.patch}
            maps = maps + rearrange(output, "n f (v y x) (c p q) -> (n f v) c (y p) (x q)", **size)
            for place, block in enumerate(self.fine[1:], 1 + 2 * len(self.blocks)):
                maps = block(maps, each, blocks, place)
            output = self.leave(functional.silu(maps))
        return rearrange(output.float(), "(n f v) c h w -> n f c (v h) w", f=frames, v=self.views)

    def extend(self, memory: Past, given: Tensor, present: Tensor, condition: Tensor) -> Past:
        """Return `memory` with keys and values of given frames [N, G, C, height, width], which later ones attend to.

        present, condition: as in `denoise`.
        """
        with autocast(self.precision, given.device):
            tokens, _, _ = self._enter(given, present, condition, fresh)
            mask = self._mask(given.shape[1], memory, given.device)
            extended: Past = []
            for block, past in zip(self.blocks, memory, strict=True):
                tokens, own = cast(FrameBlock, block).observe(tokens, condition, past, mask)
                extended.append((torch.cat([past[0], own[0]], 2), torch.cat([past[1], own[1]], 2)))
        return extended

    def _enter(
        self, noisy: Tensor, present: Tensor, condition: Tensor, blocks: Blocks
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens [N, F, S, W], the maps they were made of, and the condition of each map."""
        frames = noisy.shape[1]
        each = condition.repeat_interleave(self.views, 1).flatten(0, 1)
        inputs = torch.cat([noisy, present[:, None].expand_as(noisy)], 2)
        maps = self.enter(rearrange(inputs, "n f c (v h) w -> (n f v) c h w", v=self.views))
        maps = self.fine[0](maps, each, blocks, 0)
        stacked = rearrange(maps, "(n f v) c h w -> n f c (v h) w", f=frames, v=self.views)
        tokens = self.future(self._patches(stacked)) + self.position + self.summand(condition)[:, :, None]
        return tokens, maps, each

    def _mask(self, frames: int, memory: Past, device: torch.device) -> Tensor | None:
        """Return the attention mask of new frames after those in `memory`."""
        # A single frame sees everything; attention without a mask takes the faster kernel.
        return self._causal(frames, memory[0][0].shape[2], device) if frames > 1 else None

    def _patches(self, latents: Tensor) -> Tensor:
        return rearrange(latents, "n t c (y p) (x q) -> n t (y x) (c p q)", p=self.patch, q=self.patch)

    def _causal(self, frames: int, past: int, device: torch.device) -> Tensor:
        """Return the attention mask, [F * S, past + F * S] bool: all of the past, no frame after the token's own."""
        frame = torch.arange(frames, device=device).repeat_interleave(len(self.position))
        return functional.pad(frame[:, None] >= frame[None], (past, 0), value=True)


def _embedding(size: int, width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(size, width), nn.SiLU(), nn.Linear(width, width))
