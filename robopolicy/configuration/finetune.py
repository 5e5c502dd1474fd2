"""Fine-tuning."""

from dataclasses import dataclass
from pathlib import Path

from robopolicy.core.ranges import Count, Natural
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
    finetuned_steps: Count | None = None
    """How many of the last denoising steps are tuned, null for policy.finetuned_steps, else half of them (of LeRobot's
    policies all).
    """
    train_encoder: bool = True
    """Whether the encoders of its observations learn as well."""
    lora_rank: Natural = 0
    """Tune adapters of this rank instead of the weights (token policies, LeRobot's), 0 for none."""
    num_envs: Count = 256
    """Rows collected in parallel."""
    critic_width: Count = 256
    """Width of the critic's layers."""
    critic_depth: Count = 2
    """Hidden layers of the critic."""
    evaluate_episodes: Count = 200
    """Episodes of every evaluation and of the judgement at the end."""
    dry_run: bool = False
    """Only print what it will take of memory and computation. Of LeRobot's policies no weights are read for that, nor
    needed: config.json and the processors are enough, however large the policy.
    """
    videos: Natural = 8
    """Episodes in the film of base and tuned policy, 0 for none."""
