"""Success heads: the built-in ones, and the interface of custom heads.

The contrastive head follows DiWA (arXiv:2508.03645). World models select a head by name or import path: the setting
`success_head` of their configurations.
"""

from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from robopolicy.core.errors import ConfigError
from robopolicy.nn.blocks import Members
from worldmodels.registry import SUCCESS_HEADS


class SuccessHead(Protocol):
    """A torch.nn.Module that predicts success from a state or latent, constructed as cls(inputs, width, depth).

    inputs: number of input features F; width, depth: of the model's other heads. A model that trains latents and heads
    together uses the plain cross-entropy of the logits at first, and `loss` once the latents are final.
    """

    def __call__(self, inputs: Tensor, /) -> Tensor:
        """Return logits [...] of inputs [..., F], its `forward`; thresholds are calibrated on held-out steps."""
        ...

    def loss(self, inputs: Tensor, label: Tensor, /) -> Tensor:
        """Return the loss [N] of inputs [N, F] and labels [N] bool."""
        ...


def contrastive_loss(embedding: Tensor, label: Tensor, temperature: float = 0.5) -> Tensor:
    """Return the supervised NT-Xent loss [N] of embeddings [N, D] with boolean labels [N].

        l_i = -mean_{j of i's label, j != i} log( exp(z_i z_j / t) / sum_{k != i} exp(z_i z_k / t) ),  |z| = 1

    Rows without another row of the same label have no partner and zero loss.
    """
    unit = functional.normalize(embedding, dim=-1)
    similarity = unit @ unit.T / temperature
    itself = torch.eye(len(unit), dtype=torch.bool, device=unit.device)
    log_share = similarity - similarity.masked_fill(itself, -torch.inf).logsumexp(1, keepdim=True)
    partner = (label[:, None] == label[None]) & ~itself
    return -torch.where(partner, log_share, 0.0).sum(1) / partner.sum(1).clamp(min=1)


class LogisticHead(Members):
    """A `SuccessHead`: an MLP trained by cross-entropy."""

    def __init__(self, inputs: int, width: int, depth: int = 2):
        super().__init__(1, inputs, width, depth, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [...] of inputs x [..., F], before calibration."""
        return super().forward(x.reshape(1, -1, x.shape[-1])).reshape(x.shape[:-1])

    def loss(self, inputs: Tensor, label: Tensor) -> Tensor:
        """Return the cross-entropy [N] of inputs [N, F] and labels [N]."""
        return functional.binary_cross_entropy_with_logits(self(inputs), label.float(), reduction="none")


class ContrastiveHead(nn.Module):
    """A `SuccessHead`: an embedding trained to separate the labels, and a logit on top."""

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


def make_success_head(name: str, inputs: int, width: int, depth: int) -> SuccessHead:
    """Build the head that `name` (a registered name or an import path) selects, for inputs [..., F] of F = `inputs`
    features.

    Raises ConfigError when there is no such head or it is invalid: not a torch.nn.Module, without `loss`, or with
    logits or losses of another shape than `SuccessHead` specifies.
    """
    head = SUCCESS_HEADS.load(name)(inputs, width, depth)
    loss = getattr(head, "loss", None)
    if not isinstance(head, nn.Module) or loss is None:
        raise ConfigError(f"The success head '{name}' must be a torch.nn.Module with a method loss(inputs, label).")
    head.eval()
    with torch.no_grad():
        # With two leading axes, as imagination reads whole paths: a head that takes [N, F] only must fail here.
        logits = tuple(head(torch.zeros(2, 3, inputs)).shape)
        losses = tuple(loss(torch.zeros(2, inputs), torch.tensor([False, True])).shape)
    if logits != (2, 3) or losses != (2,):
        raise ConfigError(
            f"The success head '{name}' returns logits {logits} for inputs (2, 3, {inputs}) and losses {losses} for "
            "2 rows: they must be (2, 3) and (2,), one number per row."
        )
    return cast(SuccessHead, head.train())
