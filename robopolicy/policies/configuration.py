"""Every choice that makes a denoising policy or a joint model, with its default, and how far any policy of such choices
looks back and ahead; nothing heavy is imported.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Protocol, runtime_checkable

from robopolicy.core.errors import ConfigError
from robopolicy.core.ranges import Count, Natural, NonNegative, Positive, Share
from robopolicy.nn.configuration import (
    AGGREGATES,
    DenoiserKind,
    EdmConfig,
    FlowNoise,
    ImageEncoderConfig,
    NormalizationMode,
    Prediction,
    Spacing,
)

MOST_STEPS = 100_000
"""Of denoising: tables with a row for each are made."""
MOST_PLANNED = 10_000
"""Of a joint model's candidates, and of the values of each of their futures."""
FUTURES = 2
"""That a joint model imagines for every candidate."""


class PolicyKind(Enum):
    """Diffusion (DDPM, DDIM) or rectified flow."""

    DIFFUSION = "diffusion"
    FLOW = "flow"


class Likelihood(Enum):
    """What scores a decision: chain, the transitions of its denoising steps; matching, minus the denoising loss at
    random noise levels, as a surrogate without a density of its own (FPO, arXiv:2507.21053).
    """

    CHAIN = "chain"
    MATCHING = "matching"


class TextEncoder(Enum):
    """How a policy reads the instruction: not at all, or word by word, with an encoder that is trained with it.

    film: and what is seen is scaled and shifted by what was read (`Modulation`).
    """

    NONE = "none"
    WORDS = "words"
    FILM = "film"


class LogpReduction(Enum):
    """How a scored step's log-probability is reduced over the executed chunk steps and action dimensions."""

    MEAN = "mean"
    SUM = "sum"


