"""Settings of pre-training, fine-tuning and online learning, with tested defaults; imports no torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from robopolicy.core.errors import ConfigError
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.ranges import Count, Fraction, Natural, NonNegative, Positive
from robopolicy.core.registry import Kinds
from robopolicy.core.structured import FormerNames
from robopolicy.nn.configuration import LearningPrecision, Optimiser
from robopolicy.rl.configuration import AlgorithmConfig


@dataclass(frozen=True)
class FitConfig:
    """Regression: AdamW with linear warm-up and cosine decay."""

    steps: Count = 4000
    """Number of training steps."""
    learning_rate: Positive = 1e-3
    """Peak learning rate, after the warm-up."""
    final_rate: Fraction = 0.01
    """Final learning rate as a fraction of the peak."""
    warmup: Natural = 100
    """Number of warm-up steps of the learning rate."""
    optimiser: Optimiser = "adamw"
    """Optimiser: adamw, or adamw8bit (CUDA) with a quarter of its memory."""
    weight_decay: NonNegative = 1e-6
    """Weight decay of AdamW."""
    gradient_clip: Positive = 1.0
    """Maximum global gradient norm."""
    ema_decay: Fraction = 0.995
    """Decay of the exponential moving average of the weights, which is saved instead of them; 0 disables it."""
    ema_power: Positive = 0.75
    """EMA warm-up: after step s the decay is at most 1 - (1 + s)^-power."""
    log_every: Count = 100
    """Number of steps between logged losses."""
    checkpoint_every: Count = 1000
    """Number of steps between checkpoints from which an interrupted run resumes."""

    def __post_init__(self):
        if self.steps < 1 or self.log_every < 1 or self.checkpoint_every < 1:
            raise ConfigError("steps, log_every and checkpoint_every must be at least 1.")
        if not 0 <= self.ema_decay < 1:
            raise ConfigError(f"ema_decay={self.ema_decay} must be in [0, 1); 0 disables it.")


@dataclass(frozen=True)
class RegressionConfig(FormerNames):
    """Samples per step, and regression settings of a policy."""

    batch_size: Count = 256
    """Number of samples per training step."""
    fit: FitConfig = field(default_factory=FitConfig)
    precision: LearningPrecision = "fp32"
    """Precision: fp32, bf16 (faster), bf16_backward (gradients only), fp8 (tokens)."""
    micro_batch: Natural = 0
    """Micro-batch size: samples whose activations are stored at once, 0 for the full batch."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(f"batch_size={self.batch_size} must be at least 1.")
        _require_micro_batch(self.micro_batch)


