"""M multilayer perceptrons as one batched tensor: ensembles of dynamics, of critics, of heads."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional


class Members(nn.Module):
    """M perceptrons of `depth` hidden layers: [M, N, inputs] -> [M, N, outputs], each member on its own batch.

    activation: silu, smooth, or relu, which extrapolates linearly; layer_norm: normalise hidden layers, which keeps
    what is predicted far from the data from growing (Ball et al. 2023, arXiv:2302.02948).
    """

    def __init__(
        self,
        members: int,
        inputs: int,
        width: int,
        depth: int,
        outputs: int,
        activation: str = "silu",
        layer_norm: bool = False,
    ):
        super().__init__()
        sizes = [inputs] + [width] * depth + [outputs]
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for before, after in pairwise(sizes):
            self.weights.append(nn.Parameter(torch.randn(members, before, after) / before**0.5))
            self.biases.append(nn.Parameter(torch.zeros(members, 1, after)))
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(members, 1, width)) for _ in range(depth * layer_norm))
        self.activation = {"silu": functional.silu, "relu": functional.relu}[activation]

    def forward(self, x: Tensor) -> Tensor:
        """Run every member on its own batch, x [M, N, inputs] -> [M, N, outputs]."""
        last, fresh = len(self.weights) - 1, not torch.is_grad_enabled()
        # Indexing a ParameterList costs as much as multiplying a small batch: what it holds is read directly.
        layers = zip(self.weights._parameters.values(), self.biases._parameters.values(), strict=True)
        for layer, (weight, bias) in enumerate(layers):
            assert weight is not None and bias is not None
            x = torch.baddbmm(bias, x, weight)
            if layer == last:
                return x
            if len(self.scales):
                x = functional.layer_norm(x, x.shape[-1:]) * self.scales[layer]
            x = self.activation(x, inplace=fresh)  # what nobody differentiates may be overwritten
        return x


@torch.no_grad()
def follow(slow: nn.Module, fast: nn.Module, rate: float) -> None:
    """Move the weights of a slow copy by `rate` of the way to those of `fast` (Polyak averaging of target networks)."""
    for old, new in zip(slow.parameters(), fast.parameters(), strict=True):
        old.lerp_(new, rate)