@dataclass(frozen=True)
class DenoisingPolicyConfig:
    """A diffusion or flow policy over action chunks.

    Axes: H history, C chunk, P predicted steps, T training grid, K sampling steps of which K' are tuned.
    """

    builds: ClassVar[str] = "robopolicy.policies.denoising:DenoisingPolicy"

    kind: PolicyKind = PolicyKind.DIFFUSION
    """diffusion or flow."""
    observation_keys: tuple[str, ...] = ()
    """What it reads, [] for everything the world shows."""
    history: Count = 1
    """Frames H that it reads."""
    chunk: Count = 4
    """Steps C that it executes of a decision."""
    prediction_steps: Count = 4
    """Steps P >= C that it predicts."""
    prefix_steps: Natural = 0
    """First steps that may be given (chunking=trained_rtc)."""
    prefix_decay: NonNegative = 0.0
    """How much rarer training gives more: exp(-it) times a step."""
    denoiser: DenoiserKind = DenoiserKind.MLP
    """mlp (small chunks, fastest), transformer, or unet (long chunks)."""
    width: Count = 256
    """Of the denoiser's layers."""
    depth: Count = 3
    """Hidden layers (mlp), blocks (transformer) or resolutions (unet)."""
    heads: Count = 4
    """Attention heads of the transformer."""
    image: ImageEncoderConfig = field(default_factory=ImageEncoderConfig)
    text_encoder: TextEncoder = TextEncoder.NONE
    """none learns all tasks as one; words reads instructions; film also weighs what is seen by them."""
    text_features: Count = 64
    """Size of an instruction's vector."""
    hidden_words: Share = 0.0
    """Share of words that training hides."""
    prediction: Prediction = Prediction.SAMPLE
    """What a diffusion predicts (a flow: the velocity). With ten steps, sample imitates two to three times as closely
    as epsilon, and still steers the last step.
    """
    denoising_steps: Count = 100
    """Training grid T of the diffusion."""
    sampling_steps: Count = 10
    """Steps K of a chain."""
    finetuned_steps: Count | None = None
    """The last K' that fine-tuning trains, null for half."""
    spacing: Spacing = Spacing.LEADING
    """leading ends at the grid's cleanest step, trailing starts at its noisiest."""
    eta: NonNegative = 1.0
    """1 samples like DDPM, 0 like DDIM."""
    clip: Positive | None = 1.0
    """Bound on the clean estimate in normalised actions, null for none."""
    flow_noise: FlowNoise = FlowNoise.CONSTANT
    """Noise of a flow's steps: none (ode), Flow-GRPO's (sde), the same on every step (constant), ReinFlow's network
    (learned).
    """
    flow_noise_level: NonNegative = 0.1
    """Its scale."""
    flow_noise_bounds: tuple[NonNegative, NonNegative] = (0.05, 0.24)
    """Its smallest and largest standard deviation."""
    min_sampling_std: NonNegative = 0.1
    """Floor of exploration noise, in normalised actions."""
    min_logprob_std: NonNegative = 0.1
    """The same floor in log-probabilities."""
    noise_clip: Positive | None = 3.0
    """Noise is truncated to so many standard deviations, or null."""
    logp_clamp: tuple[float, float] | None = (-5.0, 2.0)
    """Bounds on each element's log-density, null for none; clamping zeroes gradients (how often is among the metrics).
    """
    logp_reduction: LogpReduction = LogpReduction.MEAN
    """Over the executed C x A elements; clip ranges belong to it."""
    noisy_steps: Count | None = None
    """So many random steps of each decision are noisy and scored (1 in pi_RL's flow-SDE), null for all."""
    levels_per_sample: Count = 1
    """Noise levels a sample in training, encoded once."""
    likelihood: Likelihood = Likelihood.CHAIN
    """What scores a decision: chain, its denoising steps, or matching, minus the denoising loss at random noise levels
    (FPO).
    """
    matching_samples: Count = 8
    """Noise levels a decision, for matching."""
    state_normalization: NormalizationMode = NormalizationMode.MIN_MAX
    """mean_std, min_max (range to [-1, 1]) or identity."""
    action_normalization: NormalizationMode = NormalizationMode.MIN_MAX
    """Of actions: mean_std, min_max or identity."""

    def __post_init__(self) -> None:
        if not 1 <= self.chunk <= self.prediction_steps:
            raise ConfigError(
                f"chunk is {self.chunk} and prediction_steps {self.prediction_steps}: a policy executes at least one "
                "step and no more than it predicts."
            )
        if not 0 <= self.prefix_steps <= self.prediction_steps - self.chunk:
            raise ConfigError(
                f"prefix_steps is {self.prefix_steps}: of prediction_steps={self.prediction_steps} the last "
                f"{self.chunk} (chunk) are always learned, so choose 0 to {self.prediction_steps - self.chunk}."
            )
        if not 0 <= self.prefix_decay < math.inf:
            raise ConfigError(f"prefix_decay is {self.prefix_decay}: choose 0 or more.")
        if self.finetuned_steps is not None and not 1 <= self.finetuned_steps <= self.sampling_steps:
            raise ConfigError(
                f"finetuned_steps is {self.finetuned_steps}: choose 1 to sampling_steps, {self.sampling_steps}."
            )
        if self.noisy_steps is not None and not 1 <= self.noisy_steps <= self.sampling_steps:
            raise ConfigError(f"noisy_steps is {self.noisy_steps}: choose 1 to sampling_steps, {self.sampling_steps}.")
        if self.matching_samples < 1:
            raise ConfigError(f"matching_samples is {self.matching_samples}; at least 1 noise level scores a decision.")
        if self.levels_per_sample < 1:
            raise ConfigError(f"levels_per_sample is {self.levels_per_sample}: a sample is denoised at least once.")
        for name in ("denoising_steps", "sampling_steps", "matching_samples", "levels_per_sample"):
            if getattr(self, name) > MOST_STEPS:
                raise ConfigError(f"{name} is {getattr(self, name)}: choose at most {MOST_STEPS}.")
        if not 0 <= self.hidden_words < 1:
            raise ConfigError(f"hidden_words is {self.hidden_words}: it is a share of words, 0 to below 1.")
        if self.text_features < 1:
            raise ConfigError(f"text_features is {self.text_features}: an instruction's vector has at least 1 element.")
        if self.history < 1:
            raise ConfigError(f"history is {self.history}: a policy reads at least one frame.")
        if min(self.min_sampling_std, self.min_logprob_std) < 0:
            raise ConfigError("min_sampling_std and min_logprob_std cannot be negative.")
        for name in ("clip", "noise_clip"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name} is {value}: give a positive bound, or null for none.")
        if self.logp_clamp is not None and self.logp_clamp[0] >= self.logp_clamp[1]:
            raise ConfigError(f"logp_clamp is {self.logp_clamp}: the lower bound comes first.")


