"""A success head of one's own: focal loss, which minds the steps that are still judged wrong (Lin et al. 2017)."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class FocalHead(nn.Module):
    """One perceptron; steps that it is sure of count less in its loss."""

    def __init__(self, inputs: int, width: int, depth: int):
        super().__init__()
        hidden = [part for size in [inputs] + [width] * (depth - 1) for part in (nn.Linear(size, width), nn.SiLU())]
        self.network = nn.Sequential(*hidden, nn.Linear(width, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits [...] of inputs [..., F]."""
        return self.network(inputs)[..., 0]

    def loss(self, inputs: Tensor, label: Tensor) -> Tensor:
        """Return the focal loss [N] of inputs [N, F] and labels [N]."""
        entropy = functional.binary_cross_entropy_with_logits(self(inputs), label.float(), reduction="none")
        return (1 - torch.exp(-entropy)).square() * entropy
