"""How much reward is still to come, by Monte-Carlo regression (Cosmos Policy)."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from robopolicy.core.episodes import Episodes
from robopolicy.core.returns import returns_to_go
from robopolicy.nn.members import Members


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
