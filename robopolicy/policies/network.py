"""Networks of denoising policies: the built-in one, and the interface for custom ones.

A network encodes the observation once (`encode`) and predicts noise, clean sample or velocity of latents at every step
of the chain (`denoise`). The condition between them is defined by the network: one vector, tokens with a mask, or the
keys and values of a language model's prefix. Axes: N row, K step, P predicted step, A action dimension.
"""

import copy
import itertools
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor, nn

from robopolicy.core.errors import CheckpointError, ConfigError, RobopolicyWarning
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.policy import CONDITION, TensorObservation, is_condition
from robopolicy.core.registry import Registry
from robopolicy.core.spec import IMAGE_PREFIX, Field
from robopolicy.nn.blocks import NoiseHead
from robopolicy.nn.configuration import FlowNoise
from robopolicy.nn.denoisers import Denoiser, PrefixDenoiser, make_denoiser, with_prefix
from robopolicy.nn.encoders import Modulation, ObservationEncoder, WordEncoder
from robopolicy.nn.normalizer import Normalizer
from robopolicy.nn.precision import is_lowered, run_in_training_precision
from robopolicy.policies.configuration import DenoisingPolicyConfig, PolicyKind, TextEncoder
from robopolicy.policies.interface import instructions_or_default

Condition = Mapping[str, Tensor]
"""Encoded observations, the condition of the denoising network: tensors [N, ...], named "condition" or
"condition.<what>".

Policies with a frozen encoder store them in the latents of their action chunks under these names, and log-probabilities
are computed with them. Rows are independent: the tensors are indexed and repeated along N. The keys of several layers
are stacked in one tensor [N, layers, ...].
"""

NETWORKS = Registry(
    "denoising network",
    "robopolicy.networks",
    {"advantage_conditioned": "robopolicy.policies.advantage_conditioned:AdvantageConditioned"},
)
"""Registry of networks other than `ChunkNetwork`, for checkpoints."""


@runtime_checkable
class DenoisingNetwork(Protocol):
    """An nn.Module for use in a `DenoisingPolicy`; without dropout or batch norm, so that log-probabilities are
    exact.
    """

    def encode(self, observation: TensorObservation, generator: torch.Generator | None = None) -> Condition:
        """Encode an observation [N, H, ...]; a generator enables augmentation (training losses only)."""
        ...

    def denoise(self, x: Tensor, time: Tensor, condition: Condition) -> Tensor:
        """Predict the target set by config.prediction, [N, P, A], for latents x [N, P, A] at times [N] in (0, 1], 1 is
        noise.
        """
        ...

    def encoder_parameters(self) -> Iterable[nn.Parameter]:
        """Weights used by `encode` but not by `denoise`, which train_encoder=False freezes."""
        ...

    def parameters(self) -> Iterable[nn.Parameter]:
        """As in nn.Module."""
        ...

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """As in nn.Module."""
        ...


class Steps(Protocol):
    """A network applied to N observations: computations shared by all steps are done once."""

    def one(self, x: Tensor, step: int) -> Tensor:
        """Predict [N, P, A] for latents x [N, P, A] at the input of step `step` of the times."""
        ...

    def several(self, x: Tensor, chosen: Tensor | None) -> Tensor:
        """Predict [N, k, P, A] for latents x [N, k, P, A] at the input of the steps chosen [N, k]; None: all in
        order.
        """
        ...


type Guided = Callable[[Steps], Steps]
"""Function that wraps the network of a denoising chain; the result takes the steps in its place."""


@runtime_checkable
class SharesSteps(Protocol):
    """Optional: a network that shares computations between steps."""

    def steps(self, times: Tensor, condition: Condition) -> Steps:
        """Prepare steps at times [K]."""
        ...


@runtime_checkable
class LearnsNoise(Protocol):
    """Optional: a network that also predicts the noise std of its steps (flow_noise=learned)."""

    def noise_std(self, times: Tensor, condition: Condition) -> Tensor:
        """Return the stds [N, K, 1, A] of steps at times [K] or [N, K]."""
        ...


@runtime_checkable
class ReadsInstructions(Protocol):
    """Optional: a network that declares whether `encode` reads the instruction, observation["task"], a list of N
    strings.
    """

    @property
    def reads_instructions(self) -> bool:
        """Whether `encode` reads the instruction."""
        ...


