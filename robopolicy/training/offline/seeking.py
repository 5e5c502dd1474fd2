"""Improver that seeks better action chunks while acting: gradient ascent on a critic in the policy's latent space.

LatentSeek, Li et al. 2025, arXiv:2505.13308. The paper moves the hidden states of an answer's first part by a policy
gradient on a reward. Here the latent is the initial noise of a denoising policy, of which the chunk is a differentiable
function, and the reward is the minimum of the critics; weights stay as they are.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import Decision, Policy, TensorObservation, Trainable
from robopolicy.core.randomness import Generators, normal
from robopolicy.core.spec import PolicySpec, validate_observation
from robopolicy.rl.offline.agent import OfflineAgent, minimum_value_of
from robopolicy.rl.offline.interface import Interface
from robopolicy.training.critics import (
    AgentAroundBase,
    Steerable,
    load_around,
    require_chunks_of,
    require_steerable,
    save_around,
)
from robopolicy.training.offline.configuration import LatentSeekConfig
from robopolicy.training.offline.improvers import OfflineContext


def seek(value: Callable[[Tensor], Tensor], noise: Tensor, config: LatentSeekConfig, steps: int) -> Tensor:
    """Return noise [B, P, A] after `steps` Adam steps that raise value(noise) [B] minus a penalty on its mean square.

    A row stops once its value exceeds config.enough.
    """
    sought = noise.clone()
    first, second = torch.zeros_like(noise), torch.zeros_like(noise)
    for step in range(1, steps + 1):
        with torch.enable_grad():
            sought.requires_grad_()
            values = value(sought)
            goal = values - config.noise_penalty * sought.square().mean((1, 2))
            (gradient,) = torch.autograd.grad(goal.sum(), sought)
        # Adam by hand: a row that has stopped must not be carried on by its moments.
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient.square()
        move = (first / (1 - 0.9**step)) / ((second / (1 - 0.999**step)).sqrt() + 1e-8)
        goes_on = torch.ones_like(values) if config.enough is None else (values <= config.enough).to(values.dtype)
        sought = sought.detach() + config.learning_rate * move * goes_on[:, None, None]
    return sought


class SeekingPolicy(AgentAroundBase[Steerable]):
    """A `Policy` that executes its base's noise-free chunk from noise that the critics prefer to the one drawn.

    steps: number of gradient steps, stored in a buffer; with 0 the base acts unchanged. The checkpoint contains the
    base and the critics. Raises ConfigError when chunk lengths differ, or the base has no initial noise or cannot be
    saved.
    """

    steps: Tensor

    def __init__(self, base: Policy, agent: OfflineAgent, interface: Interface, config: LatentSeekConfig, steps: int):
        super().__init__(require_steerable(require_chunks_of(base, interface)), agent, interface)
        self.config = config
        self.register_buffer("steps", torch.tensor(steps))

    @property
    def spec(self) -> PolicySpec:
        """Spec of the base plus the critics' inputs, without log-probabilities."""
        return replace(super().spec, scored_steps=0)

    @torch.no_grad()
    def act(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Decision:
        """Return the sought actions [B, C, A], without log-probabilities. Raises the errors of base and critics."""
        steps = int(self.steps)
        if not steps:
            return Decision(self.inner.act(observation, generator, deterministic=deterministic).actions)
        validate_observation(observation, self.spec.observation, history=self.spec.history)
        rows = len(next(value for value in observation.values() if isinstance(value, Tensor)))
        score = minimum_value_of(self.agent, self.interface)

        def decide(noise: Tensor) -> Tensor:
            return self.base.to_actions(self.base.trajectory(observation, noise)[:, -1])

        device = next(self.base.parameters()).device
        with torch.inference_mode(False):  # tensors of inference mode take no part in gradients, so they are copied
            observation = {
                key: value.clone() if isinstance(value, Tensor) else value for key, value in observation.items()
            }
            noise = normal((rows, *self.base.noise_shape), generator, device)
            sought = seek(lambda noise: score(observation, decide(noise)), noise, self.config, steps)
            with torch.no_grad():
                return Decision(decide(sought))

    def save(self, folder: Path) -> None:
        """Write a checkpoint atomically, including the base and the critics."""
        save_around(self, folder, "seeking", {"seek": asdict(self.config), "steps": int(self.steps)})

    @classmethod
    def load(
        cls, folder: Path, description: Mapping[str, object], device: torch.device | str = "cpu"
    ) -> "SeekingPolicy":
        """Load what `save` wrote; raises CheckpointError when the files are inconsistent."""

        def make(base: Policy, agent: OfflineAgent, interface: Interface) -> "SeekingPolicy":
            config = LatentSeekConfig(**cast(dict[str, float], description["seek"]))  # type: ignore[arg-type]
            return cls(base, agent, interface, config, int(cast(int, description["steps"])))

        return load_around(folder, description, device, make)


class LatentSeek:
    """Improver with the settings `LatentSeekConfig`, which describes the method."""

    def __init__(self, config: LatentSeekConfig):
        self.config = config

    def wrap(self, policy: Policy, lesson: OfflineContext, seed: int) -> Trainable:
        """Return the policy as the base of one that will seek by the prefitted critic; see `Wraps`."""
        return cast(Trainable, SeekingPolicy(policy, lesson.critic, lesson.interface, self.config, 0))

    def prepare(self, policy: Trainable) -> None:
        """Do nothing; raises ConfigError for a policy that was not wrapped."""
        if not isinstance(policy, SeekingPolicy):
            raise ConfigError(
                f"latent_seek changes a SeekingPolicy, not a {type(policy).__name__}: wrap() creates one."
            )

    def improve(
        self, policy: Trainable, lesson: OfflineContext, generators: Generators, step: float, where: str
    ) -> dict[str, float]:
        """Increase the number of gradient steps; see `Improver`. step: fraction of the configured increment."""
        seeking = cast(SeekingPolicy, policy)
        seeking.steps.add_(max(1, round(step * self.config.steps)))
        return {"steps": float(seeking.steps)}
