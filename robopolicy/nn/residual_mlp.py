"""The residual MLP denoiser of DPPO (arXiv:2409.00588), lean enough for fine-tuning on two CPU cores."""

import torch
from torch import Tensor, nn

from robopolicy.nn.blocks import TimeEmbedding
from robopolicy.nn.branches import Blocks, fresh


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
