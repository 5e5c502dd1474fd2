"""Settings of denoising policies and joint models with defaults, and the history and chunk lengths of any policy; no
heavy imports.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any, ClassVar, Literal, Protocol, runtime_checkable

from robopolicy.core.errors import ConfigError
from robopolicy.core.ranges import Count, Fraction, Natural, NonNegative, Positive, Range
from robopolicy.core.structured import FormerNames
from robopolicy.nn.configuration import (
    AGGREGATES,
    MOST_PLANNED,
    DenoiserKind,
    EdmConfig,
    FlowNoise,
    ImageEncoderConfig,
    NormalizationMode,
    Prediction,
    Spacing,
)

MOST_STEPS = 100_000
"""Maximum number of denoising steps: tables have one row per step."""
FUTURES = 2
"""Number of futures that a joint model imagines for every candidate."""


class PolicyKind(Enum):
    """Diffusion (DDPM, DDIM) or rectified flow."""

    DIFFUSION = "diffusion"
    FLOW = "flow"


class Likelihood(Enum):
    """Source of log-probabilities: chain, the transitions of the denoising steps; matching, minus the denoising loss at
    random noise levels, a surrogate without a density (FPO, arXiv:2507.21053).
    """

    CHAIN = "chain"
    MATCHING = "matching"


class TextEncoder(Enum):
    """Instruction encoding: none, or word by word with a jointly trained encoder.

    film: observation features are also scaled and shifted by the text features (`Modulation`).
    """

    NONE = "none"
    WORDS = "words"
    FILM = "film"


class LogpReduction(Enum):
    """Reduction of a step's log-probability over the executed chunk steps and action dimensions."""

    MEAN = "mean"
    SUM = "sum"