@runtime_checkable
class CopiesFrozenBase(Protocol):
    """Optional: a network that builds its frozen base itself, to avoid copying all its weights."""

    def frozen_twin(self) -> DenoisingNetwork:
        """Return a network that keeps this one's current predictions; called only if a base takes steps at all."""
        ...


@runtime_checkable
class WrapsNetwork(Protocol):
    """Optional: a network wrapping another one, which encodes the observation."""

    def inside(self) -> DenoisingNetwork:
        """Return the wrapped network."""
        ...


@runtime_checkable
class Described(Protocol):
    """Optional: a network that can be restored from a checkpoint."""

    def description(self) -> Mapping[str, Any]:
        """Return the JSON data that `restore` needs in addition to the weights."""
        ...

    @classmethod
    def restore(cls, description: Mapping[str, Any]) -> Self:
        """Return an untrained network into which the weights can be loaded."""
        ...


class ChunkNetwork(nn.Module):
    """Built-in network: encoders of observation and instruction to one condition vector [N, D], and a chunk denoiser.

    instructions: supported instructions; with a text encoder they define its vocabulary.
    """

    def __init__(
        self,
        config: DenoisingPolicyConfig,
        fields: Mapping[str, Field],
        action_size: int,
        instructions: tuple[str, ...] = ("",),
    ):
        super().__init__()
        self.fields, self.instructions = tuple(fields), instructions
        self.encoder = ObservationEncoder(fields, config.history, config.state_normalization, config.image)
        self.text_encoder: WordEncoder | None = None
        self.modulation: Modulation | None = None
        if config.text_encoder is not TextEncoder.NONE:
            self.text_encoder = WordEncoder(instructions, config.text_features, config.word_dropout)
        if config.text_encoder is TextEncoder.FILM:
            self.modulation = Modulation(self.encoder.dimension, config.text_features)
        self.condition_size = condition_size = self.encoder.dimension + config.text_features * (
            (self.text_encoder is not None) + (self.modulation is not None)
        )
        channels = action_size + (config.prefix_steps > 0)  # one more channel says which steps are given
        self.denoiser = make_denoiser(
            config.denoiser, config.prediction_steps, channels, condition_size, config.width, config.depth, config.heads
        )
        if config.prefix_steps:
            self.denoiser = PrefixDenoiser(self.denoiser, action_size)
        self.noise_head: NoiseHead | None = None
        if learns_noise(config):
            low, high = config.flow_noise_bounds
            if (floor := max(config.min_sampling_std, config.min_logprob_std)) >= high:
                warnings.warn(
                    f"flow_noise=learned can learn no noise: its upper bound, {high} (flow_noise_bounds), is not above "
                    f"{floor} (min_sampling_std or min_logprob_std). Lower these, or raise the bound.",
                    RobopolicyWarning,
                    stacklevel=2,
                )
            self.noise_head = NoiseHead(condition_size, action_size, max(low, config.min_sampling_std), high)

    def encode(self, observation: TensorObservation, generator: torch.Generator | None = None) -> Condition:
        """Return {"condition": [N, D]}; a generator enables random image shifts and word dropout.

        With a text encoder, raises SpecError when the instruction is missing or has unknown words.
        """
        features = self.encoder(observation, generator)
        if self.text_encoder is None:
            return {CONDITION: features}
        text_features = self.text_encoder(
            instructions_or_default(observation, len(features), self.instructions), generator
        )
        mixed = [] if self.modulation is None else [self.modulation(features, text_features)]
        return {CONDITION: torch.cat([features, text_features, *mixed], -1)}

    def denoise(self, x: Tensor, time: Tensor, condition: Condition) -> Tensor:
        """Predict [N, P, A]; see `DenoisingNetwork`."""
        return self.denoiser(x, time, condition[CONDITION])

    def encoder_parameters(self) -> Iterable[nn.Parameter]:
        """Weights of the image and text encoders."""
        text = [each.parameters() for each in (self.text_encoder, self.modulation) if each is not None]
        return [*self.encoder.parameters(), *itertools.chain(*text)]

    @property
    def reads_instructions(self) -> bool:
        """Whether the condition depends on the instruction."""
        return self.text_encoder is not None

    def steps(self, times: Tensor, condition: Condition) -> Steps:
        """Precompute the parts that depend only on times [K] or on the condition; see `SharesSteps`."""
        return SharedSteps(self.denoiser, times, self.denoiser.encode_condition(condition[CONDITION]))

    def noise_std(self, times: Tensor, condition: Condition) -> Tensor:
        """Return the learned stds [N, K, 1, A]; see `LearnsNoise`. Only available with flow_noise=learned."""
        assert self.noise_head is not None
        return self.noise_head(condition[CONDITION], times)

    def normalizers(self) -> Mapping[str, Normalizer]:
        """Return the normalisers of all vector fields."""
        return {key: self.encoder.normalizer(key) for key in self.fields if not key.startswith(IMAGE_PREFIX)}