@dataclass(frozen=True)
class PretrainConfig(RegressionConfig):
    """Behaviour-cloning defaults."""

    RENAMED: ClassVar[Mapping[str, str]] = {"keep_conditions": "cache_encoder_outputs"}

    cache_encoder_outputs: bool = False
    """Cache the encoder's output for each observation; requires a frozen encoder."""
    auxiliary_keys: tuple[str, ...] = ()
    """Vector fields that an auxiliary head predicts from the camera images."""
    auxiliary_weight: NonNegative = 1.0
    """Weight of the auxiliary loss relative to the policy's loss."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.auxiliary_weight < math.inf:
            raise ConfigError(f"auxiliary_weight={self.auxiliary_weight} must be above 0.")
        if self.cache_encoder_outputs and self.auxiliary_keys:
            raise ConfigError(
                f"cache_encoder_outputs=true requires a frozen encoder, but auxiliary_keys={list(self.auxiliary_keys)} "
                "train it: set only one of them."
            )


@dataclass(frozen=True)
class DistillConfig(RegressionConfig):
    """Settings for distilling a policy of many denoising steps into one of few."""

    RENAMED: ClassVar[Mapping[str, str]] = {"teacher_points": "teacher_chain_fraction"}

    steps: Count = 1
    """Number of denoising steps of the student."""
    teacher_chain_fraction: Fraction = 0.25
    """Fraction of training samples from the teacher's denoising chain; the others are from the student's own."""
    batch_size: Count = 512
    """Number of observations per update."""
    fit: FitConfig = field(default_factory=lambda: FitConfig(steps=3000))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps < 1 or not 0 <= self.teacher_chain_fraction < 1:
            raise ConfigError("steps must be at least 1, and teacher_chain_fraction in [0, 1).")


@dataclass(frozen=True)
class TeachConfig(PretrainConfig):
    """Settings for a student that learns from a teacher on the student's own states (DAgger)."""

    RENAMED: ClassVar[Mapping[str, str]] = {"teacher_share": "teacher_fraction", "last_steps": "last_round_steps"}

    rounds: Count = 8
    """Number of rounds of playing and training; in the first the teacher plays."""
    episodes: Count = 100
    """Number of episodes per round."""
    teacher_fraction: Fraction = 0.3
    """Fraction beta of episodes that the teacher plays in the second round; later rounds use its powers beta^2, beta^3
    and so on.
    """
    fit: FitConfig = field(default_factory=lambda: FitConfig(steps=500))
    """Training settings of every round."""
    last_round_steps: Count = 3000
    """Number of training steps of the last round."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.rounds, self.episodes, self.last_round_steps) < 1 or not 0 <= self.teacher_fraction <= 1:
            raise ConfigError(
                "rounds, episodes and last_round_steps must be at least 1, and teacher_fraction in [0, 1]."
            )

    @property
    def last_fit(self) -> FitConfig:
        """Fit settings of the last round."""
        return replace(self.fit, steps=self.last_round_steps)

    def played_by_teacher(self, number: int) -> int:
        """Return the number of a round's episodes that the teacher plays; in the first round it plays all."""
        return round(self.teacher_fraction**number * self.episodes)


LOG_RATIO_CLAMP = 3.0
"""Bound on the logarithm of a ratio: no coefficient reads one beyond it, and exp never overflows."""


