"""What can be set about pre-training, fine-tuning and learning online, with the defaults that worked; no torch here."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from robopolicy.core.errors import ConfigError
from robopolicy.core.ranges import Count, Natural, NonNegative, Positive, Share
from robopolicy.nn.configuration import LearningPrecision, Optimiser
from robopolicy.rl.configuration import AlgorithmConfig


@dataclass(frozen=True)
class FitConfig:
    """Regression: AdamW, a linear warm-up, then a cosine."""

    steps: Count = 4000
    """Training steps."""
    learning_rate: Positive = 1e-3
    """At its highest, after the warm-up."""
    final_rate: Share = 0.01
    """What it falls to, as a share of itself."""
    warmup: Natural = 100
    """Steps over which it rises."""
    optimiser: Optimiser = "adamw"
    """adamw, or adamw8bit (CUDA): a quarter of its memory."""
    weight_decay: NonNegative = 1e-6
    """AdamW's."""
    gradient_clip: Positive = 1.0
    """Bound on the gradient's global norm."""
    ema_decay: Share = 0.995
    """Of the moving average of the weights, which is what is kept; 0 switches it off."""
    ema_power: Positive = 0.75
    """How fast the average forgets its beginning: after step s the decay is at most 1 - (1 + s)^-power."""
    log_every: Count = 100
    """Steps between logged losses."""
    checkpoint_every: Count = 1000
    """Steps between checkpoints, for a killed run to go on."""

    def __post_init__(self):
        if self.steps < 1 or self.log_every < 1 or self.checkpoint_every < 1:
            raise ConfigError("steps, log_every and checkpoint_every must be at least 1.")
        if not 0 <= self.ema_decay < 1:
            raise ConfigError(f"ema_decay is {self.ema_decay}; it must be in [0, 1), where 0 switches it off.")


@dataclass(frozen=True)
class RegressionConfig:
    """Samples per step, and how a policy is fitted to them."""

    batch_size: Count = 256
    """Samples a step."""
    fit: FitConfig = field(default_factory=FitConfig)
    precision: LearningPrecision = "fp32"
    """fp32, bf16 (faster), bf16_backward (gradients)."""
    micro_batch: Natural = 0
    """Samples whose activations are held at once, 0 for all."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(f"batch_size is {self.batch_size}; it must be at least 1.")
        _require_micro_batch(self.micro_batch)


@dataclass(frozen=True)
class PretrainConfig(RegressionConfig):
    """Behaviour-cloning defaults."""

    keep_conditions: bool = False
    """Reads each observation once if the encoder is frozen."""
    auxiliary_keys: tuple[str, ...] = ()
    """Vectors that its cameras learn to tell."""
    auxiliary_weight: NonNegative = 1.0
    """Of that beside its own loss."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.auxiliary_weight < math.inf:
            raise ConfigError(f"auxiliary_weight is {self.auxiliary_weight}: choose a number above 0.")
        if self.keep_conditions and self.auxiliary_keys:
            raise ConfigError(
                f"keep_conditions=true leaves the encoder as it is, and auxiliary_keys={list(self.auxiliary_keys)} "
                "teach it: leave out one of them."
            )


@dataclass(frozen=True)
class DistillConfig(RegressionConfig):
    """How a policy of few denoising steps learns what one of many does."""

    steps: Count = 1
    """Denoising steps of the student."""
    teacher_points: Share = 0.25
    """Share of the samples that are points of the teacher's chain, the others are of the student's own."""
    batch_size: Count = 512
    """Observations an update."""
    fit: FitConfig = field(default_factory=lambda: FitConfig(steps=3000))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps < 1 or not 0 <= self.teacher_points < 1:
            raise ConfigError("steps must be at least 1, teacher_points in [0, 1).")