@dataclass(frozen=True)
class DenoisingPolicyConfig(FormerNames):
    """A diffusion or flow policy over action chunks.

    Axes: H history, C chunk, P predicted steps, T training grid, K sampling steps, of which K' are fine-tuned.
    """

    builds: ClassVar[str] = "robopolicy.policies.denoising:DenoisingPolicy"
    RENAMED: ClassVar[Mapping[str, str]] = {
        "hidden_words": "word_dropout",
        "spacing": "timestep_spacing",
        "finetuned_units": "finetuned_steps",
        "noisy_units": "noisy_steps",
    }

    kind: PolicyKind = PolicyKind.DIFFUSION
    """Policy class: diffusion or flow."""
    observation_keys: tuple[str, ...] = ()
    """Observation keys that the policy reads, [] for all of the world's."""
    history: Count = 1
    """Number H of observation frames that the policy reads."""
    chunk: Count = 4
    """Number C of control steps executed per action chunk."""
    prediction_steps: Count = 4
    """Number P >= C of control steps predicted per policy call."""
    prefix_steps: Natural = 0
    """Maximum number of first actions that may be given as a prefix (chunking=trained_rtc)."""
    prefix_decay: NonNegative = 0.0
    """Decay of prefix lengths in training: each further step is exp(-prefix_decay) times as likely."""
    denoiser: DenoiserKind = DenoiserKind.MLP
    """Denoiser network: mlp (small chunks, fastest), transformer, or unet (long chunks)."""
    width: Count = 256
    """Width of the denoiser's layers."""
    depth: Count = 3
    """Number of hidden layers (mlp), blocks (transformer) or resolutions (unet)."""
    heads: Count = 4
    """Number of attention heads of the transformer."""
    image: ImageEncoderConfig = field(default_factory=ImageEncoderConfig)
    text_encoder: TextEncoder = TextEncoder.NONE
    """Instruction encoder: none treats all tasks as one; words encodes the words; film also modulates the observation
    features (FiLM).
    """
    text_features: Count = 64
    """Number of features of an instruction."""
    word_dropout: Fraction = 0.0
    """Word dropout probability in training."""
    prediction: Prediction = Prediction.SAMPLE
    """Prediction target of a diffusion policy (a flow predicts the velocity). With ten steps, sample imitates two to
    three times more accurately than epsilon, and still allows the last step to be steered.
    """
    denoising_steps: Count = 100
    """Number T of noise levels of the diffusion in training."""
    sampling_steps: Count = 10
    """Number K of denoising steps per policy call."""
    finetuned_steps: Count | None = None
    """Number K' of final denoising steps that are fine-tuned, null for half."""
    timestep_spacing: Spacing = Spacing.LEADING
    """Spacing of sampling steps: leading ends at the cleanest training noise level, trailing starts at the noisiest."""
    eta: NonNegative = 1.0
    """Noise of diffusion sampling: 1 for DDPM, 0 for DDIM."""
    clip: Positive | None = 1.0
    """Clipping bound of the clean action estimate, in normalised actions; null for none."""
    flow_noise: FlowNoise = FlowNoise.CONSTANT
    """Noise of a flow's steps: ode (none), sde (Flow-GRPO's), constant (the same on every step), learned (ReinFlow's
    network).
    """
    flow_noise_level: NonNegative = 0.1
    """Scale of the flow noise."""
    flow_noise_bounds: tuple[NonNegative, NonNegative] = (0.05, 0.24)
    """Minimum and maximum standard deviation of learned flow noise."""
    min_sampling_std: NonNegative = 0.1
    """Minimum standard deviation of exploration noise, in normalised actions."""
    min_logprob_std: NonNegative = 0.1
    """Minimum standard deviation in log-probabilities, in normalised actions."""
    noise_clip: Positive | None = 3.0
    """Truncation of noise in standard deviations, null for none."""
    logp_clamp: tuple[float, float] | None = (-5.0, 2.0)
    """Lower and upper bound of each element's log-density, null for none; clamped elements have no gradient (their
    fraction is logged).
    """
    logp_reduction: LogpReduction = LogpReduction.MEAN
    """Reduction of log-probabilities over the executed C x A elements; clip ranges depend on it."""
    noisy_steps: Count | None = None
    """Number of random denoising steps per action chunk that have noise and a log-probability (1 in pi_RL's flow-SDE),
    null for all.
    """
    levels_per_sample: Count = 1
    """Number of noise levels per training sample; its observation is encoded once."""
    likelihood: Likelihood = Likelihood.CHAIN
    """Log-probability of an action chunk: chain (of its denoising steps) or matching (minus the denoising loss at
    random noise levels, FPO).
    """
    matching_samples: Count = 8
    """Number of noise levels per action chunk for likelihood=matching."""
    state_normalization: NormalizationMode = NormalizationMode.MIN_MAX
    """State normalisation: mean_std, min_max (range to [-1, 1]) or identity."""
    action_normalization: NormalizationMode = NormalizationMode.MIN_MAX
    """Action normalisation: mean_std, min_max or identity."""

    def __post_init__(self) -> None:
        if not 1 <= self.chunk <= self.prediction_steps:
            raise ConfigError(
                f"chunk={self.chunk} must be from 1 to prediction_steps={self.prediction_steps}: a policy cannot "
                "execute more steps than it predicts."
            )
        if not 0 <= self.prefix_steps <= self.prediction_steps - self.chunk:
            raise ConfigError(
                f"prefix_steps={self.prefix_steps} must be from 0 to {self.prediction_steps - self.chunk}: the last "
                f"{self.chunk} (chunk) of prediction_steps={self.prediction_steps} are always trained."
            )
        if not 0 <= self.prefix_decay < math.inf:
            raise ConfigError(f"prefix_decay={self.prefix_decay} must be at least 0.")
        if self.finetuned_steps is not None and not 1 <= self.finetuned_steps <= self.sampling_steps:
            raise ConfigError(
                f"finetuned_steps={self.finetuned_steps} must be from 1 to sampling_steps={self.sampling_steps}."
            )
        if self.noisy_steps is not None and not 1 <= self.noisy_steps <= self.sampling_steps:
            raise ConfigError(f"noisy_steps={self.noisy_steps} must be from 1 to sampling_steps={self.sampling_steps}.")
        if self.matching_samples < 1:
            raise ConfigError(f"matching_samples={self.matching_samples} must be at least 1.")
        if self.levels_per_sample < 1:
            raise ConfigError(f"levels_per_sample={self.levels_per_sample} must be at least 1.")
        for name in ("denoising_steps", "sampling_steps", "matching_samples", "levels_per_sample"):
            if getattr(self, name) > MOST_STEPS:
                raise ConfigError(f"{name}={getattr(self, name)} must be at most {MOST_STEPS}.")
        if not 0 <= self.word_dropout < 1:
            raise ConfigError(f"word_dropout={self.word_dropout} is a fraction of words and must be in [0, 1).")
        if self.text_features < 1:
            raise ConfigError(f"text_features={self.text_features} must be at least 1.")
        if self.history < 1:
            raise ConfigError(f"history={self.history} must be at least 1 frame.")
        if min(self.min_sampling_std, self.min_logprob_std) < 0:
            raise ConfigError("min_sampling_std and min_logprob_std must not be negative.")
        for name in ("clip", "noise_clip"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name}={value} must be positive, or null for no bound.")
        if self.logp_clamp is not None and self.logp_clamp[0] >= self.logp_clamp[1]:
            raise ConfigError(f"logp_clamp={self.logp_clamp}: the lower bound must come first.")


