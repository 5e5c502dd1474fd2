"""A network of ours that is also told whether an action was better than usual: advantage conditioning (RECAP).

Source: pi*0.6, Physical Intelligence 2025, arXiv:2511.14759. What is imitated is labelled by its advantage, and the
policy acts under the label "positive". A label scales and shifts what the denoiser makes of the condition, element by
element; labels begin at zero, so that a policy which was not told anything goes on as it was.
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
"""Key of observations [N] int64 that say what each row's action is, an `Improvement`; without it: POSITIVE, to act."""
GAIN = 100.0
"""Of labels: they begin at zero among many weights that have learned already, and would say little for a long time."""
TOLD, WEIGHT = f"{CONDITION}.improvement", f"{CONDITION}.guidance"


class Improvement(IntEnum):
    """What is said of an action: nothing, no better than usual, better."""

    NONE = 0
    NEGATIVE = 1
    POSITIVE = 2


class AdvantageConditioned(nn.Module):
    """A `DenoisingNetwork`: a `ChunkNetwork` whose condition's features depend on what an `Improvement` says.

    inner: that network, and what it was made with. guidance: [], weight w of classifier-free guidance while nobody says
    what the action is, none + w (positive - none) of both predictions; at 1 only one of them is made.
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
        """Return the inner condition, what is told [N, 1], and with guidance its weight [N, 1]."""
        seen = self.inner.encode(observation, generator)[CONDITION]
        told = observation.get(IMPROVEMENT)
        if isinstance(told, Tensor):
            return {CONDITION: seen, TOLD: told.reshape(len(seen), 1)}
        positive = torch.full((len(seen), 1), int(Improvement.POSITIVE), device=seen.device)
        # At weight 1 guidance is the told prediction alone: no second pass.
        if bool(self.guidance == 1):
            return {CONDITION: seen, TOLD: positive}
        return {CONDITION: seen, TOLD: positive, WEIGHT: self.guidance.expand(len(seen), 1)}

    def denoise(self, x: Tensor, time: Tensor, condition: Condition) -> Tensor:
        """Predict [N, P, A]; see `DenoisingNetwork`."""
        denoiser, weight = self.inner.denoiser, condition.get(WEIGHT)
        times, (without, told) = denoiser.encode_time(time), self._features(condition)
        found = denoiser.denoise(x, times, told)
        return found if weight is None else _guided(denoiser.denoise(x, times, without), found, weight[..., None])

    def steps(self, times: Tensor, condition: Condition) -> Steps:
        """Compute what depends on times [K] or on the condition alone; see `SharesSteps`."""
        denoiser, weight = self.inner.denoiser, condition.get(WEIGHT)
        without, told = (SharedSteps(denoiser, times, features) for features in self._features(condition))
        return told if weight is None else _GuidedSteps(without, told, weight[..., None])

    def noise_std(self, times: Tensor, condition: Condition) -> Tensor:
        """Return the learned stds [N, K, 1, A] of steps at times [K] or [N, K]; see `LearnsNoise`."""
        return self.inner.noise_std(times, condition)

    def inside(self) -> ChunkNetwork:
        """Return the inner network; see `Around`."""
        return self.inner

    def encoder_parameters(self) -> Iterable[nn.Parameter]:
        """The weights of the encoders; the labels are not among them, for they act behind what is cached."""
        return self.inner.encoder_parameters()

    def normalizers(self) -> Mapping[str, Normalizer]:
        """Return those of all vector fields."""
        return self.inner.normalizers()

    @property
    def reads_instructions(self) -> bool:
        """Whether the condition depends on the instruction."""
        return self.inner.reads_instructions

    def description(self) -> dict[str, Any]:
        """Return what the inner network was made with."""
        config, fields, action_size, instructions = self.made_with
        return {
            "config": to_plain(config),
            "fields": {key: field.to_json() for key, field in fields.items()},
            "action_size": action_size,
            "instructions": list(instructions),
        }

    @classmethod
    def restore(cls, description: Mapping[str, Any]) -> Self:
        """Return an untrained network of this description."""
        config = from_plain(DenoisingPolicyConfig, description["config"], "network.config")
        fields = {key: Field.from_json(field) for key, field in description["fields"].items()}
        action_size, instructions = int(description["action_size"]), tuple(description["instructions"])
        inner = ChunkNetwork(config, fields, action_size, instructions)
        return cls(inner, config, fields, action_size, instructions)

    def _features(self, condition: Condition) -> tuple[Tensor, Tensor]:
        """Return the condition's features [N, F] where nothing is told, and under what is."""
        seen, told = self.inner.denoiser.encode_condition(condition[CONDITION]), condition[TOLD][:, 0]
        labels = GAIN * torch.stack([self.labels[Improvement.NONE].expand(len(seen), -1, -1), self.labels[told]])
        scale, shift = labels.unbind(-2)
        without, under = seen * (1 + scale) + shift
        return without, under


class _GuidedSteps:
    """Steps of predictions without and with the label, put together."""

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
    """Put an `AdvantageConditioned` around the network of `policy`, which does as before, and return it.

    A policy that has one keeps it; the frozen base of one that is being fine-tuned gets one too, which is told nothing.
    Raises ConfigError for somebody else's network.
    """
    network = policy.network
    if isinstance(network, AdvantageConditioned):
        return network
    if not isinstance(network, ChunkNetwork):
        raise ConfigError(
            f"{type(network).__name__} is no ChunkNetwork, and only the features of its condition can be labelled."
        )
    made_with = policy.config, policy.fields, policy.action.size, policy.instructions
    if isinstance(policy.base, ChunkNetwork):
        policy.base = AdvantageConditioned(policy.base, *made_with).requires_grad_(False)
    policy.network = around = AdvantageConditioned(network, *made_with)
    return around
