"""What a critic of recorded data sees: the vectors of the data, and of images what the policy's encoder makes."""

import copy
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError
from robopolicy.core.examples import example_observation
from robopolicy.core.policy import Policy, TensorObservation
from robopolicy.core.spec import IMAGE_PREFIX, TASK, Field
from robopolicy.rl.offline.interface import Interface, recorded_range


@runtime_checkable
class Encodes(Protocol):
    """A policy that can say what its network makes of an observation."""

    def encode(self, observation: TensorObservation) -> Mapping[str, Tensor]:
        """Return conditions [N, ...] of observations [N, H, ...], by name."""
        ...


class Encoder:
    """Frozen features [N, F] of observations [N, H, ...]: what a policy's network makes of them, as it is now.

    size: F. Raises ConfigError where the policy cannot encode.
    """

    def __init__(self, policy: Policy):
        if not isinstance(policy, Encodes):
            raise ConfigError(f"{type(policy).__name__} sees images alone and has no encode(): no critic can see them.")
        self.policy: Policy = policy
        self._encode = policy.encode
        seen = example_observation(policy.spec, 1, torch.Generator().manual_seed(0), device_of(policy))
        self.size = self(seen).shape[1]

    @torch.no_grad()
    def __call__(self, observation: TensorObservation) -> Tensor:
        """Return the features [N, F]."""
        keys = (*self.policy.spec.observation, TASK)
        found = self._encode({key: observation[key] for key in keys if key in observation})
        return torch.cat([value.flatten(1) for value in found.values()], -1).float()


def critic_interface(policy: Policy, episodes: Episodes, *, deployed: bool = False) -> Interface:
    """Return how critics see decisions of `policy` in `episodes`: chunks as long as its own.

    Where the policy has cameras, the frozen features of its encoder, as it is now, are part of the state. Vectors are
    those of the data, also those that the policy does not read: a critic may know more than its policy, unless it is
    deployed with it. Raises ConfigError where there are only images and the policy cannot encode them.
    """
    tasks = tuple(sorted(set(episodes.tasks) | set(policy.spec.instructions)))
    bounds = recorded_range(episodes)
    # A copy: the critic's inputs must not move while the policy's encoder learns.
    seer = copy.deepcopy(policy) if policy.spec.cameras else policy
    known = {key: field for key, field in episodes.observation_fields.items() if key in policy.spec.observation}
    fields = known if deployed else episodes.observation_fields
    return interface_of(seer, fields, episodes.action_field, tasks, bounds=bounds)


def interface_of(
    policy: Policy,
    fields: Mapping[str, Field],
    action: Field,
    instructions: tuple[str, ...],
    *,
    chunk: int | None = None,
    bounds: tuple[Tensor, Tensor] | None = None,
) -> Interface:
    """Return how critics see `fields`, and actions (or noise) like `action`, of a policy that encodes images for them.

    chunk: control steps of a decision, None for the policy's; bounds: low and high [A] where `action` has none. Raises
    ConfigError as `critic_interface` does.
    """
    spec = policy.spec
    vectors = {key: field for key, field in fields.items() if not key.startswith(IMAGE_PREFIX)}
    encoder = Encoder(policy) if spec.cameras and (isinstance(policy, Encodes) or not vectors) else None
    images = {key: field for key, field in spec.observation.items() if key.startswith(IMAGE_PREFIX)} if encoder else {}
    return Interface(
        {**vectors, **images},
        action,
        chunk=spec.chunk if chunk is None else chunk,
        instructions=instructions,
        features=encoder,
        feature_size=0 if encoder is None else encoder.size,
        history=spec.history,
        bounds=bounds,
    )


def device_of(policy: Policy) -> torch.device:
    """Return where the weights of a policy are, the CPU for one without any."""
    weights = policy.parameters() if isinstance(policy, torch.nn.Module) else iter(())
    return next((weight.device for weight in weights), torch.device("cpu"))
