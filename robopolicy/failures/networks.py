"""Small networks of detectors, fitted in a moment on a CPU with fixed seeds."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from robopolicy.core.arrays import Array


class Mlp:
    """A network D -> width -> width -> out, whose weights follow from `seed`, with standardised inputs."""

    def __init__(self, inputs: int, outputs: int, seed: int, width: int = 64):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            middle_layer, last_layer = nn.Linear(width, width), nn.Linear(width, outputs)
            first_layers = nn.Linear(inputs, width), nn.SiLU()
            self.network = nn.Sequential(*first_layers, middle_layer, nn.SiLU(), last_layer)
        self.middle, self.scale = torch.zeros(inputs), torch.ones(inputs)

    def standardise(self, vectors: Array) -> None:
        """Take mean and deviation of the inputs from vectors [n, D]."""
        values = torch.from_numpy(vectors).float()
        self.middle, self.scale = values.mean(0), values.std(0, correction=0).clamp_min(1e-3)

    def __call__(self, vectors: Array) -> Tensor:
        """Return outputs [n, out] for vectors [n, D]."""
        return self.network((torch.from_numpy(vectors).float() - self.middle) / self.scale)

    def fit(self, loss: Callable[[], Tensor], steps: int = 400, decay: float = 0.0) -> None:
        """Minimise a loss of all examples by AdamW."""
        optimiser = torch.optim.AdamW(self.network.parameters(), lr=3e-3, weight_decay=decay)
        for _ in range(steps):
            optimiser.zero_grad()
            loss().backward()
            optimiser.step()

    def state(self) -> dict[str, Any]:
        """Return weights and standardisation as arrays."""
        weights = {name: np.asarray(value) for name, value in self.network.state_dict().items()}
        return {"weights": weights, "middle": np.asarray(self.middle), "scale": np.asarray(self.scale)}

    @staticmethod
    def restored(state: Mapping[str, Any]) -> "Mlp":
        """Rebuild from `state`."""
        weights = {name: torch.as_tensor(np.asarray(value)) for name, value in state["weights"].items()}
        mlp = Mlp(weights["0.weight"].shape[1], len(weights["4.bias"]), 0, len(weights["0.bias"]))
        mlp.network.load_state_dict(weights)
        mlp.middle, mlp.scale = (torch.as_tensor(np.asarray(state[name])) for name in ("middle", "scale"))
        return mlp
