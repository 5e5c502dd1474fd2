"""`--policy.type=robopolicy`: configuration of a robopolicy checkpoint in LeRobot."""

from dataclasses import dataclass
from pathlib import Path

from lerobot.configs.policies import PreTrainedConfig
from lerobot.optim import LRSchedulerConfig, OptimizerConfig

from robopolicy.core.errors import ConfigError


@PreTrainedConfig.register_subclass("robopolicy")
@dataclass
class RobopolicyConfig(PreTrainedConfig):
    """A robopolicy checkpoint as a LeRobot policy; its features come from the checkpoint.

    checkpoint: the folder that `robopolicy train` or `finetune` wrote, None for an exported folder, which contains it;
    deterministic: act without exploration noise; seed: of the policy's noise.
    """

    checkpoint: Path | None = None
    deterministic: bool = True
    seed: int = 0

    @property
    def observation_delta_indices(self) -> None:
        """None: the policy stores its own history."""
        return

    @property
    def action_delta_indices(self) -> None:
        """None: LeRobot does not train this policy."""
        return

    @property
    def reward_delta_indices(self) -> None:
        """None: LeRobot does not train this policy."""
        return

    def get_optimizer_preset(self) -> OptimizerConfig:
        """Raise ConfigError: robopolicy's checkpoints are trained by robopolicy only."""
        raise not_trained_here()

    def get_scheduler_preset(self) -> LRSchedulerConfig | None:
        """Raise ConfigError: robopolicy's checkpoints are trained by robopolicy only."""
        raise not_trained_here()

    def validate_features(self) -> None:
        """Raise ConfigError if no checkpoint is given."""
        if self.checkpoint is None:
            raise ConfigError(
                "No checkpoint is given: set --policy.checkpoint=runs/finetune/push_t/0/checkpoint, or "
                "--policy.path=FOLDER, a folder created by: python -m robopolicy.plugins CHECKPOINT FOLDER"
            )


def not_trained_here() -> ConfigError:
    """Return the error for training robopolicy's policies with LeRobot, which is not supported."""
    return ConfigError(
        "LeRobot cannot train policies of this type, only run them: use robopolicy train or robopolicy finetune."
    )