class SharedSteps:
    """`Steps` of a denoiser under condition features [N, F]; features of times [K] are computed once per chain."""

    def __init__(self, denoiser: Denoiser, times: Tensor, features: Tensor):
        self.denoiser = denoiser
        self.times, self.condition = denoiser.encode_time(times), features

    def one(self, x: Tensor, step: int) -> Tensor:
        """Predict [N, P, A]; see `Steps`."""
        return self.denoiser.denoise(x, self.times[step], self.condition)

    def several(self, x: Tensor, chosen: Tensor | None) -> Tensor:
        """Predict [N, k, P, A]; see `Steps`."""
        times = self.times if chosen is None else self.times[chosen]
        # Broadcast along the k steps: what is encoded once is not copied k times.
        return self.denoiser.denoise(x, times, self.condition[:, None])


class IndependentSteps:
    """`Steps` of any network at times [K]: one step is one call, and k steps of N rows are one call with N x k rows."""

    def __init__(self, network: DenoisingNetwork, times: Tensor, condition: Condition):
        self.network = network
        self.times, self.condition = times, condition

    def one(self, x: Tensor, step: int) -> Tensor:
        """Predict [N, P, A]; see `Steps`."""
        return self.network.denoise(x, self.times[step].expand(len(x)), self.condition)

    def several(self, x: Tensor, chosen: Tensor | None) -> Tensor:
        """Predict [N, k, P, A]; see `Steps`."""
        rows, count = x.shape[:2]
        times = (self.times if chosen is None else self.times[chosen]).expand(rows, count)
        predictions = self.network.denoise(x.flatten(0, 1), times.flatten(), repeat_rows(self.condition, count))
        return predictions.unflatten(0, (rows, count))


class PrefixedSteps:
    """`Steps` of a network conditioned on the first count[b] [B] steps of `clean` [B, P, A], normalised actions."""

    def __init__(self, steps: Steps, clean: Tensor, count: Tensor):
        self.steps = steps
        self.clean, self.count = clean, count

    def one(self, x: Tensor, step: int) -> Tensor:
        """Predict [B, P, A] for latents x [B, P, A] at the input of `step`; x is ignored at the given steps."""
        return self.steps.one(with_prefix(x, self.clean, self.count), step)

    def several(self, x: Tensor, chosen: Tensor | None) -> Tensor:
        """Predict [B, k, P, A] without given steps, for log-probabilities."""
        return self.steps.several(x, chosen)


class _Lowered:
    """Steps in the run's training precision; predictions are fp32."""

    def __init__(self, steps: Steps):
        self.steps = steps

    def one(self, x: Tensor, step: int) -> Tensor:
        return run_in_training_precision(lambda: self.steps.one(x, step), x.device)

    def several(self, x: Tensor, chosen: Tensor | None) -> Tensor:
        return run_in_training_precision(lambda: self.steps.several(x, chosen), x.device)


def steps_of(network: DenoisingNetwork, times: Tensor, condition: Condition) -> Steps:
    """Prepare `network` for steps at times [K] under a condition of N rows."""
    shares = isinstance(network, SharesSteps)
    steps = network.steps(times, condition) if shares else IndependentSteps(network, times, condition)
    return _Lowered(steps) if is_lowered() else steps


def repeat_rows(condition: Condition, count: int) -> Condition:
    """Repeat every row `count` times in succession, tensors [N x count, ...]."""
    return {name: value.repeat_interleave(count, 0) for name, value in condition.items()}


def rows_in(condition: Condition) -> int:
    """Return N, the number of rows of tensors [N, ...]."""
    return next(iter(condition.values())).shape[0]