@dataclass(frozen=True)
class JointConfig:
    """A diffusion model that is policy, world model and value at once, and how it plans with itself."""

    builds: ClassVar[str] = "robopolicy.policies.joint:JointModel"
    FIXED: ClassVar[Mapping[str, Any]] = {"futures": FUTURES}

    chunk: Count = 4
    """Actions of a decision."""
    width: Count = 64
    """Of the transformer."""
    depth: Count = 3
    """Its layers."""
    heads: Count = 4
    """Its attention heads."""
    batch_size: Count = 256
    """Decisions a training step."""
    policy_share: Share = 0.5
    """Of a batch: decisions of successful episodes, from which it learns to act; the rest, split between world and
    value, is of all episodes.
    """
    discount: Share = 0.99
    """Of the returns that values are, a control step."""
    candidates: Count = 8
    """Actions that planning chooses from, 1 for none."""
    values: Count = 2
    """Values imagined for each of the two futures of a candidate."""
    aggregate: str = "majority"
    """How the values of a candidate become one score: mean, lower_bound, median, or majority, the mean of those on the
    side where more of them are.
    """
    edm: EdmConfig = field(default_factory=lambda: EdmConfig(sigma_data=1.0, steps=6, order=1, sigma_max=20.0))

    def __post_init__(self):
        if min(self.chunk, self.width, self.depth, self.candidates, self.values) < 1:
            raise ConfigError("A joint model needs sizes and counts of at least 1.")
        if max(self.candidates, self.values) > MOST_PLANNED:
            raise ConfigError(f"candidates and values of a joint model are at most {MOST_PLANNED} each.")
        if self.heads < 1 or self.width % self.heads:
            raise ConfigError(f"A joint model's width {self.width} must be a multiple of its heads, {self.heads}.")
        if not 0 < self.policy_share < 1:
            raise ConfigError(f"policy_share {self.policy_share} must be in (0, 1).")
        if self.aggregate not in AGGREGATES:
            raise ConfigError(f"aggregate={self.aggregate} is not known: {', '.join(AGGREGATES)}.")


@dataclass(frozen=True)
class Reach:
    """history: frames that it reads; chunk: control steps that it executes a decision; prediction: that it predicts."""

    history: int
    chunk: int
    prediction: int


@runtime_checkable
class SaysReach(Protocol):
    """Settings of a policy whose reach follows from another file than they are."""

    def reach(self) -> Reach:
        """Return it; raises what reading that file does."""
        ...


def reach_of(config: Any) -> Reach | None:
    """Return the reach of a policy of these settings (`policy.*`), None where they do not say.

    Raises ConfigError where a policy of LeRobot's is asked for without its folder, CheckpointError where that is none.
    """
    if isinstance(config, SaysReach):
        return config.reach()
    chunk = getattr(config, "chunk", None)
    if not isinstance(chunk, int):
        return None
    return Reach(getattr(config, "history", 1), chunk, getattr(config, "prediction_steps", None) or chunk)
