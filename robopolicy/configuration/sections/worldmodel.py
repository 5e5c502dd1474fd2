"""Sections for world models: training one, fine-tuning in it, planning with it, ranking policies in it."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

from robopolicy.core.errors import ConfigError
from robopolicy.core.ranges import Count, Fraction, Natural, NoiseLevel, NonNegative, Positive
from robopolicy.core.registry import is_dotted
from robopolicy.core.structured import Tagged
from robopolicy.training.configuration import FitConfig
from worldmodels.configuration import CANDIDATES, EnsembleConfig, PlanConfig
from worldmodels.registry import SETTING, SUCCESS_HEADS, WORLD_MODELS


@dataclass(frozen=True)
class WorldModelSection(Tagged):
    """A world model (learned dynamics, reward and success), trained on datasets and on newly collected rollouts."""

    kinds: ClassVar = WORLD_MODELS
    RENAMED: ClassVar[Mapping[str, str]] = {
        "without": "exclude_episodes",
        "styles": "visual_styles",
        "examine_rows": "validation_episodes",
        "examine_steps": "validation_steps",
    }

    kind: str = "ensemble"
    """World model: ensemble and rssm (states, train in minutes), latent_ensemble (the first choice for images; policies
    may read its features, train.encoder), pixel_diffusion (next frame of one camera), video (all cameras, long
    horizon), or a custom one.
    """
    config: Any = field(default_factory=EnsembleConfig)
    data: tuple[Path, ...] = ()
    """Folders of LeRobotDatasets (default: the output of collect with the same name and seed)."""
    rename: dict[str, str] = field(default_factory=dict)
    """Mapping of names of dataset columns and elements, as in train.rename."""
    episodes: Natural | tuple[Natural, ...] = 0
    """Episodes of the first of `data` to use: a list such as [0,2,5], or the number of first episodes; 0 for all."""
    exclude_episodes: tuple[Natural, ...] = ()
    """Indices of episodes of the first of `data` to exclude, such as broken ones."""
    policies: tuple[Path, ...] = ()
    """Checkpoints of policies that collect additional rollouts."""
    include_base: bool = False
    """Whether the output of train with the same name and seed also collects rollouts; fine-tuning in imagination starts
    from the states it visits.
    """
    transitions: Count = 100_000
    """Number of control steps of training data. Steps missing from the datasets are collected in equal parts by the
    expert, at every noise level, and by the policies.
    """
    visual_styles: Natural = 0
    """Number of additional visual styles in which the training episodes are also rendered (Sword), for image models."""
    fit: FitConfig = field(
        default_factory=lambda: FitConfig(steps=1500, learning_rate=3e-3, weight_decay=1e-5, checkpoint_every=500)
    )
    noise: tuple[NoiseLevel, ...] = ("low", "medium", "high", "random")
    """Action noise levels at which the expert collects rollouts, so that the data includes failures."""
    play: Fraction | None = None
    """Fraction of the steps to collect in which the expert plays: it works towards random goals at random speed, or the
    model learns that things go to goals by themselves. null: 0.4 for latent_ensemble where the world names goals, else
    0.
    """
    behaviour_episodes: Natural = 128
    """Number of episodes in which each recorded policy and expert acts in the trained model, whose success is compared
    with the recorded; 0 for none. Models that imagine images do without.
    """
    validation_episodes: Count = 512
    """Number of held-out episodes that the evaluation of the trained model replays in imagination."""
    validation_steps: Count = 20_000
    """Number of single steps on which predicted reward and success are compared with the recorded ones (an image
    diffusion model takes minutes for the default).
    """

    def __post_init__(self) -> None:
        """Raise ConfigError, before data is collected, for an empty validation set or a missing success head."""
        if self.validation_episodes < 1 or self.validation_steps < 2:
            raise ConfigError("validation_episodes must be at least 1, and validation_steps at least 2.")
        head = str(getattr(self.config, SETTING, ""))
        if is_dotted(head):
            SUCCESS_HEADS.load(head)
        elif head:
            SUCCESS_HEADS.path(head)


@dataclass(frozen=True)
class ImagineSection:
    """Fine-tuning inside a world model, evaluated in imagination and in the real world."""

    RENAMED: ClassVar[Mapping[str, str]] = {
        "watch": "real_eval_episodes",
        "keep": "select_by",
        "gap": "divergence_threshold",
        "near_base": "bc_weight",
        "synthetic": "rollouts_per_round",
    }

    model: Path | None = None
    """Checkpoint of the world model (default: the output of worldmodel with the same name and seed)."""
    method: Literal["rl", "sft"] = "rl"
    """rl: the algorithm of the section finetune; sft: generate imagined rollouts, keep those predicted to succeed, and
    imitate them.
    """
    real_eval_episodes: Natural = 200
    """Number of real episodes per evaluation, 0 for none; they are not used for training."""
    select_by: Literal["real", "imagined"] = "real"
    """Success rate that selects the best policy and is compared with finetune.target_success: real (lower bound of its
    interval; imagined if imagine.real_eval_episodes is 0), or imagined, which ignores the real evaluations.
    """
    patience: Natural = 4
    """Consecutive evaluations without a significant gain in real success over the best and over the previous one after
    which the run ends, 0 for never.
    """
    divergence_threshold: NonNegative | None = 0.2
    """Divergence threshold: imagined success exceeds real success by this much, with disjoint intervals. It is marked
    in the figures, and a run that ends without a gain then says so. null for never.
    """
    bc_weight: NonNegative = 0.0
    """Weight of the loss toward the base policy (bc; DiWA: 0.05), 0 for none."""
    refresh_every: Natural = 0
    """Iterations between updates of the world model on new real episodes of the policy, 0 for never."""
    refresh_episodes: Natural = 128
    """Number of new real episodes added to the data per model update."""
    refresh_steps: Natural = 500
    """Number of training steps per model update."""
    refresh_uncertainty: NonNegative | None = None
    """With plan.model: bonus per unit of model uncertainty when planning the refresh episodes; a positive value
    explores where the model is uncertain (COPlanner's optimistic exploration). null records them without planning.
    """
    rounds: Count = 5
    """sft: number of rounds of generation and imitation."""
    rollouts_per_round: Natural = 512
    """sft: number of imagined rollouts per round."""
    imitate_steps: Count = 500
    """sft: number of training steps per round."""
    imitate_batch_size: Count = 256
    """sft: samples per training step."""
    imitate_learning_rate: Positive = 1e-3
    """sft: learning rate."""

    def __post_init__(self):
        if self.bc_weight < 0 or self.patience < 0:
            raise ConfigError(
                f"imagine.bc_weight={self.bc_weight} and imagine.patience={self.patience} must be at least 0."
            )
        if self.divergence_threshold is not None and self.divergence_threshold <= 0:
            raise ConfigError(
                f"imagine.divergence_threshold={self.divergence_threshold} must be a fraction of episodes such as 0.2, "
                "or null to disable it."
            )
        if min(self.real_eval_episodes, self.refresh_every) < 0:
            raise ConfigError("imagine: real_eval_episodes and refresh_every must be at least 0.")
        if min(self.refresh_episodes, self.rounds, self.rollouts_per_round) < 1:
            raise ConfigError("imagine: refresh_episodes, rounds and rollouts_per_round must be at least 1.")
        if self.method == "sft" and (self.refresh_every or self.bc_weight):
            name = "refresh_every" if self.refresh_every else "bc_weight"
            raise ConfigError(f"imagine.{name} does not apply to imagine.method=sft: unset it, or use method=rl.")
        if self.refresh_uncertainty is not None and not self.refresh_every:
            raise ConfigError("imagine.refresh_uncertainty plans the episodes of a refresh: set imagine.refresh_every.")


OF_CANDIDATES = "candidates", "rollouts", "aggregate"
OF_SEQUENCES = "options", "replan", "objective"
"""Settings of planning that chooses among chunks of a policy alone, and of planning that optimises sequences alone."""


@dataclass(frozen=True)
class PlanSection(PlanConfig):
    """Planning in a world model: sample several action chunks from the policy and execute the one with the best
    imagined return.

    Other settings, such as discount and uncertainty penalty, are inherited. finetune and imagine also collect with it:
    with plan.uncertainty below 0 imagined rollouts stay where the model is certain (COPlanner). The choice among chunks
    is not part of the policy's probabilities.
    """

    model: Path | None = None
    """Checkpoint of the world model used for planning, null for no planning."""
    candidates: Count = 8
    horizon: Count = 20

    def __post_init__(self):
        super().__post_init__()
        defaults = {item.name: {} if item.default is MISSING else item.default for item in fields(self)}
        names = *OF_CANDIDATES, *OF_SEQUENCES, "kind", "goal", "horizon"
        given = [name for name in names if getattr(self, name) != defaults[name]]
        if given and self.model is None:
            raise ConfigError(f"plan.{given[0]} is for planning in a world model: set plan.model=CHECKPOINT as well.")
        chooses = self.kind == CANDIDATES
        if unread := [name for name in given if name in (OF_SEQUENCES if chooses else OF_CANDIDATES)]:
            kinds = "cem, icem or mppi" if chooses else f"{CANDIDATES}, the default"
            raise ConfigError(f"plan.{unread[0]} does not apply to plan.kind={self.kind}: set plan.kind={kinds}.")


@dataclass(frozen=True)
class RankSection:
    """Ranking of policies in world models and in the simulator, from the same initial states."""

    policies: tuple[Path, ...] = ()
    """Checkpoints of independently trained policies."""
    models: tuple[Path, ...] = ()
    """Checkpoints of world models of any kind (default: the output of worldmodel with the same name and seed)."""
    noise: tuple[NoiseLevel, ...] = ("none", "low", "medium", "high", "random")
    """Noise levels or faults with which the expert is ranked together with the policies, as in collect.noise, [] for
    none.
    """
    episodes: Count = 200
    """Number of episodes per policy and world."""
    coverage_episodes: Natural = 32
    """Number of episodes per policy in which its steps are compared with the data of the models, 0 for none."""
    trials: Natural = 0
    """Number of these episodes that are also played in the simulator, for when real trials are dear: success is then
    estimated from the trials and all episodes in the model together. 0 plays all.
    """
    variations: Any = None
    """Factors of variation of a MuJoCo task, as in evaluate.variations, under which the ranking is repeated, in the
    simulator and from its initial states in the models.
    """

    def __post_init__(self) -> None:
        if self.trials > self.episodes:
            raise ConfigError(
                f"rank.trials={self.trials} exceeds rank.episodes={self.episodes}: every trial needs an episode in the "
                "model from the same start."
            )
