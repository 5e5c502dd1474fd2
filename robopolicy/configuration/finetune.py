"""Fine-tuning."""

from dataclasses import dataclass
from pathlib import Path

from robopolicy.core.errors import ConfigError
from robopolicy.training.configuration import FinetuneConfig


@dataclass(frozen=True)
class FinetuneSection(FinetuneConfig):
    """RL in the denoising chain or on the tokens of a pre-trained policy."""

    policy: Path | None = None
    """Its checkpoint (default: what train wrote under the same name and seed)."""
    teacher: Path | None = None
    """Checkpoint of the policy that distillation learns from."""
    expert: str = ""
    """Dotted path of the controller whose states hints begin in, empty for the task's."""
    experts: tuple[Path, ...] = ()
    """Datasets for auxiliaries=[experts], else `collect`'s."""
    pairs: Path | None = None
    """Stored preferences (algorithm=grape writes them to preferences/) to learn from instead of playing."""
    finetuned_steps: int | None = None
    """How many of the last denoising steps are tuned, null for policy.finetuned_steps, else half of them (of LeRobot's
    policies all).
    """
    train_encoder: bool = True
    """Whether the encoders of its observations learn as well."""
    lora_rank: int = 0
    """Tune adapters of this rank instead of the weights (token policies, LeRobot's), 0 for none."""
    num_envs: int = 256
    """Rows collected in parallel."""
    critic_width: int = 256
    """Width of the critic's layers."""
    critic_depth: int = 2
    """Hidden layers of the critic."""
    evaluate_episodes: int = 200
    """Episodes of every evaluation and of the judgement at the end."""
    dry_run: bool = False
    """Only print what it will take of memory and computation. Of LeRobot's policies no weights are read for that, nor
    needed: config.json and the processors are enough, however large the policy.
    """
    videos: int = 8
    """Episodes in the film of base and tuned policy, 0 for none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.num_envs, self.evaluate_episodes) < 1 or self.videos < 0:
            raise ConfigError("finetune.num_envs and finetune.evaluate_episodes are at least 1, finetune.videos 0.")
        if self.lora_rank < 0:
            raise ConfigError(f"finetune.lora_rank={self.lora_rank}: a rank is at least 1, or 0 for no adapters.")
