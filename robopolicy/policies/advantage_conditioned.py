"""Advantage-conditioned policy network (RECAP): conditions on whether an action is better than average.

Source: pi*0.6, Physical Intelligence 2025, arXiv:2511.14759. Training actions are labelled by their advantage, and the
policy acts under the label "positive". A label scales and shifts the denoiser's condition features elementwise; labels
start at zero, so the original policy is unchanged at first.
"""

from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Any, Self

import torch
from torch import Tensor, nn

from robopolicy.core.errors import ConfigError
from robopolicy.core.policy import CONDITION, TensorObservation
from robopolicy.core.spec import Field
from robopolicy.core.structured import from_plain, to_plain
from robopolicy.nn.normalizer import Normalizer
from robopolicy.policies.configuration import DenoisingPolicyConfig
from robopolicy.policies.denoising import DenoisingPolicy
from robopolicy.policies.network import ChunkNetwork, Condition, SharedSteps, Steps

IMPROVEMENT = "improvement"
"""Observation key [N] int64 of each row's `Improvement` label; POSITIVE if missing, for acting."""
GAIN = 100.0
"""Gain of the labels: they start at zero among trained weights and would otherwise take effect slowly."""
TOLD, WEIGHT = f"{CONDITION}.improvement", f"{CONDITION}.guidance"


class Improvement(IntEnum):
    """Advantage label of an action: none, not better than average, better."""

    NONE = 0
    NEGATIVE = 1
    POSITIVE = 2


class AdvantageConditioned(nn.Module):
    """A `DenoisingNetwork`: wraps a `ChunkNetwork` and modulates its condition features by an `Improvement` label.

    inner: that network, and its construction arguments. guidance: [], weight w of classifier-free guidance when no
    label is given, none + w (positive - none) of both predictions; with 1 only one prediction is computed.
    """

    guidance: Tensor

    def __init__(
        self,
        inner: ChunkNetwork,
        config: DenoisingPolicyConfig,
        fields: Mapping[str, Field],
        action_size: int,
        instructions: tuple[str, ...],
    ):
        super().__init__()
        self.inner = inner
        self.made_with = config, dict(fields), action_size, tuple(instructions)
        device = next(inner.parameters()).device
        with torch.no_grad():
            features = inner.denoiser.encode_condition(torch.zeros(1, inner.condition_size, device=device))
        self.labels = nn.Parameter(torch.zeros(len(Improvement), 2, features.shape[-1], device=device))
        self.register_buffer("guidance", torch.ones((), device=device))

    def encode(self, observation: TensorObservation, generator: torch.Generator | None = None) -> Condition:
        """Return the inner condition, the label [N, 1], and with guidance its weight [N, 1]."""
        features = self.inner.encode(observation, generator)[CONDITION]
        improvement = observation.get(IMPROVEMENT)
        if isinstance(improvement, Tensor):
            return {CONDITION: features, TOLD: improvement.reshape(len(features), 1)}
        positive = torch.full((len(features), 1), int(Improvement.POSITIVE), device=features.device)
        # At weight 1 guidance is the told prediction alone: no second pass.
        if bool(self.guidance == 1):
            return {CONDITION: features, TOLD: positive}
        return {CONDITION: features, TOLD: positive, WEIGHT: self.guidance.expand(len(features), 1)}

    def denoise(self, x: Tensor, time: Tensor, condition: Condition) -> Tensor:
        """Predict [N, P, A]; see `DenoisingNetwork`."""
        denoiser, weight = self.inner.denoiser, condition.get(WEIGHT)
        times, (without, conditioned) = denoiser.encode_time(time), self._features(condition)
        prediction = denoiser.denoise(x, times, conditioned)
        return (
            prediction
            if weight is None
            else _guided(denoiser.denoise(x, times, without), prediction, weight[..., None])
        )

    def steps(self, times: Tensor, condition: Condition) -> Steps:
        """Precompute the parts that depend only on times [K] or on the condition; see `SharesSteps`."""
        denoiser, weight = self.inner.denoiser, condition.get(WEIGHT)
        without, conditioned = (SharedSteps(denoiser, times, features) for features in self._features(condition))
        return conditioned if weight is None else _GuidedSteps(without, conditioned, weight[..., None])

    def noise_std(self, times: Tensor, condition: Condition) -> Tensor:
        """Return the learned stds [N, K, 1, A] of steps at times [K] or [N, K]; see `LearnsNoise`."""
        return self.inner.noise_std(times, condition)

    def inside(self) -> ChunkNetwork:
        """Return the inner network; see `Around`."""
        return self.inner

    def encoder_parameters(self) -> Iterable[nn.Parameter]:
        """Weights of the encoders; labels are excluded, because they act after the cached features."""
        return self.inner.encoder_parameters()

    def normalizers(self) -> Mapping[str, Normalizer]:
        """Return the normalisers of all vector fields."""
        return self.inner.normalizers()

    @property
    def reads_instructions(self) -> bool:
        """Whether the condition depends on the instruction."""
        return self.inner.reads_instructions

    def description(self) -> dict[str, Any]:
        """Return the construction arguments of the inner network."""
        config, fields, action_size, instructions = self.made_with
        return {
            "config": to_plain(config),
            "fields": {key: field.to_json() for key, field in fields.items()},
            "action_size": action_size,
            "instructions": list(instructions),
        }

    @classmethod
    def restore(cls, description: Mapping[str, Any]) -> Self:
        """Build an untrained network from this description."""
        config = from_plain(DenoisingPolicyConfig, description["config"], "network.config")
        fields = {key: Field.from_json(field) for key, field in description["fields"].items()}
        action_size, instructions = int(description["action_size"]), tuple(description["instructions"])
        inner = ChunkNetwork(config, fields, action_size, instructions)
        return cls(inner, config, fields, action_size, instructions)

    def _features(self, condition: Condition) -> tuple[Tensor, Tensor]:
        """Return the condition features [N, F] without a label, and with it."""
        features, label = self.inner.denoiser.encode_condition(condition[CONDITION]), condition[TOLD][:, 0]
        labels = GAIN * torch.stack([self.labels[Improvement.NONE].expand(len(features), -1, -1), self.labels[label]])
        scale, shift = labels.unbind(-2)
        without, under = features * (1 + scale) + shift
        return without, under


