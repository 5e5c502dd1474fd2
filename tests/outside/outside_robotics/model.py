"""A world model without a decoder (as TD-MPC's): an encoder, and all else in its latent."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from robopolicy.core.episodes import Episodes
from robopolicy.core.spec import Field, WorldSpec
from robopolicy.core.vectors import StateVector
from worldmodels.protocol import LATENT, Context, Imagined, Latent


@dataclass(frozen=True)
class LatentConfig:
    """A latent dynamics model."""

    size: int = 12
    """Of the latent."""
    width: int = 64
    """Of the layers."""
    batch_size: int = 256
    """Steps a training step."""


class LatentModel(nn.Module):
    """Predicts its own next latent, the reward and success; the encoder learns with them, its targets stand still."""

    configuration = LatentConfig
    context = 1
    uncertainty_quantiles: Tensor

    def __init__(self, config: LatentConfig, spec: WorldSpec, seed: int = 0):
        super().__init__()
        self.config = config
        self.vector = StateVector.of(spec)
        self.reads = {key: spec.observation[key] for key in self.vector.keys}
        size, width, actions = config.size, config.width, spec.action.size
        self.spec = replace(spec, observation={LATENT: Field((size,))}, rewards=("reward",), history=1)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.encoder = nn.Sequential(
                nn.Linear(self.vector.size, width), nn.SiLU(), nn.Linear(width, size), nn.Tanh()
            )
            self.change = nn.Sequential(nn.Linear(size + actions, width), nn.SiLU(), nn.Linear(width, size))
            self.heads = nn.Sequential(nn.Linear(2 * size, width), nn.SiLU(), nn.Linear(width, 2))
        self.register_buffer("uncertainty_quantiles", torch.zeros(101))

    @classmethod
    def build(cls, config: LatentConfig, spec: WorldSpec, episodes: Episodes, seed: int) -> Self:
        """Return an untrained model."""
        return cls(config, spec, seed)

    def description(self) -> dict[str, Any]:
        """Return what `restore` needs: the sizes, and the fields that the encoder reads."""
        return {"config": asdict(self.config), "reads": {key: field.to_json() for key, field in self.reads.items()}}

    @classmethod
    def restore(cls, description: Mapping[str, Any], spec: WorldSpec, weights: Mapping[str, Tensor]) -> Self:
        """Return a model into which `weights` can be loaded."""
        reads = {key: Field.from_json(field) for key, field in description["reads"].items()}
        return cls(LatentConfig(**description["config"]), replace(spec, observation=reads))

    def stages(self) -> Mapping[str, tuple[Any, float]]:
        """Everything is fitted at once."""
        return {"latents": (self, 1.0)}

    def batches(self, episodes: Episodes, generator: torch.Generator) -> Iterator[dict[str, Tensor]]:
        """Yield random steps for ever."""
        data = episodes.transitions(self.vector)
        names = ("state", "action", "next_state", "reward", "success")
        while True:
            drawn = torch.randint(
                len(data.state), (self.config.batch_size,), generator=generator, device=generator.device
            )
            rows = drawn.to(data.state.device)
            yield {name: getattr(data, name)[rows].to(generator.device) for name in names}

    def loss(self, batch: Mapping[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        """Return the parts of the loss, each [N]."""
        before = self.encoder(batch["state"])
        with torch.no_grad():
            after = self.encoder(batch["next_state"])
        guess, reward, logit = self._ahead(before, batch["action"])
        return {
            "latent": 100 * (guess - after).square().mean(-1),
            "reward": 10 * (reward - batch["reward"]).square(),
            "success": functional.binary_cross_entropy_with_logits(logit, batch["success"].float(), reduction="none"),
        }

    def calibrate(self, episodes: Episodes) -> None:
        """It is never unsure."""

    @torch.no_grad()
    def initial(self, context: Context, seeds: np.ndarray) -> Latent:
        """Encode the present frame."""
        vector = torch.from_numpy(self.vector.pack({key: context.last(key) for key in self.vector.keys}))
        return {"z": self.encoder(vector.float().to(self.uncertainty_quantiles.device))}

    def show(self, latent: Latent) -> Mapping[str, Tensor]:
        """Return the latent as the one field that is seen."""
        return {LATENT: latent["z"]}

    @torch.no_grad()
    def imagine(self, latent: Latent, actions: Tensor) -> tuple[Latent, Imagined]:
        """Advance by one control step."""
        after, reward, logit = self._ahead(latent["z"], actions.float())
        sure = torch.zeros_like(reward)
        return {"z": after}, Imagined({LATENT: after}, {"reward": reward}, logit > 0, sure.bool(), sure)

    def _ahead(self, before: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        after = before + self.change(torch.cat([before, action], -1))
        reward, logit = self.heads(torch.cat([before, after], -1)).unbind(-1)
        return after, reward, logit
