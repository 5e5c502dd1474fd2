"""World models: training one, fine-tuning in it, planning with it, ranking policies in it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from robopolicy.core.errors import ConfigError
from robopolicy.core.ranges import Count, Natural, NoiseLevel, NonNegative, Positive
from robopolicy.core.registry import is_dotted
from robopolicy.core.structured import Tagged
from robopolicy.training.configuration import FitConfig
from worldmodels.configuration import EnsembleConfig, PlanConfig
from worldmodels.registry import SETTING, SUCCESS_HEADS, WORLD_MODELS


@dataclass(frozen=True)
class WorldModelSection(Tagged):
    """A world model (learned dynamics, reward and success), trained on datasets and on newly collected rollouts."""

    kinds: ClassVar = WORLD_MODELS

    kind: str = "ensemble"
    """ensemble and rssm (states, minutes), latent_ensemble (images, of which policies read features: train.encoder),
    pixel_diffusion (a camera's next frame), video (all cameras, far ahead), or your own.
    """
    config: Any = field(default_factory=EnsembleConfig)
    data: tuple[Path, ...] = ()
    """Folders of LeRobotDatasets (default: what collect wrote under the same name and seed)."""
    rename: dict[str, str] = field(default_factory=dict)
    """Other names for columns and elements of the data, as train.rename."""
    episodes: Natural | tuple[Natural, ...] = 0
    """Use these of the first of `data`, [0,2,5], or the first so many, 0 for all."""
    without: tuple[Natural, ...] = ()
    """Episodes of the first of `data` to leave out, by number, such as broken ones."""
    policies: tuple[Path, ...] = ()
    """Checkpoints of policies that collect further rollouts."""
    include_base: bool = False
    """Lets the policy that train wrote under the same name and seed be one of them: fine-tuning in imagination begins
    where it goes.
    """
    transitions: Count = 100_000
    """Control steps of training data: what the datasets lack is collected in equal shares by the expert, at every level
    of noise, and by the policies.
    """
    visual_styles: Natural = 0
    """Number of other visual styles in which the training episodes are rendered as well (Sword), for image models."""
    fit: FitConfig = field(
        default_factory=lambda: FitConfig(steps=1500, learning_rate=3e-3, weight_decay=1e-5, checkpoint_every=500)
    )
    noise: tuple[NoiseLevel, ...] = ("low", "medium", "high", "random")
    """Levels of action noise at which the expert collects rollouts, so that failures are among them."""
    validation_episodes: Count = 512
    """Held-out episodes that the evaluation of the trained model replays in imagination."""
    validation_steps: Count = 20_000
    """Single steps on which the evaluation compares predicted reward and success with the recorded ones (an image
    diffusion model takes minutes for the default).
    """

    def __post_init__(self) -> None:
        """Raise ConfigError for an empty validation, or a success head that is not there, before data is collected."""
        if self.validation_episodes < 1 or self.validation_steps < 2:
            raise ConfigError("validation_episodes must be at least 1, and validation_steps 2.")
        head = str(getattr(self.config, SETTING, ""))
        if is_dotted(head):
            SUCCESS_HEADS.load(head)
        elif head:
            SUCCESS_HEADS.path(head)


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


@dataclass(frozen=True)
class PlanSection(PlanConfig):
    """Planning in a world model: of several action chunks of the policy, execute the one with the best imagined return.

    The other settings, such as discount and uncertainty penalty, are inherited. finetune and imagine collect by it too:
    with plan.uncertainty below 0 imagined rollouts stay where the model knows (COPlanner). Which of the chunks was
    taken is not part of the policy's probabilities.
    """

    model: Path | None = None
    """Checkpoint of the world model, null for no planning."""
    candidates: Count = 8
    horizon: Count = 20


@dataclass(frozen=True)
class RankSection:
    """Policies scored in world models and in the simulator, on the same starts."""

    policies: tuple[Path, ...] = ()
    """Checkpoints of independently trained policies."""
    models: tuple[Path, ...] = ()
    """Checkpoints of world models of any kind (default: what worldmodel wrote under the same name and seed)."""
    noise: tuple[NoiseLevel, ...] = ("none", "low", "medium", "high", "random")
    """Levels at which the expert is ranked beside them, [] for none."""
    episodes: Count = 200
    """Episodes of every policy in every world."""