def freeze(weights: Iterable[nn.Parameter]) -> None:
    """Freeze weights of any shape."""
    for weight in weights:
        weight.requires_grad_(False)


def frozen_base(network: DenoisingNetwork, acts: bool) -> DenoisingNetwork | None:
    """Return a frozen copy of `network`; acts: whether it takes steps, or is only stored as a record."""
    if isinstance(network, CopiesFrozenBase):
        return network.frozen_twin() if acts else None
    return copy.deepcopy(network).requires_grad_(False)


def learns_noise(config: DenoisingPolicyConfig) -> bool:
    """Whether the network predicts the noise std of its steps."""
    return config.kind is PolicyKind.FLOW and config.flow_noise is FlowNoise.LEARNED


def check_network(network: DenoisingNetwork, config: DenoisingPolicyConfig) -> None:
    """Raise ConfigError unless `network` has the methods required by a denoising policy of `config`."""
    name = type(network).__name__
    if not isinstance(network, nn.Module) or not isinstance(network, DenoisingNetwork):
        raise ConfigError(f"{name} is not a torch.nn.Module with encode, denoise and encoder_parameters.")
    if learns_noise(config) and not isinstance(network, LearnsNoise):
        raise ConfigError(f"flow_noise=learned needs a network with noise_std; {name} has none.")
    inner = network.inside() if isinstance(network, WrapsNetwork) else network
    if config.prefix_steps and not isinstance(inner, ChunkNetwork):
        raise ConfigError(
            f"prefix_steps is supported by ChunkNetwork only, and {name} cannot be given actions: set prefix_steps=0."
        )
    if config.text_encoder is not TextEncoder.NONE and not isinstance(inner, ChunkNetwork):
        raise ConfigError(
            f"text_encoder={config.text_encoder.value} is supported by ChunkNetwork only, and {name} reads the "
            "instruction itself, if at all: set text_encoder=none."
        )


def check_condition(condition: Condition, rows: int) -> Condition:
    """Return a condition of tensors [rows, ...]; raises ConfigError if it cannot be stored among latents."""
    for name, value in condition.items():
        if not is_condition(name) or len(value) != rows:
            raise ConfigError(
                f"The network's condition contains '{name}' with {len(value)} rows for {rows} observations: its "
                f"tensors must be [N, ...], and named '{CONDITION}' or '{CONDITION}.<what>'."
            )
    return condition


def describe_network(network: DenoisingNetwork) -> dict[str, Any] | None:
    """Return the checkpoint description of a network; None for the built-in one, which follows from the policy's
    config.

    Raises CheckpointError for a network that could not be restored.
    """
    if isinstance(network, ChunkNetwork):
        return None
    if not isinstance(network, Described):
        raise CheckpointError(
            f"{type(network).__name__} cannot be saved: add description() and a class method restore(description)."
        )
    return {"class": NETWORKS.name_of(type(network)), "settings": dict(network.description())}


def restore_network(description: Mapping[str, Any] | None, where: Path) -> DenoisingNetwork | None:
    """Return the untrained network described by a checkpoint at `where`, None for the built-in one.

    Raises CheckpointError unless the user has named the network's class in this process (see `Registry.load_saved`).
    """
    if description is None:
        return None
    return NETWORKS.load_saved(description["class"], where).restore(description["settings"])


@runtime_checkable
class HasDropout(Protocol):
    """Optional: a network with dropout, active only in its loss: log-probabilities match acting."""

    def denoise_in_loss(self, x: Tensor, time: Tensor, condition: Condition, generator: torch.Generator) -> Tensor:
        """Predict [N, P, A] as `denoise` does, with dropout drawn from `generator`."""
        ...


def denoise_in_loss(
    network: DenoisingNetwork, x: Tensor, time: Tensor, condition: Condition, generator: torch.Generator
) -> Tensor:
    """Predict [N, P, A] for noisy actions [N, P, A] at times [N] as in training, with dropout if the network has it."""
    if isinstance(network, HasDropout):
        return network.denoise_in_loss(x, time, condition, generator)
    return network.denoise(x, time, condition)


keep_former_names(
    __name__,
    {
        "Around": "WrapsNetwork",
        "MakesBase": "CopiesFrozenBase",
        "LearnsAtRandom": "HasDropout",
        "EveryStep": "IndependentSteps",
    },
)
