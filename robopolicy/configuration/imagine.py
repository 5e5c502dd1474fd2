"""Fine-tuning inside a world model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from robopolicy.core.errors import ConfigError
from robopolicy.core.ranges import Count, Natural, NonNegative, Positive


@dataclass(frozen=True)
class ImagineSection:
    """Fine-tuning inside a world model, watched in both worlds."""

    model: Path | None = None
    """Its checkpoint (default: what worldmodel wrote under the same name and seed)."""
    method: Literal["rl", "sft"] = "rl"
    """rl, the algorithm of the section finetune, or sft: synthesise rollouts, keep those that the model believes to
    succeed, imitate them.
    """
    watch: Natural = 200
    """Real episodes of every evaluation, 0 for none: nothing is learned from them."""
    keep: Literal["real", "imagined"] = "real"
    """By which success the best policy is chosen and finetune.target_success is judged: real (the lower bound of its
    interval; imagined where imagine.watch is 0), or imagined, as if nobody had watched.
    """
    patience: Natural = 4
    """Evaluations in a row in which real success has risen neither above its best nor above the one before (beyond
    chance) that end the run, 0 for never.
    """
    gap: NonNegative | None = 0.2
    """The two worlds have parted once imagined success exceeds the real one by so much and their intervals do not
    touch: then the policy is held nearer to its base, and the run ends if real success falls or patience does. Null for
    never.
    """
    near_base: NonNegative = 0.0
    """Weight of staying near the base policy from the start (bc, DiWA: 0.05), 0 for none until the two worlds part."""
    tighten: NonNegative = 2.0
    """Factor of that weight at every evaluation at which they have parted and come no nearer (from 0 it becomes 0.05),
    1 for none.
    """
    refresh_every: Natural = 0
    """Iterations after which the model is trained on with new real episodes of the policy, 0 for never."""
    refresh_episodes: Natural = 128
    """How many of them join the data."""
    refresh_steps: Natural = 500
    """How many training steps follow."""
    refresh_uncertainty: NonNegative | None = None
    """With plan.model: what a unit of the model's uncertainty adds to a plan while those episodes are recorded, above 0
    to go where the model does not know yet (COPlanner's optimistic exploration). Null for the policy without plans.
    """
    rounds: Count = 5
    """Of sft: how often it synthesises and imitates."""
    synthetic: Natural = 512
    """Of sft: rollouts a round."""
    imitate_steps: Count = 500
    """Of sft: training steps a round."""
    imitate_batch_size: Count = 256
    """Of sft: samples a training step."""
    imitate_learning_rate: Positive = 1e-3
    """Of sft: the learning rate."""

    def __post_init__(self):
        if self.near_base < 0 or self.tighten < 1 or self.patience < 0:
            raise ConfigError(
                f"imagine.near_base={self.near_base} and imagine.patience={self.patience} are at least 0, "
                f"imagine.tighten={self.tighten} at least 1."
            )
        if self.gap is not None and self.gap <= 0:
            raise ConfigError(f"imagine.gap is {self.gap}: use a share of episodes such as 0.2, or null for never.")
        if min(self.watch, self.refresh_every) < 0 or min(self.refresh_episodes, self.rounds, self.synthetic) < 1:
            raise ConfigError("imagine: watch and refresh_every are at least 0, counts at least 1.")
