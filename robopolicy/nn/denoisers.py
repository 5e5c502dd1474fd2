"""Denoisers: three networks with one call, `(x [..., P, A], time [...], condition [..., D]) -> [..., P, A]`.

The leading axes broadcast, so K steps of one observation share its features: x [N, K, P, A], time [K] and condition
[N, 1, D]. What depends on time or condition alone is computed by `encode_time` and `encode_condition`, once a chain;
`denoise` is the step that is repeated. There is no dropout and no batch norm anywhere, so acting, scoring and averaged
weights agree exactly.
"""

from typing import Protocol

from torch import Tensor

from robopolicy.core.errors import ConfigError
from robopolicy.nn.branches import Blocks, fresh
from robopolicy.nn.configuration import DenoiserKind
from robopolicy.nn.residual_mlp import ResidualMLP
from robopolicy.nn.transformer import TransformerDenoiser


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