@dataclass(frozen=True)
class FinetuneConfig(AlgorithmConfig):
    """Fine-tuning defaults. The clip width assumes log-probabilities that are means over dimensions.

    An iteration collects rollouts, then trains for several epochs of minibatches. Algorithms with a critic collect
    `decisions` policy calls per environment; algorithms that compare episodes collect whole episodes in groups with the
    same initial state.
    """

    FIXED: ClassVar[Mapping[str, Any]] = {"log_ratio_clamp": LOG_RATIO_CLAMP}
    ADDED: ClassVar[Mapping[str, Any]] = {
        "critic_activation": "mish",
        "fsdp": False,
        "overlap_evaluation": False,
        "overlap_update": False,
        "teacher_episode_fraction": 0.0,
    }
    """Settings that runs of earlier versions did not save, and the values that these runs have; they can be resumed."""
    RENAMED: ClassVar[Mapping[str, str]] = {
        "starts": "num_initial_states",
        "stop_still": "max_idle_chunks",
        "delay": "policy_lag",
        "props": "props_parts",
        "props_past": "props_past_iterations",
        "teacher_acts": "teacher_fraction",
        "teacher_until": "teacher_decay_fraction",
        "expert_rows": "expert_episode_fraction",
        "proximal": "proximal_policy",
        "scored_units": "scored_steps",
        "branch_unit": "branch_sampling_step",
        "unfinished": "overprovision",
        "decisions": "rollout_length",
        "actor_rate": "learning_rate",
        "critic_rate": "critic_learning_rate",
    }
    RENAMED_VALUES: ClassVar[Mapping[str, Mapping[str, str]]] = {"time_limit": {"cut": "truncate", "end": "terminate"}}

    iterations: Count = 60
    """Number of iterations of collection and learning."""
    rollout_length: Count = 20
    """Action chunks per parallel environment and iteration, for algorithms with a critic."""
    groups: Count = 64
    """Number of groups of complete episodes per iteration, for algorithms that compare episodes."""
    group_size: Count = 8
    """Number of episodes per group, all with the same initial state."""
    num_initial_states: Natural = 0
    """Size of the pool of initial states, 0 for new ones in every iteration."""
    branch_at: tuple[Natural, ...] = ()
    """Policy calls before which every running episode splits into branch_width episodes that continue from the same
    state.
    """
    branch_width: Count = 2
    """Number of episodes that continue from a split."""
    branch_by: Literal["all", "uncertainty", "arpo", "aepo", "latr"] = "all"
    """Who branches: all alike; uncertainty (TreePO), improbable chunks more; arpo, aepo, latr: who became uncertain."""
    branch_sampling_step: Natural | tuple[Natural, ...] | None = None
    """Number of denoising steps of the branching policy call that branches share, null for none; several, such as
    [0,2], split after each of them, and every branch splits again.
    """
    max_idle_chunks: Natural = 0
    """Consecutive policy calls without movement after which an episode is truncated; 0 for never."""
    overprovision: NonNegative = 0.0
    """Extra groups in flight, as a fraction of those of an iteration. Collection then does not wait for
    the longest episodes, which continue in the next iteration (APRIL). 0 waits for all.
    """
    shards: Count = 1
    """Number of parts that collection is divided into, for several workers (workers.count). Results depend on it, but
    not on the number of workers.
    """
    fsdp: bool = False
    """With several processes (torchrun): divide the policy's weights, gradients and optimiser states among them
    (FSDP2), for policies that do not fit on one GPU.
    """
    overlap_update: bool = False
    """Compute gradients of shards' groups as they arrive, while the same policy plays the others."""
    staleness: Natural = 0
    """Age, in updates, of the policy weights used for collection parallel to learning. Younger after a
    checkpoint, where collection restarts. 0 alternates collection and learning.
    """
    policy_lag: Natural = 0
    """Fixed age, in updates, of the weights used for collection. It alternates with learning; reproducible."""
    props_parts: Natural = 0
    """Number of parts in which an iteration is collected; later parts are steered away from oversampled actions
    (PROPS). 0 disables it.
    """
    props_past_iterations: Natural = 0
    """PROPS: number of earlier iterations whose rollouts are kept and learned from again."""
    teacher_fraction: Fraction = 0.0
    """Initial fraction of policy calls taken by the teacher (DAgger's mixture), 0 for none. They are chosen at random
    and used only by auxiliary losses such as dagger.
    """
    teacher_decay_fraction: Fraction = 0.5
    """Fraction of the run at which teacher_fraction has decayed linearly to 0."""
    teacher_episode_fraction: Fraction = 0.0
    """Fraction of episodes that the teacher plays from their start, scored and learned from as own ones (TempSamp-R1;
    1 / group_size is about one per group), 0 for none. For policies that can score given actions.
    """
    expert_episode_fraction: NonNegative = 0.0
    """Number of expert episodes added to an iteration, as a fraction of its own episodes (DynaWeb); 0 for none. Their
    advantages come from their returns. Supported for token policies and algorithms that compare episodes.
    """
    proximal_policy: Literal["current", "behaviour", "average"] = "current"
    """Policy in the denominator of ratios of older chunks, the centre of the clip range: current (before the update,
    AReaL), behaviour (the one that acted) or average (moving average, PPO-EWMA). coefficient=decoupled_ppo also weights
    by it.
    """
    proximal_decay: Fraction = 0.889
    """EMA decay of the proximal policy per update; its centre of mass lies decay / (1 - decay) updates back."""
    epochs: Count = 5
    """Number of passes over the collected data."""
    minibatch: Count = 2048
    """Minibatch size in action chunks."""
    micro_batch: Natural = 0
    """Micro-batch size: action chunks whose activations are stored at once, 0 for the full minibatch."""
    packed_images: bool = False
    """Whether to store collected images with lossless compression."""
    minibatch_episodes: Natural = 0
    """Minibatch size in complete episodes (for episode ratios), 0 for none."""
    scored_steps: Natural = 0
    """Number of random steps per action chunk whose log-probability is computed, 0 for all. Fewer are cheaper and
    noisier.
    """
    precision: LearningPrecision = "fp32"
    """Precision of policy and critic: fp32, bf16 (faster), bf16_backward (gradients only) or fp8 (tokens)."""
    critic_warmup: Natural = 1
    """Number of first iterations that train only the critic."""
    learning_rate: Positive = 5e-4
    """Learning rate of the policy."""
    actor_warmup: Natural = 30
    """Number of warm-up steps of the policy's learning rate, since Adam's first steps are its largest."""
    critic_learning_rate: Positive = 1e-3
    """Learning rate of the critic."""
    critic_activation: Literal["mish", "silu", "relu"] = "mish"
    """Activation function of the critic: mish (as in DPPO), or silu or relu, which are faster."""
    optimiser: Optimiser = "adamw"
    """Optimiser of the policy: adamw, or adamw8bit (CUDA)."""
    weight_decay: NonNegative = 0.0
    """Weight decay of policy and critic (AdamW)."""
    gradient_clip: Positive = 1.0
    """Maximum global gradient norm."""
    discount: Fraction = 0.99
    """Discount factor per control step; the effective horizon 1 / (1 - discount) should fit within an episode."""
    gae_lambda: Fraction = 0.95
    """Lambda of generalised advantage estimation, per action chunk."""
    time_limit: Literal["truncate", "terminate"] = "truncate"
    """Meaning of a time limit: truncate (the value beyond it is bootstrapped) or terminate (the episode ends). Use
    terminate if an episode has few action chunks: states after the time limit are never visited.
    """
    clip: Positive = 0.2
    """Width of the ratio's clip range, at the cleanest denoising step."""
    clip_base: Positive | None = None
    """The same at the noisiest denoising step, null for clip."""
    clip_high: Positive | None = None
    """Width of the clip range above 1, null for clip."""
    clip_rate: NonNegative = 0.0
    """Growth rate of the clip width from clip_base to clip along the denoising chain, 0 for linear growth."""
    ratio_tolerance: NonNegative = 1e-5
    """Maximum difference between recomputed and recorded log-probabilities of fresh chunks, relative to their size or
    1. For tokens it is at least 1e-4; with precision=bf16, whose rounding depends on the batch size, 2^-5.
    """
    target_kl: Positive | None = 0.1
    """KL divergence of complete action chunks that ends an iteration; an update beyond twice this value is reverted.
    null for none.
    """
    checkpoint_every: Count = 10
    """Number of iterations between checkpoints from which an interrupted run resumes."""
    evaluate_every: Natural = 10
    """Number of iterations between evaluations (one precedes the first iteration), 0 for none."""
    target_success: Fraction | None = None
    """Success rate without exploration noise that ends the run, once the same number of new episodes confirms it; null
    for none.
    """
    overlap_evaluation: bool = False
    """Evaluate the policy of an iteration during the update of the next, on workers that wait then (workers.count).
    Its metrics, and a stop that they cause, are one iteration late.
    """
    patience: Natural = 0
    """Number of consecutive evaluations without a new best after which the run ends, 0 for never. imagine has its own
    patience.
    """

    def __post_init__(self):
        for name in ("iterations", "rollout_length", "groups", "group_size", "epochs", "minibatch", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1.")
        _require_micro_batch(self.micro_batch)
        if self.shards < 1:
            raise ConfigError(f"shards={self.shards} must be at least 1.")
        if self.scored_steps < 0:
            raise ConfigError(f"scored_steps={self.scored_steps} must be at least 1, or 0 for all steps.")
        if not 0 < self.discount <= 1 or not 0 <= self.gae_lambda <= 1:
            raise ConfigError(
                f"discount={self.discount} must be in (0, 1], and gae_lambda={self.gae_lambda} in [0, 1]."
            )
        if min(self.overprovision, self.staleness, self.policy_lag) < 0:
            raise ConfigError(
                f"overprovision={self.overprovision}, staleness={self.staleness} and policy_lag={self.policy_lag} "
                f"must be at "
                "least 0."
            )
        if self.patience < 0 or (self.patience and not self.evaluate_every):
            raise ConfigError(
                f"patience={self.patience} counts evaluations and must be at least 0, but "
                f"evaluate_every={self.evaluate_every}."
            )
        if sum(value > 0 for value in (self.staleness, self.policy_lag, self.props_parts)) > 1:
            raise ConfigError(
                f"staleness={self.staleness} (background collection), policy_lag={self.policy_lag} (synchronous, with "
                f"old "
                f"weights) and props_parts={self.props_parts} (adjusted weights) exclude each other: set only one."
            )
        if self.props_past_iterations and not self.props_parts:
            raise ConfigError(
                f"props_past_iterations={self.props_past_iterations} needs props_parts: set it to 2 parts or more."
            )
        if self.overprovision and self.props_parts:
            raise ConfigError(
                f"overprovision={self.overprovision} cannot be combined with props_parts={self.props_parts}: "
                f"unfinished "
                "groups would move to the next part."
            )
        if self.max_idle_chunks < 0:
            raise ConfigError(f"max_idle_chunks={self.max_idle_chunks} must be at least 0.")
        if not 0 <= self.teacher_fraction <= 1 or self.teacher_decay_fraction <= 0:
            raise ConfigError(
                f"teacher_fraction={self.teacher_fraction} must be a fraction of the policy calls in [0, 1], and "
                f"teacher_decay_fraction={self.teacher_decay_fraction} a fraction of the run above 0."
            )
        if self.teacher_episode_fraction and self.teacher_fraction:
            raise ConfigError(
                f"teacher_fraction={self.teacher_fraction} (policy calls that are not scored) and "
                f"teacher_episode_fraction={self.teacher_episode_fraction} (scored episodes) exclude each other: set "
                "only one."
            )
        if self.expert_episode_fraction < 0:
            raise ConfigError(f"expert_episode_fraction={self.expert_episode_fraction} must be at least 0.")
        if not 0 <= self.proximal_decay < 1:
            raise ConfigError(f"proximal_decay={self.proximal_decay} must be in [0, 1); 0 disables the average.")
        if self.actor_warmup < 1:
            raise ConfigError(f"actor_warmup={self.actor_warmup} must be at least 1; 1 disables the warm-up.")
        if min(self.clip, self.clip_base or self.clip, self.clip_high or self.clip) <= 0:
            raise ConfigError("clip, clip_base and clip_high must be positive.")


def _require_micro_batch(size: int) -> None:
    if size < 0:
        raise ConfigError(f"micro_batch={size} must be at least 1, or 0 to disable it.")


NEARNESS = "bc"
"""Name of the loss that keeps a policy close to its base policy."""


def with_bc_toward_base(settings: FinetuneConfig, weight: float) -> FinetuneConfig:
    """Return the settings with the BC loss toward the base policy added; unchanged when they already name it, or for
    weight 0.
    """
    auxiliaries = tuple(settings.of("auxiliaries", ()))
    if not weight or NEARNESS in auxiliaries:
        return settings
    return replace(
        settings, auxiliaries=(*auxiliaries, NEARNESS), options={**settings.options, NEARNESS: {"weight": weight}}
    )


@dataclass(frozen=True)
class OnlineConfig(FormerNames):
    """Settings for online RL, after offline training or from scratch.

    WSRL (arXiv:2412.07762): warmup=5000 retain=0, RLPD (arXiv:2302.02948): retain=0.5. Raises ConfigError on fractions
    outside [0, 1], and on counts below their minimum.
    """

    RENAMED: ClassVar[Mapping[str, str]] = {
        "retain": "offline_ratio",
        "updates": "utd_ratio",
        "base_share": "base_policy_fraction",
    }

    steps: Natural = 100_000
    """Number of environment steps (control steps), including the warm-up; never exceeded, and 0 plays none."""
    warmup: Natural = 5000
    """Number of environment steps played by the frozen policy before the first update."""
    utd_ratio: NonNegative = 1.0
    """Number of updates per action chunk collected since the warm-up, each on one batch."""
    batch_size: Count = 256
    """Number of action chunks per batch."""
    offline_ratio: Fraction = 0.0
    """Fraction of every batch drawn from recorded data: 0 discards it (WSRL), 0.5 keeps half (RLPD)."""
    base_policy_fraction: Fraction = 0.0
    """Fraction of policy calls that the frozen policy still takes after the warm-up."""
    moments: Literal["reset", "keep"] = "reset"
    """Optimiser moments at the start of online learning: reset, or kept from training on the recorded data."""
    conservative: bool = False
    """Whether cql and cal_ql keep their conservative term online; otherwise they become plain SAC (WSRL)."""
    evaluate_at: tuple[Natural, ...] = (0, 1, 100, 500)
    """Numbers of updates after which the policy is evaluated; early ones show the initial drop in success."""
    evaluate_every: Natural = 5000
    """Number of updates between evaluations after those of evaluate_at, 0 for none."""
    checkpoint_every: Count = 5
    """Number of episode batches between checkpoints for resuming."""

    def __post_init__(self) -> None:
        if not (0 <= self.offline_ratio <= 1 and 0 <= self.base_policy_fraction <= 1):
            raise ConfigError(
                f"offline_ratio={self.offline_ratio} and base_policy_fraction={self.base_policy_fraction} are "
                f"fractions and must be in [0, 1]."
            )
        if min(self.steps, self.warmup, self.evaluate_every, *self.evaluate_at, 0) < 0 or self.utd_ratio < 0:
            raise ConfigError("steps, warmup, utd_ratio, evaluate_every and evaluate_at must not be negative.")
        if self.batch_size < 1 or self.checkpoint_every < 1:
            raise ConfigError("batch_size and checkpoint_every must be at least 1.")


ONLINE_METHODS = Kinds(
    "online method",
    "robopolicy.online_methods",
    {
        "dsrl": "robopolicy.training.configuration:DsrlOnlineConfig",
        "actions": "robopolicy.training.configuration:ActionsOnlineConfig",
        "edit": "robopolicy.training.configuration:EditOnlineConfig",
    },
)
"""Mapping from name to configuration, a dataclass whose `builds` names an `OnlineMethod`: Class(config)."""


@dataclass(frozen=True)
class DsrlOnlineConfig:
    """Noise steering, Wagenmaker et al. 2025, arXiv:2506.15799; online.noise_bound is its setting."""

    builds: ClassVar[str] = "robopolicy.training.online_methods:SteersNoise"


@dataclass(frozen=True)
class ActionsOnlineConfig:
    """An agent that chooses the actions itself: RLPD (arXiv:2302.02948), WSRL (arXiv:2412.07762)."""

    builds: ClassVar[str] = "robopolicy.training.online_methods:ChoosesActions"


@dataclass(frozen=True)
class EditOnlineConfig:
    """Edits of a base policy's action chunks, EXPO, Dong et al. 2025, arXiv:2507.07986.

    The paper's code uses 8 candidates, edit scales of 0.05 to 0.7 of half the action range, and 20 updates of the
    critics per step and one of edit actor and base (online.utd_ratio=20 online.agent.policy_delay=20
    online.method.base_utd_ratio=0.05).
    Raises ConfigError for an edit scale outside (0, 2].
    """

    builds: ClassVar[str] = "robopolicy.training.online_methods:EditsChunks"
    edit_scale: Positive = 0.2
    """edit: largest change of an action element, as a fraction of half its range, at most 2."""
    candidates: Count = 8
    """edit: number of chunks that the base policy samples per decision; each is also edited once."""
    base_utd_ratio: NonNegative = 0.0
    """edit: imitation updates of the base policy, on successful episodes and demonstrations, per update of the critics;
    0 freezes the base.
    """
    base_learning_rate: Positive = 1e-4
    """edit: learning rate of the base policy's imitation."""

    def __post_init__(self) -> None:
        if not 0 < self.edit_scale <= 2:
            raise ConfigError(f"edit_scale={self.edit_scale:g} must be above 0 and at most 2.")


keep_former_names(__name__, {"held_near_base": "with_bc_toward_base"})
