"""What models read off their latents: success, detected and calibrated, and how much there is still to earn.

Sources: DiWA, arXiv:2508.03645 (contrastive and cross-entropy loss of a latent success classifier); NT-Xent, Chen et
al. 2020, arXiv:2002.05709, in its supervised form, Khosla et al. 2020, arXiv:2004.11362; Cosmos Policy (Monte-Carlo
values). Success is debounced by the world around a model (`ImaginedWorld`, world.imagination.debounce).
"""

import torch
from torch import Tensor


def calibrated_threshold(logit: Tensor, label: Tensor) -> Tensor:
    """Return the threshold [] above which as many logits [N] lie as labels [N] are true; infinity if none is.

    Precision equals recall there: it undoes a batch's share of positives, and keeps imagined success rates unbiased.
    """
    if not bool(label.any()):
        return torch.tensor(torch.inf)
    return torch.quantile(logit.double(), 1 - label.double().mean().to(logit.device)).float()


def explains_as_well(potential: Tensor, reward: Tensor, paid: Tensor, tolerance: float = 0.1) -> bool:
    """Return whether the increase of a potential [N] explains rewards [N] as well as what a head says, `paid` [N].

    tolerance: share of the rewards' variance by which it may be worse. Imagined progress that is no increase of
    anything can be earned in circles, and policies find them: what is exact for a potential is worth a little error.
    """
    allowed = (paid - reward).square().mean() + tolerance * reward.var(correction=0)
    return bool((potential - reward).square().mean() <= allowed)


def quantiles_of(value: Tensor, count: int = 101) -> Tensor:
    """Return `count` evenly spaced quantiles of values [N], the lowest and the highest among them."""
    return torch.quantile(value, torch.linspace(0, 1, count, device=value.device))
