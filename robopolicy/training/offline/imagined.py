"""Candidates trained by PPO in a world model of the log, a few iterations per round."""

from dataclasses import replace

import torch

from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import Trainable, require_trainable
from robopolicy.core.randomness import Generators, derive_seed
from robopolicy.training.configuration import with_bc_toward_base
from robopolicy.training.finetune import finetune
from robopolicy.training.offline.configuration import ImaginedPpoConfig
from robopolicy.training.offline.improvers import OfflineContext


class ImaginedPpo:
    """Improver with the settings `ImaginedPpoConfig`, which describes the method."""

    def __init__(self, config: ImaginedPpoConfig):
        self.config = config

    def prepare(self, policy: Trainable) -> None:
        """Select the last denoising steps (or all tokens) for training; see `Improver`."""
        if not policy.spec.scored_steps:
            raise ConfigError(
                f"{type(policy).__name__} has no log-probabilities of its steps, which imagined_ppo needs."
            )
        policy.prepare_finetuning(None)

    def improve(
        self, policy: Trainable, lesson: OfflineContext, generators: Generators, step: float, where: str
    ) -> dict[str, float]:
        """Fine-tune in imagination; see `Improver`."""
        imagination = lesson.imagination
        if imagination is None:
            raise ConfigError("imagined_ppo trains in a world model, and none is given.")
        # A round's own draws: whatever became of the candidates before, this one is made in the same way.
        draws = generators["imagination"]
        seed = derive_seed(int(torch.randint(2**31, (), generator=draws, device=draws.device)), where)
        base_settings, config = imagination.settings, self.config
        settings = replace(
            base_settings,
            iterations=config.iterations,
            learning_rate=base_settings.learning_rate * step,
            evaluate_every=0,
            target_success=None,
        )
        settings = with_bc_toward_base(settings, config.bc_weight)
        imagining_policy = require_trainable(imagination.as_inside(policy))
        result = finetune(imagining_policy, imagination.new_critic(seed), imagination.world, settings, seed=seed)
        return {"imagined_steps": float(result.env_steps)}