class _GuidedSteps:
    """Combines the steps of unconditional and label-conditioned predictions."""

    def __init__(self, without: Steps, told: Steps, weight: Tensor):
        self.without, self.told = without, told
        self.weight = weight

    def one(self, x: Tensor, step: int) -> Tensor:
        return _guided(self.without.one(x, step), self.told.one(x, step), self.weight)

    def several(self, x: Tensor, chosen: Tensor | None) -> Tensor:
        return _guided(self.without.several(x, chosen), self.told.several(x, chosen), self.weight[..., None])


def _guided(without: Tensor, told: Tensor, weight: Tensor) -> Tensor:
    return without + weight * (told - without)


def condition_on_advantage(policy: DenoisingPolicy) -> AdvantageConditioned:
    """Wrap the network of `policy` in an `AdvantageConditioned` and return the policy, with unchanged behaviour at
    first.

    An existing one is kept; the frozen base of a fine-tuned policy is wrapped too, without labels. Raises ConfigError
    for custom networks.
    """
    network = policy.network
    if isinstance(network, AdvantageConditioned):
        return network
    if not isinstance(network, ChunkNetwork):
        raise ConfigError(
            f"{type(network).__name__} is not a ChunkNetwork, and only the condition features of a ChunkNetwork "
            "can be labelled."
        )
    made_with = policy.config, policy.fields, policy.action.size, policy.instructions
    if isinstance(policy.base, ChunkNetwork):
        policy.base = AdvantageConditioned(policy.base, *made_with).requires_grad_(False)
    policy.network = around = AdvantageConditioned(network, *made_with)
    return around
