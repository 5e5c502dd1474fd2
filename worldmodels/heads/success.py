"""Is the goal reached? A contrastive and cross-entropy success classifier (DiWA, arXiv:2508.03645)."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from robopolicy.nn.members import Members


def contrastive_loss(embedding: Tensor, label: Tensor, temperature: float = 0.5) -> Tensor:
    """Return the supervised NT-Xent loss [N] of embeddings [N, D] with boolean labels [N].

        l_i = -mean_{j of i's label, j != i} log( exp(z_i z_j / t) / sum_{k != i} exp(z_i z_k / t) ),  |z| = 1

    Rows that are alone with their label have no partner and cost nothing.
    """
    unit = functional.normalize(embedding, dim=-1)
    similarity = unit @ unit.T / temperature
    itself = torch.eye(len(unit), dtype=torch.bool, device=unit.device)
    log_share = similarity - similarity.masked_fill(itself, -torch.inf).logsumexp(1, keepdim=True)
    partner = (label[:, None] == label[None]) & ~itself
    return -torch.where(partner, log_share, 0.0).sum(1) / partner.sum(1).clamp(min=1)


class SuccessHead(nn.Module):
    """Is the goal reached? An embedding of what it reads, pulled apart by label, and a logit on top."""

    def __init__(self, inputs: int, width: int, depth: int = 2, contrast: float = 0.1, temperature: float = 0.5):
        super().__init__()
        self.trunk = Members(1, inputs, width, depth, width)
        self.logit = nn.Linear(width, 1)
        self.contrast, self.temperature = contrast, temperature

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits [...] of inputs [..., F], before calibration."""
        return self.logit(functional.silu(self._embedding(inputs)))[..., 0]

    def loss(self, inputs: Tensor, label: Tensor) -> Tensor:
        """Return cross-entropy plus `contrast` times the contrastive loss, [N], of inputs [N, F] and labels [N]."""
        embedding = self._embedding(inputs)
        logit = self.logit(functional.silu(embedding))[:, 0]
        entropy = functional.binary_cross_entropy_with_logits(logit, label.float(), reduction="none")
        if not self.contrast:
            return entropy
        return entropy + self.contrast * contrastive_loss(embedding, label, self.temperature)

    def _embedding(self, inputs: Tensor) -> Tensor:
        return self.trunk(inputs.reshape(1, -1, inputs.shape[-1]))[0].reshape(*inputs.shape[:-1], -1)