@dataclass(frozen=True)
class TeachConfig(PretrainConfig):
    """How a student learns from a teacher where the student itself leads (DAgger)."""

    rounds: Count = 8
    """Of playing and learning; in the first the teacher plays."""
    episodes: Count = 100
    """A round."""
    teacher_share: Share = 0.3
    """Of round two that the teacher plays, then its square."""
    fit: FitConfig = field(default_factory=lambda: FitConfig(steps=500))
    """Of every round."""
    last_steps: Count = 3000
    """Training steps of the last round."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.rounds, self.episodes, self.last_steps) < 1 or not 0 <= self.teacher_share <= 1:
            raise ConfigError("rounds, episodes and last_steps must be at least 1, teacher_share between 0 and 1.")

    @property
    def last_fit(self) -> FitConfig:
        """Of the last round."""
        return replace(self.fit, steps=self.last_steps)

    def played_by_teacher(self, number: int) -> int:
        """Return how many of a round's episodes the teacher plays, in the first one all of them."""
        return round(self.teacher_share**number * self.episodes)


LOG_RATIO_CLAMP = 3.0
"""Bound on the logarithm of a ratio: no coefficient reads one beyond it, and exp never overflows."""


@dataclass(frozen=True)
class FinetuneConfig(AlgorithmConfig):
    """Fine-tuning defaults, for log-probabilities that are means over dimensions (the clip width belongs to that).

    An iteration collects, then learns for some epochs over minibatches. Algorithms with a critic collect `decisions` a
    row, those that compare episodes whole episodes in groups with the same start.
    """

    FIXED: ClassVar[Mapping[str, Any]] = {"log_ratio_clamp": LOG_RATIO_CLAMP}

    iterations: Count = 60
    """How often it collects and learns."""
    rollout_length: Count = 20
    """Chunks of actions that every row decides in an iteration, with a critic."""
    groups: Count = 64
    """Groups of whole episodes in an iteration, for algorithms that compare episodes."""
    group_size: Count = 8
    """Episodes with the same start."""
    starts: Natural = 0
    """Size of the pool that starts are drawn from, 0 for fresh ones."""
    branch_at: tuple[Natural, ...] = ()
    """Decisions before which every running episode splits into branch_width that go on from the same state."""
    branch_width: Count = 2
    """Episodes that go on where one splits."""
    branch_by: Literal["all", "uncertainty"] = "all"
    """Who gets the branches at a decision: all running episodes alike, or by uncertainty (TreePO). Then those of a
    group that stand there together share as many out, more to those whose last decision was less likely.
    """
    branch_sampling_step: Natural | tuple[Natural, ...] | None = None
    """Steps of the decision there that branches share, null for none; several, such as [0,2], for a split after each of
    so many, where every branch splits again.
    """
    stop_still: Natural = 0
    """Decisions in a row that move nothing after which a whole episode is stopped early, as by a time limit, 0 for
    never.
    """
    overprovision: NonNegative = 0.0
    """Groups in flight beyond those that an iteration learns from, as a share of them: it does not wait for the longest
    episodes, which go on in the next one (APRIL). 0 waits for all.
    """
    staleness: Natural = 0
    """How many updates old the weights may be that collect, in a thread beside the learner; 0 collects and learns in
    turns, repeatably. With 1 runs repeated bit by bit wherever that was measured, with 2 or more they do not.
    """
    delay: Natural = 0
    """How many updates old the weights that collect are made to be, in turns and repeatably."""
    props: Natural = 0
    """Collect in so many parts, the later ones steered away from what has been sampled too often (PROPS), 0 for off."""
    props_past: Natural = 0
    """Earlier iterations whose rollouts props keeps: they are steered away from too, and learned from again."""
    teacher_acts: Share = 0.0
    """Share of the decisions that the teacher takes at first (DAgger's mixture), 0 for none. They are drawn at random,
    and not learned from but by auxiliaries such as dagger.
    """
    teacher_until: Share = 0.5
    """Share of the run at which that has fallen to 0, linearly."""
    expert_rows: NonNegative = 0.0
    """Share of experts' episodes beside its own (DynaWeb). That is of the number of an iteration's, 0 for none. They
    have advantages by their returns; for token policies and algorithms that compare episodes.
    """
    proximal: Literal["current", "behaviour", "average"] = "current"
    """What the decisions of older policies are clipped around. Current is the policy before the update (AReaL);
    behaviour the policy that acted, whose log-probabilities are recorded with every decision; average an exponential
    moving average of past policies (PPO-EWMA), for all decisions. coefficient=decoupled_ppo also weighs by it.
    """
    proximal_decay: Share = 0.889
    """Of that average, an update of the policy: the centre of its mass lies decay / (1 - decay) updates back."""
    epochs: Count = 5
    """Passes over what was collected."""
    minibatch: Count = 2048
    """Decisions in a minibatch."""
    micro_batch: Natural = 0
    """Decisions whose activations are held at once, 0 for all."""
    packed_images: bool = False
    """Whether images that were collected are held compressed. Without loss."""
    minibatch_episodes: Natural = 0
    """Whole episodes a minibatch (episode ratios), 0 for none."""
    scored_steps: Natural = 0
    """Random steps of a decision that are scored, 0 for all. Fewer are cheaper and noisier."""
    precision: LearningPrecision = "fp32"
    """What policy and critic multiply in: bf16 is faster where processors have it; bf16_backward is for gradients."""
    critic_warmup: Natural = 1
    """First iterations that train the critic alone, be it of states or of noisy actions."""
    learning_rate: Positive = 5e-4
    """The policy's learning rate."""
    actor_warmup: Natural = 30
    """Steps over which it is reached: Adam's first are its largest."""
    critic_learning_rate: Positive = 1e-3
    """The critic's learning rate."""
    optimiser: Optimiser = "adamw"
    """The policy's: adamw, or adamw8bit (CUDA)."""
    weight_decay: NonNegative = 0.0
    """Of the policy's and the critic's weights (AdamW)."""
    gradient_clip: Positive = 1.0
    """Bound on the gradient's global norm."""
    discount: Share = 0.99
    """Per control step; 1 / (1 - it) of them should fit an episode."""
    gae_lambda: Share = 0.95
    """Per decision."""
    time_limit: Literal["cut", "end"] = "cut"
    """A cut, behind which an episode's value goes on, or its end. End where few decisions fit an episode: what comes
    behind a cut is never seen.
    """
    clip: Positive = 0.2
    """Width of the ratio's clip range, at the cleanest step."""
    clip_base: Positive | None = None
    """Width at the noisiest step, null for clip."""
    clip_high: Positive | None = None
    """Width above 1, null for clip."""
    clip_rate: NonNegative = 0.0
    """How the width grows from clip_base to clip along the chain, 0 for evenly."""
    ratio_tolerance: NonNegative = 1e-5
    """How far a policy's score of its own fresh decisions may be from the one it acted with, as a share of its size or
    of 1; of tokens 1e-4 at least, and with precision=bf16, which may round otherwise for another number of rows, 2^-5.
    """
    target_kl: Positive | None = 0.1
    """KL divergence of whole decisions that ends an iteration's epochs; a step beyond twice of it is taken back. Null
    for no end.
    """
    checkpoint_every: Count = 10
    """Iterations between checkpoints, from which a killed run goes on."""
    evaluate_every: Natural = 10
    """Iterations between evaluations (one comes before the first), 0 for none."""
    target_success: Share | None = None
    """Deterministic success that ends the run, once as many fresh episodes confirm it; null for none."""
    patience: Natural = 0
    """Evaluations in a row without gain that end a run, 0 for never. A gain is over the best one so far; imagine has a
    patience of its own.
    """

    def __post_init__(self):
        for name in ("iterations", "rollout_length", "groups", "group_size", "epochs", "minibatch", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        _require_micro_batch(self.micro_batch)
        if self.scored_steps < 0:
            raise ConfigError(f"scored_steps is {self.scored_steps}; it must be at least 1, or 0 for all.")
        if not 0 < self.discount <= 1 or not 0 <= self.gae_lambda <= 1:
            raise ConfigError(f"discount {self.discount} must be in (0, 1], gae_lambda {self.gae_lambda} in [0, 1].")
        if min(self.overprovision, self.staleness, self.delay) < 0:
            raise ConfigError(
                f"overprovision {self.overprovision}, staleness {self.staleness} and delay {self.delay} must be at "
                "least 0."
            )
        if self.patience < 0 or (self.patience and not self.evaluate_every):
            raise ConfigError(
                f"patience {self.patience} counts evaluations, at least 0, and evaluate_every is {self.evaluate_every}."
            )
        if sum(value > 0 for value in (self.staleness, self.delay, self.props)) > 1:
            raise ConfigError(
                f"staleness {self.staleness} collects in a thread, delay {self.delay} in turns with old weights, props "
                f"{self.props} with adjusted ones: choose one."
            )
        if self.props_past and not self.props:
            raise ConfigError(f"props_past is {self.props_past} without props: set props to 2 parts or more.")
        if self.overprovision and self.props:
            raise ConfigError(
                f"overprovision {self.overprovision} leaves groups to the next part of props {self.props}."
            )
        if self.stop_still < 0:
            raise ConfigError(f"stop_still is {self.stop_still}; it must be at least 0.")
        if not 0 <= self.teacher_acts <= 1 or self.teacher_until <= 0:
            raise ConfigError(
                f"teacher_acts is {self.teacher_acts}, teacher_until {self.teacher_until}: a share in [0, 1] of the "
                "decisions, and one above 0 of the run."
            )
        if self.expert_rows < 0:
            raise ConfigError(f"expert_rows is {self.expert_rows}; it must be at least 0.")
        if not 0 <= self.proximal_decay < 1:
            raise ConfigError(
                f"proximal_decay is {self.proximal_decay}; it must be in [0, 1), where 0 averages nothing."
            )
        if self.actor_warmup < 1:
            raise ConfigError(f"actor_warmup is {self.actor_warmup}; 1 means none.")
        if min(self.clip, self.clip_base or self.clip, self.clip_high or self.clip) <= 0:
            raise ConfigError("clip, clip_base and clip_high must be positive.")


def _require_micro_batch(size: int) -> None:
    if size < 0:
        raise ConfigError(f"micro_batch is {size}; it must be at least 1, or 0 for none.")


NEARNESS = "bc"
"""The loss that keeps a policy near its base."""


def held_near_base(settings: FinetuneConfig, weight: float) -> FinetuneConfig:
    """Return the settings with nearness to the base among the losses; as they are where they name it themselves."""
    named = tuple(settings.of("auxiliaries", ()))
    if NEARNESS in named:
        return settings
    return replace(settings, auxiliaries=(*named, NEARNESS), options={**settings.options, NEARNESS: {"weight": weight}})


@dataclass(frozen=True)
class OnlineConfig:
    """How an agent learns from its own decisions in the world, after recorded data or without any.

    WSRL (arXiv:2412.07762): warmup=5000 retain=0, RLPD (arXiv:2302.02948): retain=0.5. Raises ConfigError on shares
    outside [0, 1], and where there is nothing to count.
    """

    steps: Natural = 100_000
    """Control steps in the world, those of the warm-up included; never exceeded, and 0 plays none."""
    warmup: Natural = 5000
    """Control steps that the frozen policy plays before the first update."""
    updates: NonNegative = 1.0
    """Updates per decision collected since then; every one is a batch."""
    batch_size: Count = 256
    """Decisions a batch."""
    retain: Share = 0.0
    """Share of every batch drawn from recorded data: 0 forgets it (WSRL), 0.5 keeps half (RLPD)."""
    base_share: Share = 0.0
    """Share of decisions that the frozen policy goes on making after the warm-up."""
    moments: Literal["reset", "keep"] = "reset"
    """What the optimisers' moments are when learning in the world begins: forgotten, or those of the recorded data."""
    conservative: bool = False
    """Whether cql and cal_ql go on pushing values down in the world; otherwise they are plain SAC there (WSRL)."""
    evaluate_at: tuple[Natural, ...] = (0, 1, 100, 500)
    """Updates after which the policy is evaluated, early ones, or the dip after the switch is not seen."""
    evaluate_every: Natural = 5000
    """And after every so many, 0 for none."""
    checkpoint_every: Count = 5
    """Waves of episodes between resume points."""

    def __post_init__(self) -> None:
        if not (0 <= self.retain <= 1 and 0 <= self.base_share <= 1):
            raise ConfigError(f"retain {self.retain} and base_share {self.base_share} are shares, in [0, 1].")
        if min(self.steps, self.warmup, self.evaluate_every, *self.evaluate_at, 0) < 0 or self.updates < 0:
            raise ConfigError("steps, warmup, updates, evaluate_every and evaluate_at cannot be negative.")
        if self.batch_size < 1 or self.checkpoint_every < 1:
            raise ConfigError("batch_size and checkpoint_every must be at least 1.")
