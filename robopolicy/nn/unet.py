"""1-D convolutional U-Net denoiser over the chunk's time axis, built from diffusers' residual temporal blocks."""

import torch
from diffusers.models.resnet import ResidualTemporalBlock1D
from einops import rearrange
from torch import Tensor, nn

from robopolicy.core.errors import ConfigError
from robopolicy.nn.blocks import TimeEmbedding
from robopolicy.nn.branches import Blocks, fresh


class UNetDenoiser(nn.Module):
    """Resolutions of width, 2 width, ... channels; every block adds its projection of [time + condition] features.

    After Diffusion Policy (arXiv:2303.04137) and Diffuser (arXiv:2205.09991): convolution, group norm, Mish. Each
    resolution halves the chunk, so P must be a multiple of 2 ** (depth - 1). Raises ConfigError when it is not, and
    unless the width is a multiple of 8.
    """

    def __init__(self, prediction_steps: int, action_size: int, condition_size: int, width: int = 64, depth: int = 2):
        super().__init__()
        factor = 2 ** (depth - 1)
        if prediction_steps % factor:
            raise ConfigError(
                f"A U-Net of depth {depth} halves the chunk {depth - 1} times: prediction_steps must be a multiple of "
                f"{factor}, not {prediction_steps}. Use a smaller depth or another chunk."
            )
        if width % 8:
            raise ConfigError(f"The U-Net's group norm needs a width that is a multiple of 8, not {width}.")
        sizes = [width * 2**level for level in range(depth)]
        self.time = TimeEmbedding(width)
        self.condition = nn.Sequential(nn.Linear(condition_size, width), nn.SiLU(), nn.Linear(width, width))

        def block(size_in: int, size_out: int) -> ResidualTemporalBlock1D:
            return ResidualTemporalBlock1D(size_in, size_out, embed_dim=width, kernel_size=3)

        inputs = [action_size, *sizes[:-1]]
        self.down = nn.ModuleList(block(size_in, size) for size_in, size in zip(inputs, sizes, strict=True))
        self.shrink = nn.ModuleList(nn.Conv1d(size, size, 3, 2, 1) for size in sizes[:-1])
        self.middle = block(sizes[-1], sizes[-1])
        self.grow = nn.ModuleList(nn.ConvTranspose1d(2 * size, size, 4, 2, 1) for size in sizes[:-1])
        self.up = nn.ModuleList(block(2 * size, size) for size in sizes[:-1])
        self.head = nn.Conv1d(width, action_size, 1)

    @property
    def block_names(self) -> tuple[str, ...]:
        """Names of the residual blocks, from the finest resolution down to the coarsest and up again."""
        down = [f"down.{level}" for level in range(len(self.down))]
        return (*down, "middle", *(f"up.{level}" for level in reversed(range(len(self.up)))))

    def encode_time(self, time: Tensor) -> Tensor:
        """Return time features [..., width]."""
        return self.time(time)

    def encode_condition(self, condition: Tensor) -> Tensor:
        """Return condition features [..., width]."""
        return self.condition(condition)

    def denoise(self, x: Tensor, time_features: Tensor, condition_features: Tensor, blocks: Blocks = fresh) -> Tensor:
        """Predict [..., P, A] from latents x [..., P, A]; both features broadcast against x's leading axes."""
        features = (time_features + condition_features).expand(*x.shape[:-2], -1)
        features = features.reshape(-1, features.shape[-1])
        hidden = rearrange(x.reshape(-1, *x.shape[-2:]), "n p a -> n a p")
        skips: list[Tensor] = []
        for level, block in enumerate(self.down):
            hidden = _residual(block, hidden, features, blocks, level)
            if level < len(self.shrink):
                skips.append(hidden)
                hidden = self.shrink[level](hidden)
        hidden = _residual(self.middle, hidden, features, blocks, len(self.down))
        for place, level in enumerate(reversed(range(len(self.grow))), len(self.down) + 1):
            hidden = torch.cat([self.grow[level](hidden), skips[level]], 1)
            hidden = _residual(self.up[level], hidden, features, blocks, place)
        return rearrange(self.head(hidden), "n a p -> n p a").reshape(x.shape)

    def forward(self, x: Tensor, time: Tensor, condition: Tensor) -> Tensor:
        """Predict [..., P, A] for latents x [..., P, A], times [...], conditions [..., D]."""
        return self.denoise(x, self.encode_time(time), self.encode_condition(condition))


def _residual(block: nn.Module, hidden: Tensor, features: Tensor, blocks: Blocks, place: int) -> Tensor:
    """Apply one of diffusers' residual blocks to maps [N, C, P], with its convolutions as a branch of `blocks`.

    Computes the same sum of branch and shortcut as the block's own forward.
    """
    assert isinstance(block, ResidualTemporalBlock1D)

    def branch() -> Tensor:
        shift = block.time_emb(block.time_emb_act(features))
        return block.conv_out(block.conv_in(hidden) + shift[..., None])

    return blocks(place, branch) + block.residual_conv(hidden)
