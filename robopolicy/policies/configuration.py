"""Every choice that makes a denoising policy, with its default."""

from dataclasses import dataclass, field
from enum import Enum

from robopolicy.core.errors import ConfigError
from robopolicy.nn.denoisers import DenoiserKind
from robopolicy.nn.encoders import ImageEncoderConfig
from robopolicy.nn.normalizer import NormalizationMode
from robopolicy.nn.schedules import DiffusionSchedule, FlowNoise, FlowSchedule, Prediction, Spacing


class PolicyKind(Enum):
    """Diffusion (DDPM, DDIM), rectified flow, or action tokens from a language model (`TokenPolicyConfig`)."""

    DIFFUSION = "diffusion"
    FLOW = "flow"
    TOKEN = "token"


class Likelihood(Enum):
    """What scores a decision: chain, the transitions of its denoising steps; matching, minus the denoising loss at
    random noise levels, as a surrogate without a density of its own (FPO, arXiv:2507.21053).
    """

    CHAIN = "chain"
    MATCHING = "matching"


class LogpReduction(Enum):
    """How a unit's log-probability is reduced over the executed chunk steps and action dimensions."""

    MEAN = "mean"
    SUM = "sum"


@dataclass(frozen=True)
class DenoisingPolicyConfig:
    """A diffusion or flow policy over action chunks.

    observation_keys: what it reads, () for everything the world shows; history: H frames; chunk: C executed steps;
    prediction_steps: P >= C predicted steps.
    Denoiser: width; depth is hidden layers (mlp), blocks (transformer) or resolutions (unet); heads of the transformer.
    Chain: denoising_steps: training grid T of the diffusion; sampling_steps: K units of a chain; finetuned_units: the
    last K' of them are trained by fine-tuning, null for half of K; prediction (diffusion only; a flow predicts the
    velocity): with ten steps, predicting the clean sample imitates two to three times as closely as predicting the
    noise, and unlike it still steers the last step; spacing: of the K steps on the grid; eta: 1 samples like DDPM, 0
    like DDIM; clip: bound on the clean estimate in normalised actions, null for none; flow_noise, flow_noise_level,
    flow_noise_bounds: see `FlowSchedule`.
    Exploration and scores: min_sampling_std: floor of each step's noise, in normalised actions; min_logprob_std: the
    same floor in log-probabilities; noise_clip: noise is truncated to this many standard deviations; logp_clamp: bounds
    on each element's log-density (clamping zeroes gradients: how often is in the extras); logp_reduction over the
    executed C x A elements: state it beside any clip range. noisy_units: so many random steps of each decision are
    noisy and scored, the others follow the noise-free sampler (null: all; pi_RL's flow-SDE has 1); likelihood, with
    matching_samples noise levels a decision for matching, whose actions come from the noise-free sampler.
    """

    kind: PolicyKind = PolicyKind.DIFFUSION
    observation_keys: tuple[str, ...] = ()
    history: int = 1
    chunk: int = 4
    prediction_steps: int = 4
    denoiser: DenoiserKind = DenoiserKind.MLP
    width: int = 256
    depth: int = 3
    heads: int = 4
    image: ImageEncoderConfig = field(default_factory=ImageEncoderConfig)
    prediction: Prediction = Prediction.SAMPLE
    denoising_steps: int = 100
    sampling_steps: int = 10
    finetuned_units: int | None = None
    spacing: Spacing = Spacing.LEADING
    eta: float = 1.0
    clip: float | None = 1.0
    flow_noise: FlowNoise = FlowNoise.CONSTANT
    flow_noise_level: float = 0.1
    flow_noise_bounds: tuple[float, float] = (0.05, 0.24)
    min_sampling_std: float = 0.1
    min_logprob_std: float = 0.1
    noise_clip: float | None = 3.0
    logp_clamp: tuple[float, float] | None = (-5.0, 2.0)
    logp_reduction: LogpReduction = LogpReduction.MEAN
    noisy_units: int | None = None
    likelihood: Likelihood = Likelihood.CHAIN
    matching_samples: int = 8
    state_normalization: NormalizationMode = NormalizationMode.MIN_MAX
    action_normalization: NormalizationMode = NormalizationMode.MIN_MAX

    def __post_init__(self) -> None:
        if not 1 <= self.chunk <= self.prediction_steps:
            raise ConfigError(
                f"chunk is {self.chunk} and prediction_steps {self.prediction_steps}: a policy executes at least one "
                "step and no more than it predicts."
            )
        if self.finetuned_units is not None and not 1 <= self.finetuned_units <= self.sampling_steps:
            raise ConfigError(
                f"finetuned_units is {self.finetuned_units}: choose 1 to sampling_steps, {self.sampling_steps}."
            )
        if self.noisy_units is not None and not 1 <= self.noisy_units <= self.sampling_steps:
            raise ConfigError(f"noisy_units is {self.noisy_units}: choose 1 to sampling_steps, {self.sampling_steps}.")
        if self.matching_samples < 1:
            raise ConfigError(f"matching_samples is {self.matching_samples}; at least 1 noise level scores a decision.")
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


def make_schedule(config: DenoisingPolicyConfig) -> DiffusionSchedule | FlowSchedule:
    """Build the noise schedule that the configuration describes."""
    if config.kind is PolicyKind.FLOW:
        return FlowSchedule(
            config.sampling_steps,
            noise=config.flow_noise,
            level=config.flow_noise_level,
            bounds=config.flow_noise_bounds,
            min_std=config.min_sampling_std,
            clip=config.clip,
        )
    return DiffusionSchedule(
        config.denoising_steps,
        config.sampling_steps,
        config.prediction,
        eta=config.eta,
        min_std=config.min_sampling_std,
        clip=config.clip,
        spacing=config.spacing,
    )
