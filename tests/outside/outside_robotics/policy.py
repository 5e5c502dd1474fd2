"""A policy of one's own: a Gaussian around what a small network says, one scored step a decision."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from robopolicy.core.policy import Decision, Scores, TensorObservation
from robopolicy.core.spec import Field, PolicySpec, validate_observation
from robopolicy.core.world import Rows
from robopolicy.policies.checkpoint import save_policy


@dataclass(frozen=True)
class GaussianConfig:
    """A Gaussian over action chunks."""

    width: int = 64
    """Of its hidden layers."""
    chunk: int = 2
    """Control steps a decision."""
    deviation: float = 0.2
    """Standard deviation of its exploration, in the world's units of action."""


class GaussianPolicy(nn.Module):
    """A `Trainable`: acts, scores its decisions, learns by imitation and by policy gradients."""

    configuration = GaussianConfig

    def __init__(
        self,
        config: GaussianConfig,
        observation: Mapping[str, Field],
        action: Field,
        *,
        fps: float,
        instructions: tuple[str, ...] = ("",),
        values: Mapping[str, Tensor] | None = None,
        seed: int = 0,
    ):
        super().__init__()
        self.config = config
        self.fields = {key: field for key, field in observation.items() if field.dtype == "float32"}
        self.action, self.fps, self.instructions = action, fps, instructions
        size = sum(field.size for field in self.fields.values())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.network = nn.Sequential(
                nn.Linear(size, config.width),
                nn.Tanh(),
                nn.Linear(config.width, config.width),
                nn.Tanh(),
                nn.Linear(config.width, config.chunk * action.size),
            )
        self.log_std = nn.Parameter(torch.full((action.size,), config.deviation).log())
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("std", torch.ones(size))
        if values is not None:
            data = torch.cat([values[key].flatten(1) for key in self.fields], 1)
            self.mean.copy_(data.mean(0))
            self.std.copy_(data.std(0).clamp_min(1e-3))

    @property
    def spec(self) -> PolicySpec:
        """One frame in, a chunk out, one log-probability a decision."""
        return PolicySpec(
            observation=self.fields,
            action=self.action,
            history=1,
            chunk=self.config.chunk,
            prediction=self.config.chunk,
            scored_steps=1,
            fps=self.fps,
            instructions=self.instructions,
        )

    def means(self, observation: TensorObservation) -> Tensor:
        """Return the most likely chunk [N, C, A]."""
        validate_observation(observation, self.fields, history=1)
        vector = torch.cat([torch.as_tensor(observation[key]).flatten(1) for key in self.fields], 1)
        return self.network((vector - self.mean) / self.std).reshape(-1, self.config.chunk, self.action.size)

    @torch.no_grad()
    def act(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Decision:
        """Draw a chunk, or take its mean."""
        mean = self.means(observation)
        if deterministic:
            empty = torch.zeros(len(mean), 1, device=mean.device)
            return Decision(self._clipped(mean), {"x": mean}, empty, empty.bool())
        noise = torch.randn(mean.shape, generator=generator, device=generator.device).to(mean.device)
        x = mean + self.log_std.exp() * noise
        drawn = torch.ones(len(x), 1, dtype=torch.bool, device=x.device)
        return Decision(self._clipped(x), {"x": x}, self._logp(mean, x), drawn)

    def log_prob(self, observation: TensorObservation, latents: Mapping[str, Tensor]) -> Scores:
        """Score recorded chunks."""
        mean = self.means(observation)
        logp = self._logp(mean, latents["x"])
        entropy = (self.log_std + 1.4189385).sum() * self.config.chunk
        return Scores(logp, entropy.expand(logp.shape))

    def loss(self, batch: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
        """Squared error of the mean, [N]."""
        error = (self.means(batch["observation"]) - batch["actions"]).square().mean(-1)
        valid = batch["action_valid"].float()
        return {"imitation": (error * valid).sum(1) / valid.sum(1).clamp_min(1)}

    def trainable_parameters(self) -> list[nn.Parameter]:
        """Every weight."""
        return list(self.parameters())

    def prepare_finetuning(self, steps: int | None = None, *, train_encoder: bool = True) -> None:
        """Nothing to prepare."""

    def reset(self, rows: Rows = None) -> None:
        """Nothing is remembered."""

    def save(self, folder: Path) -> None:
        """Write a checkpoint that names this class."""
        save_policy(self, folder)

    def _logp(self, mean: Tensor, x: Tensor) -> Tensor:
        normal = torch.distributions.Normal(mean, self.log_std.exp().expand_as(mean))
        return normal.log_prob(x).sum((1, 2))[:, None]

    def _clipped(self, x: Tensor) -> Tensor:
        low, high = (torch.as_tensor(bound).to(x) for bound in (self.action.low, self.action.high))
        return torch.minimum(torch.maximum(x, low), high)
