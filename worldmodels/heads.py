"""What models read off their latents: success, detected and calibrated, and how much there is still to earn.

Sources: DiWA, arXiv:2508.03645 (contrastive and cross-entropy loss of a latent success classifier); NT-Xent, Chen et
al. 2020, arXiv:2002.05709, in its supervised form, Khosla et al. 2020, arXiv:2004.11362; Cosmos Policy (Monte-Carlo
values). Success is debounced by the world around a model (`ImaginedWorld`, world.imagination.debounce).
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from robopolicy.core.episodes import Episodes
from robopolicy.nn.members import Members


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


def returns_to_go(reward: Tensor, episodes: Episodes, discount: float) -> Tensor:
    """Return sum_{s >= t} discount^(s - t) reward_s within each episode, [N], of rewards [N]."""
    total, steps = torch.zeros(len(reward), dtype=torch.float64), reward.double()
    longest = int(episodes.lengths.max())
    last = episodes.starts + episodes.lengths - 1
    running = torch.zeros(len(episodes), dtype=torch.float64)
    for back in range(longest):
        index = (last - back).clamp(min=0)
        inside = back < episodes.lengths
        running = torch.where(inside, steps[index] + discount * running, running)
        total[index[inside]] = running[inside]
    return total.float()


class ValueHead(nn.Module):
    """How much is still to come, by regression on what came (Monte Carlo); a `Regression` over state vectors.

    features: (episodes, steps [M]) -> what it reads, [M, F]; values are standardised with statistics of the data.
    """

    mean: Tensor
    std: Tensor
    input_mean: Tensor
    input_std: Tensor

    def __init__(self, features: Any, inputs: int, width: int = 192, depth: int = 2, discount: float = 0.99):
        super().__init__()
        self.features, self.discount = features, discount
        self.network = Members(1, inputs, width, depth, 1)
        for name, size in (("mean", 1), ("std", 1), ("input_mean", inputs), ("input_std", inputs)):
            self.register_buffer(name, torch.zeros(size) if name.endswith("mean") else torch.ones(size))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return values [N] of inputs [N, F]."""
        standard = (inputs - self.input_mean) / self.input_std
        return (self.network(standard[None])[0] * self.std + self.mean)[:, 0]

    def batches(self, episodes: Episodes, generator: torch.Generator) -> Iterator[dict[str, Tensor]]:
        """Yield {"inputs", "value"} for ever; `generator` is all the state."""
        assert episodes.reward is not None
        value = returns_to_go(episodes.reward, episodes, self.discount)
        inputs = self.features(episodes, torch.arange(episodes.step_count))
        with torch.no_grad():
            self.mean.fill_(float(value.mean()))
            self.std.fill_(float(value.std(correction=0).clamp_min(1e-6)))
            self.input_mean.copy_(inputs.mean(0))
            self.input_std.copy_(inputs.std(0, correction=0).clamp_min(1e-6))
        while True:
            rows = torch.randint(len(value), (512,), generator=generator, device=generator.device).cpu()
            yield {"inputs": inputs[rows].to(self.mean.device), "value": value[rows].to(self.mean.device)}

    def loss(self, batch: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
        """Return {"value": [N]}, squared errors in standard deviations."""
        return {"value": ((self(batch["inputs"]) - batch["value"]) / self.std).square()}