@dataclass(frozen=True)
class JointConfig(FormerNames):
    """Settings of a diffusion model that is policy, world model and value function at once, and of its planning."""

    builds: ClassVar[str] = "robopolicy.policies.joint:JointModel"
    FIXED: ClassVar[Mapping[str, Any]] = {"futures": FUTURES}
    RENAMED: ClassVar[Mapping[str, str]] = {"policy_share": "policy_fraction"}

    chunk: Count = 4
    """Number of control steps per action chunk."""
    width: Count = 64
    """Width of the transformer."""
    depth: Count = 3
    """Number of layers of the transformer."""
    heads: Count = 4
    """Number of attention heads of the transformer."""
    batch_size: Count = 256
    """Number of action chunks per training step."""
    policy_fraction: Fraction = 0.5
    """Fraction of a batch drawn from successful episodes to train the policy; the rest is from all episodes and trains
    world and value.
    """
    discount: Fraction = 0.99
    """Discount factor per control step of the returns that values predict."""
    candidates: Count = 8
    """Number of action candidates for planning, 1 for none."""
    values: Count = 2
    """Number of values that are sampled per candidate in the world model, for each of its two imagined futures."""
    aggregate: str = "majority"
    """Aggregation of a candidate's values into one score: mean, lower_bound, median, majority (mean of the values on
    the side of the midrange with more values), or successes (mean of those above .05 if they are at least half, else 0,
    as in the paper's code).
    """
    edm: EdmConfig = field(default_factory=lambda: EdmConfig(sigma_data=1.0, steps=6, order=1, sigma_max=20.0))

    def __post_init__(self):
        if min(self.chunk, self.width, self.depth, self.candidates, self.values) < 1:
            raise ConfigError("A joint model needs sizes and counts of at least 1.")
        if max(self.candidates, self.values) > MOST_PLANNED:
            raise ConfigError(f"candidates and values of a joint model must be at most {MOST_PLANNED} each.")
        if self.heads < 1 or self.width % self.heads:
            raise ConfigError(f"A joint model's width {self.width} must be a multiple of its heads, {self.heads}.")
        if not 0 < self.policy_fraction < 1:
            raise ConfigError(f"policy_fraction={self.policy_fraction} must be in (0, 1).")
        if self.aggregate not in AGGREGATES:
            raise ConfigError(f"aggregate={self.aggregate} is not known: use one of {', '.join(AGGREGATES)}.")


@dataclass(frozen=True)
class MemoryPolicyConfig(FormerNames):
    """A policy that remembers: a transformer over the last H control steps; see `policies.memory`."""

    builds: ClassVar[str] = "robopolicy.policies.memory:MemoryPolicy"

    observation_keys: tuple[str, ...] = ()
    """Observation fields that the policy reads, [] for all. They must be vectors; a hidden goal is left out."""
    history: Annotated[int, Range(1, 10_000)] = 64
    """Number H of control steps that it remembers: at least those of the episodes of a trial together."""
    chunk: Annotated[int, Range(1, 10_000)] = 1
    """Number C of control steps per action chunk."""
    bins: Annotated[int, Range(2, 10_000)] = 9
    """Number of bins per action element; an odd number includes 0."""
    width: Annotated[int, Range(1, 10_000)] = 64
    """Width of the transformer, a multiple of twice the number of heads."""
    depth: Annotated[int, Range(1, 100)] = 2
    """Number of layers of the transformer."""
    heads: Annotated[int, Range(1, 1000)] = 2
    """Number of attention heads."""
    sink: bool = True
    """Add a key and a value to every layer and head, for attention to nothing (ReLIC)."""
    sink_variant: Literal["KV", "KV0", "K0V", "K0V0"] = "KV0"
    """Learned parts of the sink: key and value, the key (the value is 0), the value (the key is 0), or none."""
    state_normalization: NormalizationMode = NormalizationMode.MIN_MAX
    """State normalisation: mean_std, min_max (the data's range becomes [-1, 1]) or identity."""
    action_normalization: NormalizationMode = NormalizationMode.MIN_MAX
    """Action normalisation, with the same choices as for states."""


@dataclass(frozen=True)
class Reach:
    """Horizons of a policy. history: number of frames read; chunk: control steps executed per policy call; prediction:
    control steps predicted.
    """

    history: int
    chunk: int
    prediction: int


@runtime_checkable
class SaysReach(Protocol):
    """Policy settings whose history and chunk lengths are defined in another file."""

    def reach(self) -> Reach:
        """Return history and chunk lengths; raises the errors of reading that file."""
        ...


def reach_of(config: Any) -> Reach | None:
    """Return history and chunk lengths of policy settings (`policy.*`); None if they do not define them.

    Raises ConfigError when a LeRobot policy is requested without its folder, CheckpointError when the folder is
    invalid.
    """
    if isinstance(config, SaysReach):
        return config.reach()
    chunk = getattr(config, "chunk", None)
    if not isinstance(chunk, int):
        return None
    return Reach(getattr(config, "history", 1), chunk, getattr(config, "prediction_steps", None) or chunk)
