"""Fine-tuning inside a world model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from robopolicy.core.errors import ConfigError


@dataclass(frozen=True)
class ImagineSection:
    """Fine-tuning inside a world model, watched in both worlds."""

    model: Path | None = None
    """Its checkpoint (default: what worldmodel wrote under the same name and seed)."""
    method: Literal["rl", "sft"] = "rl"
    """rl, the algorithm of the section finetune, or sft: synthesise rollouts, keep those that the model believes to
    succeed, imitate them.
    """
    watch: int = 200
    """Real episodes of every evaluation, for watching alone, 0 for none."""
    gap: float | None = 0.2
    """Stop once imagined success exceeds real success by so much and their intervals part, null for never."""
    refresh_every: int = 0
    """Iterations after which the model is trained on with new real episodes of the policy, 0 for never."""
    refresh_episodes: int = 128
    """How many of them join the data."""
    refresh_steps: int = 500
    """How many training steps follow."""
    rounds: int = 5
    """Of sft: how often it synthesises and imitates."""
    synthetic: int = 512
    """Of sft: rollouts a round."""
    imitate_steps: int = 500
    """Of sft: training steps a round."""
    imitate_batch_size: int = 256
    """Of sft: samples a training step."""
    imitate_learning_rate: float = 1e-3
    """Of sft: the learning rate."""

    def __post_init__(self):
        if self.gap is not None and self.gap <= 0:
            raise ConfigError(f"imagine.gap is {self.gap}: use a share of episodes such as 0.2, or null never to stop.")
        if min(self.watch, self.refresh_every) < 0 or min(self.refresh_episodes, self.rounds, self.synthetic) < 1:
            raise ConfigError("imagine: watch and refresh_every are at least 0, counts at least 1.")
