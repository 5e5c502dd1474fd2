"""Climbs a critic through the denoising chain while imitating what was recorded: Diffusion-QL."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import DecidesFromNoise, Trainable
from robopolicy.core.randomness import Generators
from robopolicy.training.offline.configuration import DiffusionQlConfig
from robopolicy.training.offline.improvers import Lesson, imitate


class DiffusionQl:
    """See `DiffusionQlConfig`."""

    def __init__(self, config: DiffusionQlConfig):
        self.config = config

    def prepare(self, policy: Trainable) -> None:
        """Nothing is to be done; see `Improver`."""
        if not isinstance(policy, DecidesFromNoise):
            raise ConfigError(
                f"diffusion_ql follows a critic's gradient through the denoising steps, and {type(policy).__name__} "
                "does not decide from noise (see DecidesFromNoise in robopolicy/core/policy.py): best_of and "
                "weighted_imitation take any policy."
            )

    def improve(
        self, policy: Trainable, lesson: Lesson, generators: Generators, step: float, where: str
    ) -> dict[str, float]:
        """Imitate recorded decisions and climb the critic; see `Improver`."""
        assert isinstance(policy, DecidesFromNoise)
        actor: DecidesFromNoise = policy
        config = self.config
        data = lesson.data
        found = list[Tensor]()
        batch = partial(lesson.recorded, spec=policy.spec)

        def climb(rows: Tensor, drawn: dict[str, Any]) -> Tensor:
            draws = generators["noise"]
            noise = torch.randn((len(rows), *actor.noise_shape), generator=draws, device=draws.device)
            # Through the last step only, memory does not grow with the chain; earlier steps learn by imitation.
            through = None if config.through == "all" else 1
            latents = actor.trajectory(drawn["observation"], noise.to(data.step.device), through)
            action = lesson.interface.to_agent(actor.to_actions(latents[:, -1]))
            # The smallest critic: a single one would be climbed where it errs upwards.
            q = lesson.critic.action_values(data.transitions.state[rows], action).amin(0)
            found.append(q.detach().mean())
            return scaled_ascent(q, config.eta)

        also = climb if config.eta else None
        loss = imitate(policy, batch, len(data), config, step, generators, where, also=also)
        return {"loss": loss, **({"q": float(found[-1])} if found else {})}


def scaled_ascent(q: Tensor, eta: float) -> Tensor:
    """Return -eta mean(Q) / mean|Q| [] of values Q [N]; mean|Q| is held fixed, so eta means the same on any scale."""
    return -eta * q.mean() / q.detach().abs().mean().clamp_min(1e-6)
